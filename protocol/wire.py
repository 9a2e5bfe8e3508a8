"""How envelopes and TensorDicts travel: through pickle, and through Ray's object store.

What goes out is plain containers around flat numpy arrays of bytes, each with its dtype and shape beside it, so it
loads anywhere, whatever the environment says. Pickle protocol 5 hands numpy arrays over as out-of-band buffers, which
makes sending cost about a memory copy; torch's own reduction of a tensor costs several. The integers of a TensorDict
(tokens, positions, masks) go in the narrowest type that holds them: looking for it costs a tenth of writing their bytes
to new memory, and most go in an eighth to a half of them. Everything arrives on the CPU, in the type that it had and in
memory of its own: read-only buffers, which is what an object store gives out, are copied once, to memory that another
batch has left where there is some (`recycled.py`). Tensors are gone through side by side (`threads.py`).
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from protocol import jagged, recycled
from protocol import tensordict_utils as tu
from protocol.errors import BatchMismatchError, NotStorableError
from protocol.threads import side_by_side
from protocol.values import short

VERSION = 3
_READ = (2, VERSION)  # 2: no narrowed integers
_SMALL = 1 << 15  # bytes; below, narrowing does not pay
_PART = 1 << 18  # entries that are looked at and converted at a time
_NARROW = [np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32)]
_WIDE = {torch.int16, torch.int32, torch.int64}
_PLAIN = {str, int, float, bool, bytes, type(None)}  # cannot hold an array

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


# ---- tensors


def serialize_single_tensor(obj: Tensor) -> Packed | PackedJagged:
    """Dense tensor -> (dtype, shape, bytes as flat uint8 array), which share memory with a contiguous CPU tensor."""
    return _pack(obj, {}, narrow=False)


def deserialize_single_tensor(arr: Packed | PackedJagged | tuple[str, tuple[int, ...], Any]) -> Tensor:
    """The inverse of `serialize_single_tensor`, on the CPU. Any buffer of bytes will do; a read-only one is copied.

    Raises BatchMismatchError where dtype, shape and the number of bytes do not fit together.
    """
    return _unpack(arr if isinstance(arr, (Packed, PackedJagged)) else Packed(*arr), {})


def _pack(tensor: Tensor, memo: Memo, name: str = "a tensor", narrow: bool = True) -> Packed | PackedJagged:
    if tensor.is_meta or tensor.is_quantized or (tensor.layout is not torch.strided and not tensor.is_nested):
        raise BatchMismatchError(
            f"{name} is {tensor.layout}, {tensor.dtype}, on {tensor.device}; only dense and jagged travel"
        )
    if not tensor.is_nested:
        return _pack_dense(tensor, narrow)
    values, offsets, dim = jagged.parts_of(tensor)
    return PackedJagged(_pack_dense(values, narrow), _once(offsets, memo, lambda: _pack_dense(offsets, narrow)), dim)


def _once(value: Any, memo: Memo, make: Callable[[], Any]) -> Any:
    if id(value) not in memo:
        memo.setdefault(id(value), (value, make()))  # or what another thread was first with
    return memo[id(value)][1]


def _pack_dense(tensor: Tensor, narrow: bool) -> Packed:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data = _narrowed(flat.numpy()) if narrow and flat.dtype in _WIDE and flat.nbytes >= _SMALL else None
    if data is None:
        data = flat.view(torch.uint8).numpy()
    return Packed(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def _narrowed(flat: np.ndarray) -> np.ndarray | None:
    """Flat integers in the smallest signed type that holds them; None where that is their own."""
    for dtype in _NARROW:
        if dtype.itemsize < flat.itemsize and _fill(data := recycled.empty(flat.size, dtype), flat):
            return data
    return None


def _fill(narrow: np.ndarray, flat: np.ndarray) -> bool:
    """Convert, and stop at what does not fit: False. By parts, so that each is read from memory once."""
    bounds = np.iinfo(narrow.dtype)
    unsigned = f"u{flat.itemsize}"  # as which a negative number is a large one: one look at what has none
    for at in range(0, flat.size, _PART):
        part = flat[at : at + _PART]
        if part.view(unsigned).max() > bounds.max and (part.min() < bounds.min or part.max() > bounds.max):
            return False
        np.copyto(narrow[at : at + _PART], part, casting="unsafe")
    return True


def _unpack(packed: Packed | PackedJagged, memo: Memo) -> Tensor:
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
    dtype = getattr(torch, packed.dtype, None)
    shape = torch.Size(packed.shape)
    data = packed.data if isinstance(packed.data, np.ndarray) else np.frombuffer(packed.data, dtype=np.uint8)
    narrowed = (
        dtype in _WIDE and data.size == shape.numel() and data.dtype in _NARROW and data.itemsize < dtype.itemsize
    )
    if narrowed:
        return torch.from_numpy(_own(data, np.dtype(packed.dtype))).reshape(shape)
    if not isinstance(dtype, torch.dtype) or data.nbytes != shape.numel() * dtype.itemsize:
        raise BatchMismatchError(f"{data.nbytes} bytes are no tensor of shape {tuple(shape)} and dtype {packed.dtype}")
    if not data.size:  # numpy may give an empty array strides that torch cannot view
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data if data.flags.writeable else _own(data, data.dtype)).view(dtype).reshape(shape)


def _own(data: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy as `dtype`."""
    own = recycled.empty(data.size, dtype)
    np.copyto(own, data)
    return own


# ---- TensorDicts


def serialize_tensordict(batch: TensorDictBase) -> dict[str, Any]:
    """TensorDict -> containers around numpy arrays: memory of contiguous CPU tensors, or narrowed copies of ints."""
    tensors, inner, rows, values = {}, {}, {}, {}
    memo: Memo = {}
    for key, entry in tu.entries(batch):
        if isinstance(entry, NonTensorStack):
            rows[key] = tu.unwrap_non_tensor_data(entry)
        elif isinstance(entry, NonTensorData):
            values[key] = entry.data
        elif isinstance(entry, TensorDictBase):
            inner[key] = serialize_tensordict(entry)
        else:
            tensors[key] = entry
    return {
        "version": VERSION,
        "batch_size": tuple(batch.batch_size),
        "tensors": side_by_side(lambda key, tensor: _pack(tensor, memo, repr(key)), tensors, _entries),
        "inner": inner,
        "python": encode_values({"rows": rows, "values": values}),
    }


def deserialize_tensordict(arr: Mapping[str, Any]) -> TensorDict:
    """The inverse of `serialize_tensordict`, on the CPU, in writable memory."""
    if arr["version"] not in _READ:
        raise BatchMismatchError(f"this TensorDict came as format {arr['version']}, this side reads {VERSION}")
    memo: Memo = {}
    python = decode_values(arr["python"])
    source: dict[str, Any] = side_by_side(lambda _, packed: _unpack(packed, memo), arr["tensors"], _entries)
    source |= {key: deserialize_tensordict(inner) for key, inner in arr["inner"].items()}
    source |= {key: tu.stack_of(rows) for key, rows in python["rows"].items()}
    td = TensorDict(source, batch_size=arr["batch_size"])
    for key, value in python["values"].items():
        tu.assign_non_tensor_data(td, key, value)
    return td


def _entries(tensor: Any) -> int:
    """Numbers in a tensor, packed or not."""
    if isinstance(tensor, Tensor):
        return tensor.numel()
    return math.prod((tensor.values if isinstance(tensor, PackedJagged) else tensor).shape)


# ---- Python values


def encode_values(values: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Python values with every tensor in them packed, and whether decoding has anything to do."""
    if _only_plain(values):
        return values, False
    memo: Memo = {}
    found = False

    def pack(leaf: Any) -> Any:
        nonlocal found
        found |= isinstance(leaf, (Tensor, np.ndarray))
        return _pack(leaf, memo) if isinstance(leaf, Tensor) else leaf

    try:
        return _mapped(values, pack, memo), found
    except RecursionError:
        raise NotStorableError("a value is nested too deeply, or holds itself, and cannot be sent or stored") from None


def decode_values(encoded: tuple[dict[str, Any], bool]) -> dict[str, Any]:
    """The inverse of `encode_values`; arrays and tensors come out writable."""
    values, found = encoded
    memo: Memo = {}

    def unpack(leaf: Any) -> Any:
        if isinstance(leaf, (Packed, PackedJagged)):
            return _unpack(leaf, memo)
        return leaf.copy() if isinstance(leaf, np.ndarray) and not leaf.flags.writeable else leaf

    return _mapped(values, unpack, memo) if found else values


class _PlainOnly(pickle.Pickler):
    """Goes through built-in values at the speed of C, and stops at the first that is of another kind."""

    def __init__(self) -> None:
        super().__init__(self, protocol=5)

    def write(self, data: Any) -> int:
        """What was pickled goes nowhere."""
        return len(data)

    def reducer_override(self, obj: Any) -> Any:
        """Called for whatever is not built in; object columns are gone through by their entries."""
        if type(obj) is np.ndarray and obj.dtype == object:
            return list, (obj.ravel().tolist(),)
        if obj is list:
            return NotImplemented
        raise TypeError


def _only_plain(values: Any) -> bool:
    try:
        _PlainOnly().dump(values)
    except Exception:  # not plain, or deeper than pickle goes: to be looked through by hand
        return False
    return True


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
    if isinstance(value, dict):
        items = {key: _mapped(entry, leaf, memo) for key, entry in value.items()}
        if any(items[key] is not entry for key, entry in value.items()):
            result = copy.copy(value)  # of its own kind
            result.update(items)
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
