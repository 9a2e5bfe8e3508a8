"""From a `model` section to a sharded root module: read once on rank 0, checked, spread over the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ppo_lib.config.needs import uses_lora
from ppo_lib.errors import ConfigError, ModelError
from ppo_lib.models import resolve_model_path
from ppo_lib.models.dtypes import parse_dtype
from ppo_lib.workers.attention import PACKED_ATTENTION, register_packed_attention
from ppo_lib.workers.distributed import all_agree
from ppo_lib.workers.fsdp_engine import FSDPEngine, local_tensor, shard_module
from ppo_lib.workers.fused import fuse_layers
from ppo_lib.workers.lora import attach_adapter
from ppo_lib.workers.modules import PolicyModule, ValueModule
from ppo_lib.workers.packing import JaggedRows, pack_rows
from ppo_lib.workers.precision import Precision
from protocol import tensordict_utils as tu

__all__ = ["build_engine", "check_packing", "compile_blocks", "load_policy", "load_value_model"]


logger = logging.getLogger(__name__)


def build_engine(
    load: Callable[[Any, Any, bool], PolicyModule | ValueModule],
    model: Any,
    fsdp: Any,
    *,
    device: torch.device,
    mesh: DeviceMesh,
    optim: Any = None,
    total_optimizer_steps: int = 0,
) -> FSDPEngine:
    """Load a model on rank 0, hand each rank its shard, and put an engine around it.

    With LoRA on, a model that is trained carries an adapter, and nothing but that (and a value head) is trained.

    The other ranks build the same modules without memory and receive one parameter at a time, so no process but rank 0
    ever holds the whole model.

    Args:
        load: `load_policy` or `load_value_model`.
        model: a `model` section.
        fsdp: an `fsdp_config` section.
        device: of this rank.
        mesh: of all ranks.
        optim: an `optim` section; None for a frozen model.
        total_optimizer_steps: of the whole run.

    Raises:
        ModelError: it cannot be read, or cannot be computed on packed rows.
    """
    _determinism(fsdp)
    adapted = optim is not None and uses_lora(model)  # a frozen model is the base
    precision = Precision.of(fsdp.dtype, device)
    fused = device.type == "cpu"
    reads, ranks = dist.get_rank() == 0, dist.get_world_size()
    module = _on_every_rank(load, model, fsdp, fused=fused, adapted=adapted)
    module.to(parse_dtype(fsdp.model_dtype))
    if model.enable_gradient_checkpointing and optim is not None:
        module.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    if fsdp.use_torch_compile and device.type != "cpu":
        compile_blocks(_blocks(module.model))
    elif fsdp.use_torch_compile and reads:
        logger.warning("use_torch_compile changes nothing on a CPU, where compiled code is no faster")

    whole = dict(module.named_parameters()) if reads and ranks > 1 else {}
    whole = {name: parameter.detach() for name, parameter in whole.items()}
    shard_module(module, _blocks(module.model), mesh, fsdp, precision)
    if ranks > 1:
        _spread(module, whole, fsdp, device, reads)
    return FSDPEngine(
        module,
        config=fsdp,
        device=device,
        mesh=mesh,
        precision=precision,
        optim=optim,
        total_optimizer_steps=total_optimizer_steps,
    )


def _on_every_rank(
    load: Callable[[Any, Any, bool], PolicyModule | ValueModule], model: Any, fsdp: Any, *, fused: bool, adapted: bool
) -> PolicyModule | ValueModule:
    """The module: with its values, and checked, on rank 0, without memory on the others. All ranks raise together."""
    module, error = None, None
    try:
        if dist.get_rank() == 0:
            module = load(model, fsdp, False)
            check_packing(module, fused=fused)
            if adapted:
                attach_adapter(module.model, model, getattr(module, "head", None), seed=fsdp.seed, empty=False)
    except Exception as caught:
        error = caught
    all_agree(error)
    if module is None:
        module = load(model, fsdp, True)
        if fused:
            fuse_layers(module.model)
        if adapted:
            attach_adapter(module.model, model, getattr(module, "head", None), seed=fsdp.seed, empty=True)
    return module


def load_policy(model: Any, fsdp: Any, empty: bool) -> PolicyModule:
    """The causal language model of a `model` section, on the CPU; `empty` builds it without memory or values."""
    from transformers import AutoModelForCausalLM

    network, missing = _load(AutoModelForCausalLM, model, fsdp, empty, {})
    _refuse_missing(missing, model.path)
    return PolicyModule(network, fsdp.entropy_from_logits_chunk_size)


def load_value_model(model: Any, fsdp: Any, empty: bool) -> ValueModule:
    """The same network under a head of one number, drawn from `fsdp.seed` unless the files bring one."""
    from transformers import AutoModelForTokenClassification

    network, missing = _load(
        AutoModelForTokenClassification, model, fsdp, empty, {"num_labels": 1, "classifier_dropout": 0.0}
    )
    module = ValueModule(network)
    of_head = {name for name, parameter in network.named_parameters() if parameter in set(module.head.parameters())}
    _refuse_missing(missing - of_head, model.path)
    if missing:
        _draw_head(module.head, getattr(network.config, "initializer_range", 0.02), fsdp.seed)
    return module


def _load(auto_class: Any, model: Any, fsdp: Any, empty: bool, settings: dict[str, Any]) -> tuple[Any, set[str]]:
    """The network, and the names of parameters that its files did not hold."""
    if model.external_lib:
        try:
            import_module(model.external_lib)
        except ImportError as error:
            raise ConfigError(f"model.external_lib={model.external_lib!r} cannot be imported: {error}") from error
    register_packed_attention()
    path = resolve_model_path(model.path)
    config = _network_config(model, path, settings)
    options = {
        "dtype": parse_dtype(fsdp.model_dtype),
        "attn_implementation": PACKED_ATTENTION,
        "trust_remote_code": model.trust_remote_code,
    }
    try:
        if empty:
            with torch.device("meta"):
                return auto_class.from_config(config, **options), set()
        with _quiet_transformers():
            network, report = auto_class.from_pretrained(path, config=config, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        kind = auto_class.__name__.removeprefix("AutoModelFor")
        raise ModelError(f"cannot load {model.path!r} as a model of kind {kind}: {error}") from error
    unused = sorted(name for name in report["unexpected_keys"] if not name.startswith("lm_head."))
    if unused:  # a family may ship more than it computes with (draft layers, say), so that it is no error
        logger.warning("%s: %d tensors of its files are not used, such as %s", model.path, len(unused), unused[0])
    return network, set(report["missing_keys"])


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar, and no table of missing parameters: what is missing is either drawn here or an error."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _network_config(model: Any, path: str, settings: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    source = resolve_model_path(model.hf_config_path) if model.hf_config_path else path
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot read the configuration of {model.path!r}: {error}") from error
    # Dropout would make the probabilities of the update differ from those of the passes before it. Some families'
    # configurations are silent and would get 0.1 on a token classification head.
    dropout = {name: 0.0 for name, value in config.to_dict().items() if _is_dropout(name) and value is not None}
    for name in model.override_config:
        if not hasattr(config, name):
            raise ConfigError(f"model.override_config.{name}: the configuration of {model.path!r} has no such key")
    for name, value in {**dropout, **settings, **model.override_config}.items():
        setattr(config, name, value)
    return config


def _is_dropout(name: str) -> bool:
    return name.endswith(("dropout", "pdrop", "dropout_prob", "dropout_rate"))


def _refuse_missing(missing: set[str], path: str) -> None:
    if missing:
        raise ModelError(f"the files of {path!r} lack {', '.join(sorted(missing))}")


def _draw_head(head: nn.Linear, spread: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.weight.copy_(torch.empty(head.weight.shape).normal_(0.0, spread, generator=generator))
        if head.bias is not None:
            head.bias.zero_()


def _blocks(network: Any) -> list[nn.Module]:
    """The decoder layers, as the family names them."""
    kinds = set(network._no_split_modules or ())
    return [module for module in network.modules() if type(module).__name__ in kinds]


def compile_blocks(blocks: list[nn.Module]) -> None:
    """Compile what lies around the attention of each block, in place, for any number of tokens.

    Attention itself is one kernel already, and its layout, a Python object, would be compiled in anew for each batch.
    """
    for block in blocks:
        for part in block.children():
            if "Attention" not in type(part).__name__:
                part.compile(dynamic=True)


def _spread(module: nn.Module, whole: dict[str, torch.Tensor], fsdp: Any, device: torch.device, reads: bool) -> None:
    """Give every rank its shard of rank 0's values. Buffers too: those of a module built empty hold garbage."""
    if not reads:
        module.to_empty(device="cpu" if fsdp.offload_policy else device)
    for submodule in module.modules():
        for name, buffer in submodule.named_buffers(recurse=False):
            submodule._buffers[name] = buffer.to(device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # `new_empty` of a sharded parameter would be sharded too, and nothing would be received into it
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            value = whole.pop(name).to(device) if reads else empty
            sharded = cast(DTensor, parameter)
            received = distribute_tensor(value, sharded.device_mesh, sharded.placements)
            local_tensor(parameter).copy_(local_tensor(received))
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)


def _determinism(fsdp: Any) -> None:
    torch.manual_seed(fsdp.seed + dist.get_rank())
    if fsdp.full_determinism:
        torch.use_deterministic_algorithms(True, warn_only=True)


# ------------------------------------------------------------------------------------------------- the check at load


def check_packing(module: PolicyModule | ValueModule, fused: bool = False) -> None:
    """Compute short rows packed, two of them behind one prompt, and one by one with the family's own attention.

    A family whose layers mix neighbouring tokens in another way, scale their logits, or ignore the layout of the rows
    would train on wrong numbers without a sign of it; here it is an error before anything starts. With
    `fused` the layers compute with this library's functions from here on.

    Raises:
        ModelError: the two differ.
    """
    network = module.model
    config = network.config.get_text_config()
    generator = torch.Generator().manual_seed(0)
    prompt, *tails = (torch.randint(0, config.vocab_size, (length,), generator=generator) for length in (3, 4, 2, 5))
    rows = [torch.cat([prompt, tails[0]]), torch.cat([prompt, tails[1]]), tails[2]]  # two share a prompt
    columns = {"input_ids": rows, "position_ids": [torch.arange(len(row)) for row in rows]}
    batch: dict[str, Any] = {name: tu.nested_tensor_from_tensor_list(values) for name, values in columns.items()}
    batch["response_lens"] = torch.tensor([len(tail) for tail in (tails[0], tails[1], tails[2][1:])])
    packed = pack_rows(JaggedRows(TensorDict(batch, batch_size=[3])), [0, 1, 2], torch.device("cpu"))
    module.eval()
    with torch.no_grad():
        network.set_attn_implementation("eager")
        outputs = [network(input_ids=row.unsqueeze(0), use_cache=False).logits[0, :-1].float() for row in rows]
        outputs = [values[-count:] for values, count in zip(outputs, packed.response_lens)]
        network.set_attn_implementation(PACKED_ATTENTION)
        if fused:
            fuse_layers(network)
        if isinstance(module, PolicyModule):
            ours = module(packed, 1.0, False)["log_probs"]
        else:
            ours = module(packed)["values"]
    if isinstance(module, PolicyModule):
        outputs = [logits.log_softmax(-1).gather(1, row[-len(logits) :, None]) for logits, row in zip(outputs, rows)]
    theirs = torch.cat(outputs).squeeze(-1)
    difference = (ours - theirs).abs().max().item()
    allowed = 1e-3 if network.dtype == torch.float32 else 0.05
    scale = max(1.0, theirs.abs().max().item())
    if not difference <= allowed * scale:
        raise ModelError(
            f"{type(network).__name__} gives other numbers on packed rows than on single ones (difference "
            f"{difference:.2g}), so it cannot be trained here: its layers or its head do something that packing misses"
        )
