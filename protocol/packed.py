"""Tensors as flat numpy arrays of bytes, each with its dtype and shape beside it.

In this form they load anywhere, whatever the environment says. Pickle protocol 5 hands numpy arrays over as out-of-band
buffers, which makes sending cost about a memory copy; torch's own reduction of a tensor costs several. Where integers
stand in a narrower type they come out in their own, and read-only buffers, which is what an object store gives out, are
copied: every tensor is on the CPU, writable and in memory of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from protocol import jagged, recycled
from protocol.errors import BatchMismatchError
from protocol.values import short

NARROW = [np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32)]
WIDE = {"int16", "int32", "int64"}  # what may stand in one of these

Memo = dict[int, tuple[Any, Any]]  # id of a value -> (the value, which keeps the id its own, and what became of it)


class Packed(NamedTuple):
    """A dense tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray  # flat: the tensor's bytes (uint8), or its integers in a narrower signed type


class PackedJagged(NamedTuple):
    """A jagged tensor. Columns that shared their offsets share one `Packed`, and after unpacking one tensor."""

    values: Packed
    offsets: Packed
    dim: int


def serialize_single_tensor(obj: Tensor) -> Packed | PackedJagged:
    """Dense tensor -> (dtype, shape, bytes as flat uint8 array), which share memory with a contiguous CPU tensor."""
    return pack(obj, {})


def deserialize_single_tensor(arr: Packed | PackedJagged | tuple[str, tuple[int, ...], Any]) -> Tensor:
    """The inverse of `serialize_single_tensor`, on the CPU. Any buffer of bytes will do; a read-only one is copied.

    Raises BatchMismatchError where dtype, shape and the number of bytes do not fit together.
    """
    return unpack(arr if isinstance(arr, (Packed, PackedJagged)) else Packed(*arr), {})


def pack(tensor: Tensor, memo: Memo, name: str = "a tensor") -> Packed | PackedJagged:
    """Share memory with contiguous CPU tensors. `memo`: one for all tensors that may share their offsets."""
    if tensor.is_meta or tensor.is_quantized or (tensor.layout is not torch.strided and not tensor.is_nested):
        raise BatchMismatchError(
            f"{name} is {tensor.layout}, {tensor.dtype}, on {tensor.device}; only dense and jagged travel"
        )
    if not tensor.is_nested:
        return _pack_dense(tensor)
    values, offsets, dim = jagged.parts_of(tensor)
    return PackedJagged(_pack_dense(values), _once(offsets, memo, lambda: _pack_dense(offsets)), dim)


def _once(value: Any, memo: Memo, make: Callable[[], Any]) -> Any:
    if id(value) not in memo:
        memo[id(value)] = (value, make())
    return memo[id(value)][1]


def _pack_dense(tensor: Tensor) -> Packed:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return Packed(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy())


def unpack(packed: Packed | PackedJagged, memo: Memo) -> Tensor:
    """The inverse of `pack`. Raises BatchMismatchError where the parts do not fit together."""
    if not isinstance(packed, PackedJagged):
        return _unpack_dense(packed)
    values, offsets = _unpack_dense(packed.values), _once(packed.offsets, memo, lambda: _unpack_dense(packed.offsets))
    if offsets.dim() != 1 or not 1 <= packed.dim <= values.dim() or not len(offsets):
        raise BatchMismatchError(
            f"offsets {tuple(offsets.shape)} and values {tuple(values.shape)} are no jagged tensor"
        )
    ends = offsets[0] == 0 and offsets[-1] <= values.shape[packed.dim - 1]
    if not ends or bool((offsets.diff() < 0).any()):  # reading rows by such offsets would leave the memory
        raise BatchMismatchError(f"{short(offsets)} are no offsets into {values.shape[packed.dim - 1]} entries")
    return jagged.from_parts(values, offsets, packed.dim)


def _unpack_dense(packed: Packed) -> Tensor:
    data, own = kept(packed)
    if own is not None:
        np.copyto(own, data)
        data = own
    shape, dtype = torch.Size(packed.shape), getattr(torch, packed.dtype)
    if not data.size:  # numpy may give an empty array strides that torch cannot view
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).reshape(shape)


def kept(packed: Packed) -> tuple[np.ndarray, np.ndarray | None]:
    """The numbers of a packed tensor, and memory for a copy where they cannot be kept: narrow, or read-only.

    Raises BatchMismatchError where they are none of this dtype and shape.
    """
    count = math.prod(packed.shape)
    data = packed.data if isinstance(packed.data, np.ndarray) else np.frombuffer(packed.data, dtype=np.uint8)
    if packed.dtype in WIDE and data.size == count and data.dtype in NARROW:
        wide = np.dtype(packed.dtype)
        if data.itemsize < wide.itemsize:
            return data, recycled.empty(count, wide)
    dtype = getattr(torch, packed.dtype, None)
    if not isinstance(dtype, torch.dtype) or data.nbytes != count * dtype.itemsize:
        raise BatchMismatchError(
            f"{data.nbytes} bytes are no tensor of shape {tuple(packed.shape)} and dtype {packed.dtype}"
        )
    return data, None if data.flags.writeable else recycled.empty(data.size, data.dtype)
