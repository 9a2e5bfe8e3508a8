"""Saving and loading one model's training state, on any number of ranks.

    huggingface/     weights in the stored type and config; the driver, which has it, adds the tokenizer
    adapter/         with LoRA, in peft's format: the adapter alone (the weights above have it merged in)
    optimizer/       moments, in the same form
    rng-RANK.safetensors, state.json

Everything is safetensors or JSON, so loading executes nothing. A tensor is stored whole, under the name it has in the
model's own files; ranks take turns at writing files and read only their rows, so the number of ranks may change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from ppo_lib.errors import CheckpointCorruptError, CheckpointError
from ppo_lib.workers.fsdp_engine import FSDPEngine, full_tensor, local_tensor
from ppo_lib.workers.lora import ADAPTER_WEIGHTS, is_adapter, peft_name, refuse_other_adapter, save_adapter_config

__all__ = ["load_checkpoint", "save_checkpoint"]

FORMAT = 1
MAX_FILE_BYTES = 4 << 30
WEIGHTS, OPTIMIZER, ADAPTER = "huggingface/model", "optimizer/optimizer", "adapter"


def save_checkpoint(engine: FSDPEngine, folder: Path, contents: Iterable[str], global_step: int) -> None:
    """Write the parts named in `contents` (model or hf_model, optimizer, extra); a collective.

    Args:
        engine: whose state is written.
        folder: is made if needed.
        contents: what to write.
        global_step: noted in `state.json`.
    """
    parts = set(contents)
    first = dist.get_rank() == 0
    if first:
        for name in ("huggingface", "optimizer"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with engine.resident(optimizer="optimizer" in parts):
        if parts & {"model", "hf_model"}:
            if first:
                _save_config(engine, folder / "huggingface")
            _save_tensors(folder / WEIGHTS, list(_weights(engine)), engine.whole)
            if engine.adapted:
                _save_adapter(engine, folder / ADAPTER)
        if "optimizer" in parts and engine.optimizer is not None:
            states = list(_optimizer_tensors(engine, engine.optimizer))
            _save_tensors(folder / OPTIMIZER, states, lambda _, state: full_tensor(state))
    if "extra" in parts:
        save_file(_rng_states(), folder / f"rng-{dist.get_rank()}.safetensors")
    if first:
        state = {
            "format": FORMAT,
            "global_step": global_step,
            "optimizer_steps": engine.optimizer_steps,
            "contents": sorted(parts),
            "lora": bool(engine.adapted),
        }
        (folder / "state.json").write_text(json.dumps(state, indent=1) + "\n")
    dist.barrier()


def load_checkpoint(engine: FSDPEngine, folder: Path, contents: Iterable[str]) -> int:
    """Read the parts named in `contents` back; returns the global step noted at saving.

    Raises:
        CheckpointError: there is no checkpoint, or it lacks a part that is asked for.
        CheckpointCorruptError: a file is missing, damaged, or does not fit the model.
    """
    state = _read_state(folder)
    parts = {"model" if part == "hf_model" else part for part in contents}
    held = {"model" if part == "hf_model" else part for part in state["contents"]}
    if parts - held:
        raise CheckpointError(
            f"{folder} holds {', '.join(sorted(held))}, not {', '.join(sorted(parts - held))}; "
            "set checkpoint.load_contents to what is there"
        )
    if state.get("lora", False) != bool(engine.adapted):
        then, now = ("without", "with") if engine.adapted else ("with", "without")
        raise CheckpointError(
            f"{folder} was saved {then} LoRA and this run is {now} it: set model.lora_rank as it was, or start anew "
            f"from {folder / 'huggingface'} (model.path), which holds the whole model"
        )
    with engine.resident(optimizer="optimizer" in parts), torch.no_grad():
        if "model" in parts:
            _load_model(engine, folder)
        if "optimizer" in parts and engine.optimizer is not None:
            _load_optimizer(engine, engine.optimizer, _Reader(folder / OPTIMIZER))
    if "extra" in parts:
        engine.optimizer_steps = state["optimizer_steps"]
        _set_rng_states(folder / f"rng-{dist.get_rank()}.safetensors")
    dist.barrier()
    return state["global_step"]


# ---------------------------------------------------------------------------------------------------- what is saved


def _weights(engine: FSDPEngine) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, parameter) for name, parameter in engine.named_parameters() if not is_adapter(name))
    yield from engine.named_persistent_buffers()


def _trained(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """What changes beside a frozen base: the adapter, and a value head."""
    return {name: parameter for name, parameter in engine.named_parameters() if parameter.requires_grad}


def _save_adapter(engine: FSDPEngine, folder: Path) -> None:
    trained = _trained(engine)
    whole = {peft_name(name): full_tensor(parameter.detach()) for name, parameter in trained.items()}
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in whole.items()}, folder / ADAPTER_WEIGHTS)
        heads = {name.rpartition(".")[0] for name in trained if not is_adapter(name)}
        save_adapter_config(engine.module.model, folder, heads)


def _load_model(engine: FSDPEngine, folder: Path) -> None:
    reader, weights = _Reader(folder / WEIGHTS), dict(_weights(engine))
    reader.refuse_others(weights)
    if not engine.adapted:
        for name, tensor in weights.items():
            reader.copy_into(tensor, name)
        return
    refuse_other_adapter(engine.module.model, folder / ADAPTER)
    trained = _trained(engine)
    for name in weights.keys() - engine.adapted.keys() - trained.keys():
        reader.refuse_change(weights[name], name)  # the base itself is not read back: it has not changed
    reader = _Reader((folder / ADAPTER / ADAPTER_WEIGHTS).with_suffix(""))
    reader.refuse_others(map(peft_name, trained))
    for name, tensor in trained.items():
        reader.copy_into(tensor, peft_name(name))


def _optimizer_tensors(engine: FSDPEngine, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in engine.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"{key}.{name}", value


def _save_config(engine: FSDPEngine, folder: Path) -> None:
    network: Any = engine.module.model
    network.config.architectures = [type(network).__name__]
    network.config.dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
    network.config.save_pretrained(folder)
    if network.can_generate():
        network.generation_config.save_pretrained(folder)


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng_states(file: Path) -> None:
    """Go on with this rank's random numbers; a rank that was not there at saving keeps those it was seeded with."""
    if not file.exists():
        return
    with _opened(file) as states:
        torch.set_rng_state(states.get_tensor("cpu"))
        if "cuda" in states.keys() and torch.cuda.is_available():  # noqa: SIM118  (not a mapping)
            torch.cuda.set_rng_state(states.get_tensor("cuda"))


def _load_optimizer(engine: FSDPEngine, optimizer: torch.optim.Optimizer, reader: _Reader) -> None:
    for name, parameter in engine.named_parameters():
        state: dict[str, torch.Tensor] = {}
        for key in reader.keys_of(name):
            whole_shape = reader.shape(f"{key}.{name}")
            fits = whole_shape == tuple(parameter.shape)
            state[key] = torch.zeros_like(parameter) if fits else torch.zeros(whole_shape, device=parameter.device)
            reader.copy_into(state[key], f"{key}.{name}")
        if state:
            optimizer.state[parameter] = state


# ----------------------------------------------------------------------------------------------- tensors and files


def _save_tensors(
    stem: Path, tensors: list[tuple[str, torch.Tensor]], gather: Callable[[str, torch.Tensor], torch.Tensor]
) -> None:
    """Write whole tensors into numbered files with an index, file j by rank j modulo the number of ranks.

    `gather(name, tensor)` gives the whole of a sharded one, on every rank.
    """
    files = _divide([(name, tensor.numel() * tensor.element_size()) for name, tensor in tensors], dist.get_world_size())
    by_name = dict(tensors)
    weight_map: dict[str, str] = {}
    for j, names in enumerate(files):
        suffix = f"-{j + 1:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        file = stem.with_name(f"{stem.name}{suffix}.safetensors")
        mine = j % dist.get_world_size() == dist.get_rank()
        held = {}
        for name in names:
            whole = gather(name, by_name[name])  # on every rank: gathering is a collective
            if mine:
                held[name] = whole.cpu().contiguous()
            weight_map[name] = file.name
        if mine:
            save_file(held, file, metadata={"format": "pt"})
    if dist.get_rank() == 0 and len(files) > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in by_name.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        stem.with_name(f"{stem.name}.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _divide(sizes: list[tuple[str, int]], ranks: int) -> list[list[str]]:
    """Names in order, cut into files so that every rank has one to write and none is too large to hold in memory."""
    limit = min(MAX_FILE_BYTES, -(-sum(size for _, size in sizes) // ranks))
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes:
        if files[-1] and filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


class _Reader:
    """Rows of named tensors out of the files that `_save_tensors` wrote."""

    def __init__(self, stem: Path) -> None:
        self._folder = stem.parent
        index = stem.with_name(f"{stem.name}.safetensors.index.json")
        single = stem.with_name(f"{stem.name}.safetensors")
        if single.exists():
            with _opened(single) as tensors:
                self._file_of = dict.fromkeys(tensors.keys(), single.name)
        elif index.exists():
            self._file_of = _read_json(index)["weight_map"]
        else:
            raise CheckpointCorruptError(f"{stem.parent} has neither {single.name} nor {index.name}")
        self._open: dict[str, Any] = {}

    def refuse_others(self, names: Iterable[str]) -> None:
        """Raise if a tensor is stored that is none of `names`: it would be lost without a word."""
        others = sorted(self._file_of.keys() - set(names))
        if others:
            raise CheckpointCorruptError(
                f"{self._folder} holds {len(others)} tensors that this model does not have, such as {others[0]!r}; "
                "resume with the model it was saved from"
            )

    def keys_of(self, parameter: str) -> list[str]:
        """Which states are stored for a parameter (`exp_avg`, ...)."""
        return [name.partition(".")[0] for name in self._file_of if name.partition(".")[2] == parameter]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._slice(name).get_shape())

    def copy_into(self, tensor: torch.Tensor, name: str) -> None:
        """Overwrite a tensor, or this rank's rows of a sharded one."""
        if self.shape(name) != tuple(tensor.shape):
            raise CheckpointCorruptError(
                f"{self._folder}: {name!r} is stored as {self.shape(name)}, the model has {tuple(tensor.shape)}"
            )
        own = local_tensor(tensor)
        if own.dim() == 0:
            own.copy_(self._handle(name).get_tensor(name))
            return
        start, stop = _own_rows(tensor)
        own.copy_(self._slice(name)[start:stop])

    def refuse_change(self, tensor: torch.Tensor, name: str) -> None:
        """Raise if what is stored is not what this rank holds."""
        own = local_tensor(tensor)
        start, stop = _own_rows(tensor)
        if self.shape(name) != tuple(tensor.shape) or not torch.equal(own.cpu(), self._slice(name)[start:stop]):
            raise CheckpointError(
                f"{self._folder} was trained from another base model than this run's: {name!r} differs; "
                "resume with the model.path it was saved with"
            )

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(name)

    def _handle(self, name: str) -> Any:
        if name not in self._file_of:
            raise CheckpointCorruptError(f"{self._folder} lacks the tensor {name!r}")
        file = self._file_of[name]
        if file not in self._open:
            self._open[file] = _opened(self._folder / file)
        return self._open[file]


def _own_rows(tensor: torch.Tensor) -> tuple[int, int]:
    """Rows of dimension 0 that this rank holds: FSDP2 deals out runs of ceil(rows / ranks)."""
    rows = tensor.shape[0]
    if not isinstance(tensor, DTensor):
        return 0, rows
    mesh = tensor.device_mesh
    dim = mesh.ndim - 1  # the last one shards; with two, the first replicates
    each = -(-rows // mesh.size(dim))
    start = min(rows, each * mesh.get_local_rank(dim))
    return start, min(rows, start + each)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointCorruptError(f"{file} cannot be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointCorruptError(f"{file} cannot be read: {error}") from error


def _read_state(folder: Path) -> dict[str, Any]:
    file = folder / "state.json"
    if not file.exists():
        raise CheckpointError(f"{folder} holds no checkpoint of a worker: it has no state.json")
    state = _read_json(file)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{file} is of format {state.get('format')!r}, this version reads {FORMAT}")
    return state
