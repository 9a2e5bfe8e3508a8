"""Low-rank adapters on a frozen network, through peft: attach, switch off, merge on the way out, read and write.

An adapted linear layer computes W x + s B (A x) with A (r, in), B (out, r) and s = alpha / r (Hu et al. 2021,
arXiv:2106.09685). The adapter lies inside the network's own layers, so FSDP shards and gathers it with them.
Inside the network W is called `q_proj.base_layer.weight`; everywhere else it goes by the name of the model's files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ppo_lib.errors import CheckpointCorruptError, CheckpointError, ConfigError, ModelError

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "adapted_layers",
    "adapter_config",
    "adapter_off",
    "attach_adapter",
    "file_name",
    "is_adapter",
    "merge",
    "peft_name",
    "refuse_other_adapter",
    "save_adapter_config",
]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"
_PEFT_PREFIX = "base_model.model."
_BASE = ".base_layer."
_NOT_PLAIN = (
    "use_dora",
    "use_qalora",
    "lora_bias",
    "fan_in_fan_out",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
)
"""What an adapter's configuration may ask for besides W + s B A."""
_SHAPING = ("r", "lora_alpha", "use_rslora", "target_modules", "exclude_modules", "rank_pattern", "alpha_pattern")


# -------------------------------------------------------------------------------------------------------- attaching


def attach_adapter(network: Any, model: Any, head: nn.Module | None, *, seed: int, empty: bool) -> None:
    """Freeze a transformers network and put an adapter into it, in place, as a `model` section says.

    A is drawn from `seed` and B is zero, so that the adapted network first computes what the base does; with
    `lora_adapter_path` both are read, and the rank, alpha and targets are those of that adapter.

    Args:
        network: the base.
        model: a `model` section with LoRA on.
        head: a value model's head: it stays whole, and trained.
        seed: of A.
        empty: the network has no memory yet; nothing is drawn or read.

    Raises:
        ConfigError: the targets fit no linear layer of the network, or a layer that cannot be adapted.
        ModelError: the adapter cannot be read, is not plain LoRA, or was made for another network.
    """
    from peft import inject_adapter_in_model

    kept = {name for name, module in network.named_modules() if module is head and head is not None}
    config = _configuration(network, model, kept)
    network.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, network, _NAME, low_cpu_mem_usage=empty)
        except ValueError as error:
            raise ConfigError(
                f"model.target_modules={model.target_modules!r} with exclude_modules={model.exclude_modules!r} does "
                f"not fit {type(network).__name__}: {error}"
            ) from error
    _check_layers(network, kept)
    for layer in adapted_layers(network).values():
        layer.cast_input_dtype_enabled = False  # the precision of the whole network decides
    if head is not None:
        head.requires_grad_(True)
    if model.lora_adapter_path and not empty:
        _read(network, Path(model.lora_adapter_path).expanduser(), kept)


def _configuration(network: Any, model: Any, kept: set[str]) -> Any:
    from peft import LoraConfig

    if model.lora_adapter_path:
        config = adapter_config(Path(model.lora_adapter_path).expanduser())
    else:
        targets = model.target_modules if isinstance(model.target_modules, str) else list(model.target_modules)
        exclude = list(model.exclude_modules) if isinstance(model.exclude_modules, tuple) else model.exclude_modules
        config = LoraConfig(
            r=model.lora_rank,
            lora_alpha=model.lora_alpha,
            target_modules=_all_linear(network, kept) if targets == "all-linear" else targets,
            exclude_modules=exclude,
        )
    config.task_type = "TOKEN_CLS" if kept else "CAUSAL_LM"
    config.base_model_name_or_path = model.path
    config.modules_to_save = None  # a head is left in its place and trained there
    config.lora_dropout = 0.0  # it would make the probabilities of the update differ from those before it
    return config


def _all_linear(network: Any, kept: set[str]) -> list[str]:
    """Every linear layer but the heads, by its last name where that names no other module."""
    output, modules = network.get_output_embeddings(), dict(network.named_modules())
    linear = {name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not output} - kept
    others = {name.rpartition(".")[2] for name in modules.keys() - linear}
    return sorted({last if (last := name.rpartition(".")[2]) not in others else name for name in linear})


def _check_layers(network: Any, kept: set[str]) -> None:
    output, layers = network.get_output_embeddings(), adapted_layers(network)
    for name, layer in layers.items():
        if not isinstance(layer.base_layer, nn.Linear) or layer is output or name in kept:
            raise ConfigError(
                f"model.target_modules names {name!r}, a {type(layer.base_layer).__name__}; only linear layers inside "
                f"the network are adapted: leave embeddings and heads out, or use target_modules=all-linear"
            )


def adapted_layers(network: nn.Module) -> dict[str, Any]:
    """Name -> layer that holds a part of the adapter."""
    return {name: module for name, module in network.named_modules() if hasattr(module, "lora_A")}


@contextmanager
def adapter_off(network: nn.Module) -> Iterator[None]:
    """The network as it was before the adapter came: the reference policy."""
    layers = adapted_layers(network).values()
    for layer in layers:
        layer._disable_adapters = True  # peft's own switch also changes what is trained, under FSDP's hands
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


# ------------------------------------------------------------------------------------------------------------ names


def is_adapter(name: str) -> bool:
    """Whether a parameter of the network is part of the adapter."""
    return ".lora_A." in name or ".lora_B." in name


def file_name(name: str) -> str:
    """The name in the model's own files (of an adapter's tensors: in the network without peft's adapter names)."""
    return name.replace(_BASE, ".").replace(f".{_NAME}.", ".") if is_adapter(name) or _BASE in name else name


def peft_name(name: str) -> str:
    """The name in an adapter's file, from a name by `file_name`."""
    return _PEFT_PREFIX + name


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + s B A as a new tensor; (out, in), (r, in), (out, r) -> (out, in) in the type of W."""
    return torch.addmm(weight, b, a, alpha=scale)


# ------------------------------------------------------------------------------------------------------------ files


def adapter_config(folder: Path) -> Any:
    """The `LoraConfig` of an adapter in peft's format.

    Raises:
        ModelError: it is not there, cannot be read, or asks for more than W + s B A.
    """
    from peft import LoraConfig

    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(
                f"model.lora_adapter_path={folder} has no {name}; name a folder saved by peft as safetensors"
            )
    try:
        given = json.loads((folder / ADAPTER_CONFIG).read_text())
        config: Any = LoraConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{folder / ADAPTER_CONFIG} cannot be read: {error}") from error
    more = sorted(name for name in _NOT_PLAIN if given.get(name))
    if given.get("peft_type") != "LORA" or more or given.get("bias", "none") != "none":
        what = ", ".join(f"{name}={given.get(name)}" for name in [*more, "peft_type", "bias"])
        raise ModelError(f"{folder}: only plain LoRA adapters can be trained and merged here, this one has {what}")
    config.inference_mode, config.init_lora_weights = False, True
    return config


def _read(network: Any, folder: Path, kept: set[str]) -> None:
    """Copy an adapter's tensors (and a saved head's) into the network."""
    wanted = {peft_name(file_name(n)): p for n, p in network.named_parameters() if is_adapter(n)}
    heads = {peft_name(n): p for n, p in network.named_parameters() if n.rpartition(".")[0] in kept}
    try:
        with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as stored:
            held = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (not a mapping)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{folder / ADAPTER_WEIGHTS} cannot be read: {error}") from error
    odd = sorted((held.keys() ^ wanted.keys()) - heads.keys())
    odd += sorted(n for n, p in {**wanted, **heads}.items() if n in held and held[n].shape != p.shape)
    if odd:
        raise ModelError(
            f"{folder} does not fit {type(network).__name__}: {len(odd)} tensors are missing, too many or of another "
            f"shape, such as {odd[0]!r}; it was made for another model"
        )
    with torch.no_grad():
        for name, value in held.items():
            {**wanted, **heads}[name].copy_(value)


def save_adapter_config(network: Any, folder: Path, heads: Iterable[str]) -> None:
    """Write `adapter_config.json`, so that peft puts the adapter on the base model again."""
    config = copy(network.peft_config[_NAME])
    config.inference_mode, config.modules_to_save = True, sorted(heads) or None
    config.save_pretrained(str(folder))


def refuse_other_adapter(network: Any, folder: Path) -> None:
    """Raise `CheckpointError` where an adapter was trained with another rank, scale or targets than this one has."""
    try:
        ours, theirs = network.peft_config[_NAME], adapter_config(folder)
    except ModelError as error:
        raise CheckpointCorruptError(str(error)) from error
    differ = [name for name in _SHAPING if _plain(getattr(ours, name)) != _plain(getattr(theirs, name))]
    if differ:
        name = differ[0]
        raise CheckpointError(
            f"{folder} was trained with {name}={_plain(getattr(theirs, name))}, this run has "
            f"{_plain(getattr(ours, name))}; resume with the settings it was saved with"
        )


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, list, tuple)) else value
