"""How envelopes and TensorDicts travel: through pickle, and through Ray's object store.

What goes out is plain containers around flat numpy arrays of bytes, each with its dtype and shape beside it, so it
loads anywhere, whatever the environment says. Pickle protocol 5 hands numpy arrays over as out-of-band buffers, which
makes sending cost about a memory copy; torch's own reduction of a tensor costs several. Everything arrives on the CPU
and in memory of its own: read-only buffers, which is what an object store gives out, are copied once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from protocol import jagged
from protocol import tensordict_utils as tu
from protocol.errors import BatchMismatchError

VERSION = 1
_PLAIN = {str, int, float, bool, bytes, type(None)}  # cannot hold an array

Memo = dict[int, tuple[Any, Any]]  # id of a value -> (the value, which keeps the id its own, and what became of it)


class Packed(NamedTuple):
    """A dense tensor."""

    data: np.ndarray  # uint8, flat
    dtype: str
    shape: tuple[int, ...]


class PackedJagged(NamedTuple):
    """A jagged tensor. Columns that shared their offsets share one `Packed`, and after unpacking one tensor."""

    values: Packed
    offsets: Packed
    dim: int


def encode_tensordict(td: TensorDictBase) -> dict[str, Any]:
    """TensorDict -> containers around numpy arrays, which share memory with contiguous CPU tensors."""
    tensors, inner, rows, values = {}, {}, {}, {}
    memo: Memo = {}
    for key, entry in tu.entries(td):
        if isinstance(entry, NonTensorStack):
            rows[key] = tu.unwrap(entry)
        elif isinstance(entry, NonTensorData):
            values[key] = entry.data
        elif isinstance(entry, TensorDictBase):
            inner[key] = encode_tensordict(entry)
        else:
            tensors[key] = _pack(entry, memo)
    return {
        "version": VERSION,
        "batch_size": tuple(td.batch_size),
        "tensors": tensors,
        "inner": inner,
        "python": encode_values({"rows": rows, "values": values}),
    }


def decode_tensordict(encoded: Mapping[str, Any]) -> TensorDict:
    """The inverse of `encode_tensordict`, on the CPU, in writable memory."""
    if encoded["version"] != VERSION:
        raise BatchMismatchError(f"this TensorDict came as format {encoded['version']}, this side reads {VERSION}")
    memo: Memo = {}
    python = decode_values(encoded["python"])
    source: dict[str, Any] = {key: _unpack(packed, memo) for key, packed in encoded["tensors"].items()}
    source |= {key: decode_tensordict(inner) for key, inner in encoded["inner"].items()}
    source |= {key: tu.stack_of(rows) for key, rows in python["rows"].items()}
    td = TensorDict(source, batch_size=encoded["batch_size"])
    return tu.assign_non_tensor(td, **python["values"])


def encode_values(values: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Python values with every tensor in them packed, and whether decoding has anything to do."""
    memo: Memo = {}
    found = False

    def pack(leaf: Any) -> Any:
        nonlocal found
        found |= isinstance(leaf, (Tensor, np.ndarray))
        return _pack(leaf, memo) if isinstance(leaf, Tensor) else leaf

    return _mapped(values, pack, memo), found


def decode_values(encoded: tuple[dict[str, Any], bool]) -> dict[str, Any]:
    """The inverse of `encode_values`; arrays and tensors come out writable."""
    values, found = encoded
    memo: Memo = {}

    def unpack(leaf: Any) -> Any:
        if isinstance(leaf, (Packed, PackedJagged)):
            return _unpack(leaf, memo)
        return leaf.copy() if isinstance(leaf, np.ndarray) and not leaf.flags.writeable else leaf

    return _mapped(values, unpack, memo) if found else values


def _mapped(value: Any, leaf: Callable[[Any], Any], memo: Memo) -> Any:
    """Apply `leaf` to whatever stands in nested dicts, lists, tuples and object arrays; rebuild only what changes.

    A value that occurs twice (the rows of a repeated envelope share theirs) is mapped once and stays shared.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    result = value
    if kind is dict:
        items = {key: _mapped(entry, leaf, memo) for key, entry in value.items()}
        if any(items[key] is not entry for key, entry in value.items()):
            result = items
    elif kind in (list, tuple) or (kind is np.ndarray and value.dtype == object):
        entries = value.ravel().tolist() if kind is np.ndarray else value
        if not set(map(type, entries)) <= _PLAIN:
            mapped = [_mapped(entry, leaf, memo) for entry in entries]
            if any(new is not old for new, old in zip(mapped, entries)):
                result = _like(value, mapped)
    else:
        result = leaf(value)
    memo[id(value)] = (value, result)
    return result


def _like(value: Any, entries: list[Any]) -> Any:
    if not isinstance(value, np.ndarray):
        return type(value)(entries)
    array = np.empty(len(entries), dtype=object)
    for at, entry in enumerate(entries):
        array[at] = entry
    return array.reshape(value.shape)


def _pack(tensor: Tensor, memo: Memo) -> Packed | PackedJagged:
    if tensor.is_nested:
        values, offsets, dim = jagged.parts_of(tensor)
        if id(offsets) not in memo:
            memo[id(offsets)] = (offsets, _pack_dense(offsets))
        return PackedJagged(_pack_dense(values), memo[id(offsets)][1], dim)
    return _pack_dense(tensor)


def _pack_dense(tensor: Tensor) -> Packed:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return Packed(flat.numpy(), str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _unpack(packed: Packed | PackedJagged, memo: Memo) -> Tensor:
    if isinstance(packed, PackedJagged):
        if id(packed.offsets) not in memo:
            memo[id(packed.offsets)] = (packed.offsets, _unpack_dense(packed.offsets))
        return jagged.from_parts(_unpack_dense(packed.values), memo[id(packed.offsets)][1], packed.dim)
    return _unpack_dense(packed)


def _unpack_dense(packed: Packed) -> Tensor:
    dtype = getattr(torch, packed.dtype)
    if not packed.data.size:  # numpy may give an empty array strides that torch cannot view
        return torch.empty(packed.shape, dtype=dtype)
    data = packed.data if packed.data.flags.writeable else packed.data.copy()
    return torch.from_numpy(data).view(dtype).reshape(packed.shape)
