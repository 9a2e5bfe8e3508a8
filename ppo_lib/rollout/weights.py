"""Named tensors on their way into an engine: packed into buckets, checked on arrival, copied into place.

A bucket is one flat buffer of bytes with a table of names, shapes and dtypes, so that it crosses a process boundary
as a single out-of-band array and at most one of them exists at a time.
"""

from __future__ import annotations

import difflib
import pickle
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import reduce_tensor

from ppo_lib.errors import RolloutError

NamedTensor = tuple[str, torch.Tensor]
_ALIGNMENT = 16  # of each tensor in the buffer, so that any dtype can be viewed in place
_WORDS = 1024


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies in a bucket. `dtype` is the attribute of `torch` that names it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class WeightBucket:
    """Some named tensors in one buffer.

    Args:
        entries: One per tensor, in order.
        data: (n,) uint8, in host memory, or on a GPU where sender and engine share one.
        checksum: Of names and bytes, made by the sender.
    """

    entries: tuple[TensorEntry, ...]
    data: np.ndarray | torch.Tensor
    checksum: int

    @classmethod
    def pack(cls, tensors: Iterable[NamedTensor], device: torch.device | None = None) -> WeightBucket:
        """Copy tensors of any device and dtype into one buffer on `device`; None is host memory."""
        tensors = list(tensors)
        entries: list[TensorEntry] = []
        offset = 0
        for name, tensor in tensors:
            nbytes = tensor.numel() * tensor.element_size()
            entries.append(
                TensorEntry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset, nbytes)
            )
            offset += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        data = torch.zeros(offset, dtype=torch.uint8, device=device)
        for entry, (_, tensor) in zip(entries, tensors, strict=True):
            _view(data, entry).copy_(tensor.detach())
        return cls(tuple(entries), data.numpy() if device is None else data, _checksum(entries, data))

    def share(self) -> SharedBucket:
        """What another process needs to open a bucket on a GPU; this one must be kept until it has."""
        assert isinstance(self.data, torch.Tensor), "a bucket in host memory is sent as it is"
        torch.cuda.synchronize(self.data.device)
        return SharedBucket(self.entries, pickle.dumps(reduce_tensor(self.data)), self.checksum)

    def unpack(self) -> Iterator[NamedTensor]:
        """The tensors, as views of the buffer: copy them, never keep or write them.

        Raises:
            RolloutError: The bytes are not those that were packed.
        """
        data = self.data if isinstance(self.data, torch.Tensor) else _as_tensor(self.data)
        if _checksum(self.entries, data) != self.checksum:
            raise RolloutError(
                f"a bucket of {len(self.entries)} tensors arrived damaged: its checksum differs from the sender's "
                f"(first tensor {self.entries[0].name})"
            )
        for entry in self.entries:
            yield entry.name, _view(data, entry)


@dataclass(frozen=True)
class SharedBucket:
    """A bucket that lies on a GPU and stays there: `handle` opens its memory in another process."""

    entries: tuple[TensorEntry, ...]
    handle: bytes
    checksum: int


def buckets(
    named_tensors: Iterable[NamedTensor], max_bytes: int, device: torch.device | None = None
) -> Iterator[WeightBucket]:
    """Pack tensors in order, at most `max_bytes` a bucket; a tensor above that is a bucket of its own.

    `device` is where the buckets lie; None is host memory.
    """
    held: list[NamedTensor] = []
    size = 0
    for name, tensor in named_tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if held and size + nbytes > max_bytes:
            yield WeightBucket.pack(held, device)
            held, size = [], 0
        held.append((name, tensor))
        size += nbytes
    if held:
        yield WeightBucket.pack(held, device)


def _as_tensor(data: np.ndarray) -> torch.Tensor:
    with warnings.catch_warnings():
        # A buffer that came through a shared store is read-only, and the views are only read.
        warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
        return torch.from_numpy(data)


def _view(data: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """One tensor of a buffer, sharing its memory."""
    raw = data[entry.offset : entry.offset + entry.nbytes]
    return raw.view(getattr(torch, entry.dtype)).view(entry.shape)


def _checksum(entries: Iterable[TensorEntry], data: torch.Tensor) -> int:
    """A sum over the buffer's 64-bit words that depends on their places, mixed with the table; 25 ms for 256 MB."""
    words = data.view(torch.int64)
    body = words[: len(words) // _WORDS * _WORDS].view(-1, _WORDS)
    rest = words[body.numel() :]
    odd = torch.arange(1, 2 * max(_WORDS, len(body)), 2, device=data.device)
    columns = (body.sum(0) * odd[:_WORDS]).sum()
    rows = (body[:, :8].sum(1) * odd[: len(body)]).sum()
    total = int(columns) + int(rows) + int((rest * odd[: len(rest)]).sum())
    table = zlib.crc32(repr([(e.name, e.shape, e.dtype, e.offset) for e in entries]).encode())
    return hash((total, table)) & 0x7FFFFFFFFFFFFFFF  # hash() of integers does not depend on the process


class WeightLedger:
    """Keeps count of a weight update: which tensors a model takes, in which shape, and which are still missing.

    A tied weight (one parameter under two names) may arrive under either name or both. Buffers that the module saves
    are accepted and not required.

    Args:
        module: The model; its parameters may lie on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        saved = module.state_dict().keys()
        self.targets: dict[str, torch.Tensor] = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **{name: tensor for name, tensor in module.named_buffers() if name in saved},
        }
        self._same: dict[str, set[str]] = {}
        aliases: dict[int, set[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._same[name] = aliases.setdefault(id(parameter), set())
            self._same[name].add(name)
        self._missing = list(aliases.values())
        self._seen: set[str] = set()

    def take(self, name: str, shape: Sequence[int]) -> bool:
        """Note an arrival. Returns whether it is a parameter that has not arrived under another name.

        Raises:
            RolloutError: The name is unknown or comes twice, or the shape differs.
        """
        target = self.targets.get(name)
        if target is None:
            near = difflib.get_close_matches(name, self.targets, n=3, cutoff=0.4)
            raise RolloutError(
                f"the weight update holds a tensor {name} that the engine's model does not have"
                + (f"; near names: {', '.join(near)}" if near else "")
            )
        if name in self._seen:
            raise RolloutError(f"the weight update holds the tensor {name} twice")
        if tuple(shape) != tuple(target.shape):
            raise RolloutError(
                f"the weight update holds {name} with shape {tuple(shape)}; "
                f"the engine's model has {tuple(target.shape)}"
            )
        first = name in self._same and not self._same[name] & self._seen
        self._seen.add(name)
        return first

    def finish(self) -> None:
        """Check that nothing is missing.

        Raises:
            RolloutError: Some parameters did not arrive; the message counts and names them.
        """
        missing = sorted(min(names) for names in self._missing if not names & self._seen)
        if missing:
            raise RolloutError(
                f"the weight update brought {len(self._seen)} tensors and left out {len(missing)} of "
                f"{len(self._missing)} parameters: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
            )


class WeightReceiver:
    """Copies arriving tensors into a module's parameters and keeps count of what is still missing."""

    def __init__(self, module: nn.Module) -> None:
        self._ledger = WeightLedger(module)

    def take(self, bucket: WeightBucket) -> None:
        """Copy a bucket in.

        Raises:
            RolloutError: The bucket is damaged, or a name is unknown or comes twice, or a shape differs.
        """
        for name, tensor in bucket.unpack():
            self._ledger.take(name, tensor.shape)
            with torch.no_grad():
                self._ledger.targets[name].copy_(tensor)

    def finish(self) -> None:
        """Check that nothing is missing; errors as `WeightLedger.finish`."""
        self._ledger.finish()
