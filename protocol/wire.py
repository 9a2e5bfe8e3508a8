"""How envelopes and TensorDicts travel: through pickle, and through Ray's object store.

What goes out is plain containers around flat arrays (`packed.py`), of which large ones have been made smaller
(`compact.py`), and Python values; whatever arrives is on the CPU and in writable memory of its own.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from protocol import compact
from protocol import tensordict_utils as tu
from protocol.errors import BatchMismatchError, NotStorableError
from protocol.packed import Memo, Packed, PackedJagged, pack, unpack

VERSION = 4
_READ = (2, 3, VERSION)  # 2: no narrowed integers, 3: no block of them
_FEW_BYTES = 1 << 20  # of a pickle inside a pickle, which shares nothing with others
_ARRAY_PARTS = (np.ndarray, np.dtype, np.dtype(object), np.empty(0, object).__reduce__()[0])  # of an array's pickle
_PLAIN = {str, int, float, bool, bytes, type(None)}  # cannot hold an array


# ---- TensorDicts


def serialize_tensordict(batch: TensorDictBase, in_block: bool = False) -> dict[str, Any]:
    """TensorDict -> containers around numpy arrays: memory of contiguous CPU tensors, or narrowed copies of ints.

    `in_block`: the narrowed copies are one array, which Ray's object store takes faster.
    """
    tensors, inner, rows, values = {}, {}, {}, {}
    memo: Memo = {}
    for key, entry in tu.entries(batch):
        if isinstance(entry, NonTensorStack):
            rows[key] = tu.unwrap_non_tensor_data(entry)
        elif isinstance(entry, NonTensorData):
            values[key] = entry.data
        elif isinstance(entry, TensorDictBase):
            inner[key] = serialize_tensordict(entry, in_block)
        else:
            tensors[key] = pack(entry, memo, repr(key))
    python = encode_values({"rows": rows, "values": values})
    tensors, block = compact.narrowed(tensors, in_block)
    return {
        "version": VERSION,
        "batch_size": tuple(batch.batch_size),
        "tensors": tensors,
        "block": block,
        "inner": inner,
        "python": python,
    }


def deserialize_tensordict(arr: Mapping[str, Any], meanwhile: Callable[[], Any] | None = None) -> TensorDict:
    """The inverse of `serialize_tensordict`, on the CPU, in writable memory; `meanwhile` is called beside it."""
    if arr["version"] not in _READ:
        raise BatchMismatchError(f"this TensorDict came as format {arr['version']}, this side reads {VERSION}")
    tensors, memo = arr["tensors"], {}
    if (block := arr.get("block")) is not None:
        tensors = compact.taken_from(block, tensors)
    python = decode_values(arr["python"])
    source: dict[str, Any] = {key: unpack(packed, memo) for key, packed in compact.owned(tensors, meanwhile).items()}
    source |= {key: deserialize_tensordict(inner) for key, inner in arr["inner"].items()}
    source |= {key: tu.stack_of(rows) for key, rows in python["rows"].items()}
    td = TensorDict(source, batch_size=arr["batch_size"])
    for key, value in python["values"].items():
        tu.assign_non_tensor_data(td, key, value)
    return td


# ---- Python values


def pickle_values(values: dict[str, Any]) -> bytes | tuple[dict[str, Any], bool]:
    """Python values for `unpickle_values`: as one pickle if they are plain and few, else as `encode_values` has them.

    Within that pickle everything stays shared that was; with what is pickled beside the envelope it does not.
    """
    pickled = _Start(_FEW_BYTES)
    if not _only_plain(values, pickled):
        return _encoded(values)
    return b"".join(pickled.parts) if pickled.size <= pickled.keep else (values, False)


def unpickle_values(values: bytes | tuple[dict[str, Any], bool]) -> dict[str, Any]:
    """The inverse of `pickle_values`. Not for what a file holds."""
    return pickle.loads(values) if isinstance(values, bytes) else decode_values(values)


def encode_values(values: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Python values with every tensor in them packed, and whether decoding has anything to do."""
    return (values, False) if _only_plain(values, _Start(0)) else _encoded(values)


def _encoded(values: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    memo: Memo = {}
    found = False

    def packed(leaf: Any) -> Any:
        nonlocal found
        found |= isinstance(leaf, (Tensor, np.ndarray))
        return pack(leaf, memo) if isinstance(leaf, Tensor) else leaf

    try:
        return _mapped(values, packed, memo), found
    except RecursionError:
        raise NotStorableError("a value is nested too deeply, or holds itself, and cannot be sent or stored") from None


def decode_values(encoded: tuple[dict[str, Any], bool]) -> dict[str, Any]:
    """The inverse of `encode_values`; arrays and tensors come out writable."""
    values, found = encoded
    memo: Memo = {}

    def unpacked(leaf: Any) -> Any:
        if isinstance(leaf, (Packed, PackedJagged)):
            return unpack(leaf, memo)
        return leaf.copy() if isinstance(leaf, np.ndarray) and not leaf.flags.writeable else leaf

    return _mapped(values, unpacked, memo) if found else values


class _Start:
    """A file that keeps what is written to it if that is not too long."""

    def __init__(self, keep: int) -> None:
        self.keep = keep  # bytes
        self.size = 0
        self.parts: list[bytes] = []

    def write(self, data: Any) -> int:
        """For pickle."""
        self.size += len(data)
        if self.size <= self.keep:
            self.parts.append(bytes(data))
        return len(data)


class _PlainOnly(pickle.Pickler):
    """Goes through built-in values and arrays of them at the speed of C, and stops at the first of another kind."""

    def reducer_override(self, obj: Any) -> Any:
        """Called for whatever is not built in."""
        if (type(obj) is np.ndarray and obj.dtype == object) or any(obj is part for part in _ARRAY_PARTS):
            return NotImplemented
        raise TypeError


def _only_plain(values: Any, file: _Start) -> bool:
    try:
        _PlainOnly(file, protocol=5).dump(values)
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
