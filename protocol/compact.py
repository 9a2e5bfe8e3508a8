"""The tensors of a TensorDict together: in little memory to send them, in memory of their own when they have arrived.

The integers of large tensors (tokens, positions, masks) are sent in the narrowest type that holds them. Looking for it
costs a tenth of writing the integers to new memory, and most take an eighth to a half of that. They go in one block,
since an object store copies one large buffer faster than many. Memory comes from batches that were dropped where there
is some (`recycled.py`), and tensors are gone through side by side (`threads.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from protocol import recycled
from protocol.errors import BatchMismatchError
from protocol.packed import NARROW, WIDE, Packed, PackedJagged, kept
from protocol.threads import side_by_side

_SMALL = 1 << 15  # bytes; below, narrowing does not pay
_PART = 1 << 18  # entries that are converted and looked at at a time
_FEW = 1 << 12  # entries at either end, which rule out most types that are too narrow
_LINE = 64  # bytes; an array in the block begins at a multiple of this

Tensors = dict[str, Packed | PackedJagged]


class Place(NamedTuple):
    """Where in the block some integers are. Stands for the `data` of a `Packed`."""

    start: int
    dtype: str


def narrowed(tensors: Tensors, in_block: bool) -> tuple[Tensors, np.ndarray | None]:
    """The same, with the integers of large ones in the smallest signed type that holds them.

    `in_block`: what was narrowed is a place in the block, which comes second, and no array; unless a first guess at
    some type was wrong.
    """
    wide, flats, places, end = [], [], [], 0
    for packed in _dense(tensors):
        if packed.dtype in WIDE and packed.data.nbytes >= _SMALL:
            flat = packed.data.view(packed.dtype)
            if (dtype := _guess(flat)) is not None:
                wide.append(packed)
                flats.append(flat)
                places.append(Place(end, dtype.name))
                end += -(-flat.size * dtype.itemsize // _LINE) * _LINE
    block = recycled.empty(end, np.dtype(np.uint8))
    theirs = [_there(block, place, flat.size) for flat, place in zip(flats, places)]
    for place, array in zip(places, theirs):  # what lies between is sent too, and has been someone's memory
        block[place.start + array.nbytes : place.start + array.nbytes + -array.nbytes % _LINE] = 0
    found = side_by_side(_filled, list(zip(flats, theirs)), [flat.nbytes for flat in flats])
    if in_block and found and all(array is there for array, there in zip(found, theirs)):
        return _with({id(packed): place for packed, place in zip(wide, places)}, tensors), block
    return _with({id(packed): array for packed, array in zip(wide, found) if array is not None}, tensors), None


def taken_from(block: np.ndarray, tensors: Tensors) -> Tensors:
    """The same, with arrays that share the block's memory where places are. BatchMismatchError: they do not fit."""
    arrays = {}
    for packed in _dense(tensors):
        if isinstance(packed.data, Place):
            arrays[id(packed)] = _there(block, packed.data, math.prod(packed.shape))
    return _with(arrays, tensors)


def owned(tensors: Tensors, meanwhile: Callable[[], Any] | None = None) -> Tensors:
    """The same, with what may not be kept (narrow, or read-only) copied; `meanwhile` is called beside that."""
    parts = [(packed, *kept(packed)) for packed in _dense(tensors)]
    copies = [(packed, data, own) for packed, data, own in parts if own is not None]
    side_by_side(lambda job: np.copyto(job[2], job[1]), copies, [own.nbytes for _, _, own in copies], meanwhile)
    return _with({id(packed): own for packed, _, own in copies}, tensors)


def _dense(tensors: Tensors) -> Iterator[Packed]:
    """Each once."""
    known: set[int] = set()
    for entry in tensors.values():
        for packed in entry[:2] if isinstance(entry, PackedJagged) else (entry,):
            if id(packed) not in known:
                known.add(id(packed))
                yield packed


def _with(data: Mapping[int, Any], tensors: Tensors) -> Tensors:
    """`data`: by the id of the `Packed` that it is to stand in. What was one stays one."""
    new = {id(packed): packed._replace(data=data[id(packed)]) for packed in _dense(tensors) if id(packed) in data}

    def renewed(packed: Packed) -> Packed:
        return new.get(id(packed), packed)

    return {
        key: PackedJagged(renewed(entry.values), renewed(entry.offsets), entry.dim)
        if isinstance(entry, PackedJagged)
        else renewed(entry)
        for key, entry in tensors.items()
    }


def _there(block: np.ndarray, place: Place, count: int) -> np.ndarray:
    dtype = np.dtype(place.dtype)
    if dtype not in NARROW or place.start < 0 or place.start + count * dtype.itemsize > block.nbytes:
        raise BatchMismatchError(f"{count} integers at {place} are not in the {block.nbytes} bytes that came with them")
    return block[place.start : place.start + count * dtype.itemsize].view(dtype)


def _guess(flat: np.ndarray, than: int = 0) -> np.dtype | None:
    """The smallest type of more than `than` bytes that holds what is at the ends, if that saves anything."""
    for dtype in NARROW:
        if than < dtype.itemsize < flat.itemsize and _fits(flat[:_FEW], dtype) and _fits(flat[-_FEW:], dtype):
            return dtype
    return None


def _filled(job: tuple[np.ndarray, np.ndarray]) -> np.ndarray | None:
    """The second array with the integers of the first, or one of a wider type, or None where none is narrower."""
    flat, narrow = job
    while not _convert(flat, narrow):
        dtype = _guess(flat, than=narrow.itemsize)
        if dtype is None:
            return None
        narrow = recycled.empty(flat.size, dtype)
    return narrow


def _convert(flat: np.ndarray, narrow: np.ndarray) -> bool:
    """False, and stopped, where something does not fit. By parts, so that each is read from memory once."""
    largest, unsigned = np.iinfo(narrow.dtype).max, flat.view(f"u{flat.itemsize}")
    for at in range(0, flat.size, _PART):
        end = at + _PART
        narrow[at:end] = flat[at:end]
        if unsigned[at:end].max() > largest and not _fits(flat[at:end], narrow.dtype):  # or negative
            return False
    return True


def _fits(part: np.ndarray, dtype: np.dtype) -> bool:
    bounds = np.iinfo(dtype)
    return part.min() >= bounds.min and part.max() <= bounds.max
