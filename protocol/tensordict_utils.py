"""What people do to a TensorDict of rows, on dense, jagged and non-tensor entries alike (imported as `tu`).

A TensorDict here has its rows along dimension 0 and holds four kinds of entry: dense tensors (B, ...), jagged tensors
(B, t_i, ...), `NonTensorStack`s with one Python value per row, and `NonTensorData`, one Python value for all rows.
TensorDict's own indexing loops over the rows of a stack and gives every jagged column offsets of its own, after which
two of them cannot be added; these functions do neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from protocol import jagged
from protocol.errors import BatchMismatchError, FieldMissingError
from protocol.jagged import nested_tensor_from_tensor_list
from protocol.values import common_dtype, deep_equal, first_differing_row, short, tensor_equal

__all__ = [
    "assign_non_tensor",
    "assign_non_tensor_stack",
    "chunk_tensordict",
    "concat_tensordict",
    "entries",
    "get",
    "index_select_tensor_dict",
    "need",
    "nested_tensor_from_tensor_list",
    "pad_to_divisor",
    "pop",
    "row_index",
    "take_rows",
    "union_tensor_dict",
    "unpad",
]

COLUMN_DTYPES = "__column_dtypes__"
"""Entry that DataProto.to_tensordict adds where an object column has a dtype of its own: {column: numpy dtype}."""

_MISSING = object()
_OBJECT = np.dtype(object)
AnyTensorDict = TypeVar("AnyTensorDict", bound=TensorDictBase)
_Joined = dict[tuple[int, ...], tuple[list[jagged.Parts], Tensor]]  # ids of offsets -> (what keeps them alive, joined)


def entries(td: TensorDictBase) -> Iterator[tuple[str, Any]]:
    """Top-level (key, entry) pairs with the non-tensor wrappers left on (`td.items()` takes them off)."""
    return ((key, td.get(key)) for key in td.keys())  # noqa: SIM118 (iterating a TensorDict gives its rows)


def assign_non_tensor(td: AnyTensorDict, **values: Any) -> AnyTensorDict:
    """Store each value once for the whole TensorDict, lists included, in place. `get` gives it back as it was."""
    for key, value in values.items():
        td.set_non_tensor(key, value)
    return td


def assign_non_tensor_stack(td: TensorDictBase, key: str, rows: Sequence[Any]) -> TensorDictBase:
    """Store one Python value per row, in place."""
    if len(rows) != len(td):
        raise BatchMismatchError(f"{key!r} has {len(rows)} entries for {len(td)} rows")
    return td.set(key, stack_of(rows))


def stack_of(rows: Sequence[Any]) -> NonTensorStack:
    """NonTensorStack with one entry per row. (`from_list` would make a further dimension of rows that are lists.)"""
    return NonTensorStack(*[NonTensorData(row) for row in rows])


def unwrap(entry: Any) -> Any:
    """Tensor as it is, NonTensorStack -> list of rows, NonTensorData -> its value."""
    if isinstance(entry, NonTensorStack):
        return [row.data if isinstance(row, NonTensorData) else row.tolist() for row in entry.tensordicts]
    return entry.data if isinstance(entry, NonTensorData) else entry


def get(td: TensorDictBase, key: str, default: Any = None) -> Any:
    """Entry without its non-tensor wrapper (a list where there is one value per row), or `default`."""
    return unwrap(td.get(key)) if key in td.keys() else default  # noqa: SIM118


def need(td: TensorDictBase, key: str) -> Any:
    """Entry without its wrapper. FieldMissingError, naming what is there, where it is absent."""
    if key not in td.keys():  # noqa: SIM118
        raise FieldMissingError(f"no field {key!r}; present: {sorted(map(str, td.keys()))}")
    return get(td, key)


def pop(td: TensorDictBase, key: str, default: Any = _MISSING) -> Any:
    """Remove an entry and return it without its wrapper. FieldMissingError where it is absent without a default."""
    if default is not _MISSING and key not in td.keys():  # noqa: SIM118
        return default
    value = need(td, key)
    td.del_(key)
    return value


def row_index(index: Any, rows: int) -> Tensor | slice:
    """Slice, mask, list, array or tensor -> slice of step 1 within 0..rows, or checked non-negative int64 index.

    A boolean index is a mask over all rows, whatever holds it. Negative indices count from the end.
    """
    if isinstance(index, slice):
        start, stop, step = index.indices(rows)
        return slice(start, max(start, stop)) if step == 1 else torch.arange(rows)[range(start, stop, step)]
    index = torch.as_tensor(np.asarray(index) if isinstance(index, (list, tuple)) else index).detach().cpu()
    if index.numel() == 0:
        index = index.long()
    if index.dim() != 1 or index.is_floating_point() or index.is_complex():
        raise BatchMismatchError(
            "rows are selected by a one-dimensional index of integers or booleans, "
            f"found {index.dtype} {tuple(index.shape)}"
        )
    if index.dtype == torch.bool:
        if len(index) != rows:
            raise BatchMismatchError(f"a boolean mask of {len(index)} entries cannot select from {rows} rows")
        return index.nonzero().flatten()
    index = index.long()
    outside = (index < -rows) | (index >= rows)
    if bool(outside.any()):
        raise IndexError(f"row {int(index[outside][0])} is out of range for {rows} rows")
    return torch.where(index < 0, index + rows, index)


def take_rows(td: TensorDictBase, rows: Tensor | slice) -> TensorDict:
    """Rows of `td` by the result of `row_index`. A slice gives tensors that share memory; an index copies."""
    count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
    plans: dict[int, tuple[Tensor, jagged.Gather]] = {}  # by id of the offsets, which the entry keeps alive

    def take(key: str, entry: Any) -> Any:
        if isinstance(entry, NonTensorData):
            return NonTensorData(entry.data, batch_size=[count, *entry.batch_size[1:]])
        if isinstance(entry, NonTensorStack):
            held = entry.tensordicts
            return NonTensorStack(*(held[rows] if isinstance(rows, slice) else [held[row] for row in rows.tolist()]))
        if isinstance(entry, TensorDictBase):
            return take_rows(entry, rows)
        if entry.is_nested:
            parts = jagged.parts_of(entry, key)
            if id(parts.offsets) not in plans:
                plans[id(parts.offsets)] = (parts.offsets, jagged.plan_rows(parts.offsets, rows))
            return jagged.gather_rows(parts, plans[id(parts.offsets)][1])
        return entry[rows] if isinstance(rows, slice) else entry.index_select(0, rows.to(entry.device))

    return _rebuild(td, {key: take(key, entry) for key, entry in entries(td)}, count)


def _rebuild(like: TensorDictBase, source: dict[str, Any], count: int) -> TensorDict:
    return TensorDict(source, batch_size=[count, *like.batch_size[1:]], device=like.device)


def index_select_tensor_dict(td: TensorDictBase, indices: Any) -> TensorDict:
    """Rows by slice, mask, list, array or tensor."""
    return take_rows(td, row_index(indices, len(td)))


def chunk_tensordict(td: TensorDictBase, chunks: int) -> list[TensorDict]:
    """Equal contiguous parts that share the tensors' memory. Call `pad_to_divisor` first if rows do not divide."""
    if chunks < 1 or len(td) % chunks:
        raise BatchMismatchError(f"{len(td)} rows cannot be split into {chunks} equal parts")
    size = len(td) // chunks
    return [take_rows(td, slice(part * size, (part + 1) * size)) for part in range(chunks)]


def concat_tensordict(parts: Sequence[TensorDictBase]) -> TensorDict:
    """Rows of all parts under one another. Keys, dtypes and trailing shapes must agree, and so must NonTensorData."""
    if not parts:
        raise BatchMismatchError("nothing to concatenate: the list of TensorDicts is empty")
    first = parts[0]
    keys = _columns(first)
    for number, part in enumerate(parts):
        if odd := set(keys) ^ set(_columns(part)):
            raise BatchMismatchError(f"part {number} and part 0 differ in fields {sorted(map(str, odd))}")
    joined: _Joined = {}
    source = {key: _concat_entry(str(key), [part.get(key) for part in parts], joined) for key in keys}
    whole = _rebuild(first, source, sum(map(len, parts)))
    stated = [get(part, COLUMN_DTYPES, {}) for part in parts]
    return _with_dtypes(
        whole, {key: common_dtype([dtypes.get(key, _OBJECT) for dtypes in stated]) for key in stated[0]}
    )


def _columns(td: TensorDictBase) -> list[Any]:
    return [key for key in td.keys() if key != COLUMN_DTYPES]  # noqa: SIM118


def _with_dtypes(td: TensorDict, dtypes: dict[str, np.dtype]) -> TensorDict:
    typed = {key: dtype for key, dtype in dtypes.items() if dtype != _OBJECT}
    return assign_non_tensor(td, **{COLUMN_DTYPES: typed}) if typed else td


def _concat_entry(key: str, column: list[Any], joined: _Joined) -> Any:
    first = column[0]
    for number, entry in enumerate(column):
        if _kind(entry) != _kind(first):
            raise BatchMismatchError(f"{key!r} is {_describe(first)} in part 0 and {_describe(entry)} in part {number}")
        if isinstance(entry, NonTensorData) and not deep_equal(entry.data, first.data):
            raise BatchMismatchError(f"{key!r} is {first.data!r} in part 0 and {entry.data!r} in part {number}")
    if isinstance(first, NonTensorStack):
        return NonTensorStack(*[row for entry in column for row in entry.tensordicts])
    if isinstance(first, NonTensorData):
        return NonTensorData(first.data, batch_size=[sum(e.batch_size[0] for e in column), *first.batch_size[1:]])
    if isinstance(first, TensorDictBase):
        return concat_tensordict(column)
    if not first.is_nested:
        return torch.cat(column)
    parts = [jagged.parts_of(entry, key) for entry in column]
    identity = tuple(id(part.offsets) for part in parts)
    if identity not in joined:
        joined[identity] = (parts, jagged.join_offsets([part.offsets for part in parts]))
    dim = parts[0].dim
    return jagged.from_parts(torch.cat([part.values for part in parts], dim - 1), joined[identity][1], dim)


def _kind(entry: Any) -> Any:
    """What must agree for two entries to stand under one another."""
    if isinstance(entry, (NonTensorStack, NonTensorData)) or not isinstance(entry, Tensor):
        return NonTensorStack if isinstance(entry, NonTensorStack) else type(entry)
    if not entry.is_nested:
        return entry.dtype, tuple(entry.shape[1:])
    values, _, dim = jagged.parts_of(entry)
    return entry.dtype, dim, values.shape[: dim - 1], values.shape[dim:]


def _describe(entry: Any) -> str:
    if not isinstance(entry, Tensor):
        return type(entry).__name__
    shape = "(" + ", ".join(str(size) if isinstance(size, int) else "jagged" for size in entry.shape) + ")"
    return f"{str(entry.dtype).removeprefix('torch.')} {shape}"


def union_tensor_dict(left: TensorDict, right: TensorDictBase) -> TensorDict:
    """Add the entries of `right` to `left` in place (memory is shared); one that both have must be equal.

    Everything is checked before anything changes.
    """
    if left.batch_size != right.batch_size:
        raise BatchMismatchError(f"cannot unite batch sizes {tuple(left.batch_size)} and {tuple(right.batch_size)}")
    added = []
    for key in _columns(right):
        if key in left.keys():  # noqa: SIM118
            check_same(str(key), left.get(key), right.get(key))
        else:
            added.append(key)
    for key in added:
        left.set(key, right.get(key))
    return _with_dtypes(left, {**get(right, COLUMN_DTYPES, {}), **get(left, COLUMN_DTYPES, {})})


def check_same(key: str, left: Any, right: Any) -> None:
    """Raise BatchMismatchError naming key, shapes and the first differing row unless two entries are equal."""
    if _kind(left) != _kind(right):
        raise BatchMismatchError(f"{key!r} stands on both sides, as {_describe(left)} and as {_describe(right)}")
    if isinstance(left, Tensor):
        equal, one, other = tensor_equal(left, right), left, right
    elif isinstance(left, TensorDictBase) and not isinstance(left, (NonTensorData, NonTensorStack)):
        for inner in sorted(set(left.keys()) | set(right.keys())):
            check_same(f"{key}.{inner}", left.get(inner, None), right.get(inner, None))
        return
    else:
        one, other = unwrap(left), unwrap(right)
        equal = deep_equal(one, other)
    if not equal:
        row = None if isinstance(left, NonTensorData) else first_differing_row(one, other)
        at = "" if row is None else f" in row {row}: {short(one[row])} and {short(other[row])}"
        raise BatchMismatchError(f"{key!r} stands on both sides as {_describe(left)} and differs{at}")


def pad_to_divisor(td: TensorDictBase, divisor: int) -> tuple[TensorDictBase, int]:
    """Append rows of zero weight until the rows divide; returns the result and how many were appended.

    The new rows repeat the first ones, so every worker can run them; `is_padding` (B,) bool is True and `response_mask`
    is 0 on them. With nothing to append `td` itself comes back.
    """
    if divisor < 1:
        raise BatchMismatchError(f"rows can be padded to a positive divisor, found {divisor}")
    pad = -len(td) % divisor
    return (append_padding(td, torch.arange(pad) % len(td)), pad) if pad else (td, 0)


def append_padding(td: TensorDictBase, copies: Tensor) -> TensorDict:
    """Copy of `td` with the rows `copies` (int64) appended as marked rows of zero weight."""
    rows = len(td)
    padded = take_rows(td, torch.cat([torch.arange(rows), copies]))
    if "is_padding" not in padded.keys():  # noqa: SIM118
        padded.set("is_padding", torch.zeros(len(padded), dtype=torch.bool, device=padded.device))
    padded.get("is_padding")[rows:] = True
    mask: Any = padded.get("response_mask", None)
    if mask is not None and mask.is_nested:
        values, offsets, dim = jagged.parts_of(mask)
        values.narrow(dim - 1, int(offsets[rows]), int(offsets[-1] - offsets[rows])).zero_()
    elif mask is not None:
        mask[rows:] = 0
    return padded


def unpad(td: TensorDictBase, pad_size: int) -> TensorDictBase:
    """Drop the last `pad_size` rows, and `is_padding` if it marks none of the rest. The result shares memory."""
    if not 0 <= pad_size <= len(td):
        raise BatchMismatchError(f"cannot take {pad_size} padding rows off {len(td)} rows")
    if pad_size == 0:
        return td
    kept = take_rows(td, slice(0, len(td) - pad_size))
    marks: Any = kept.get("is_padding", None)
    if marks is not None and not bool(marks.any()):
        kept.del_("is_padding")
    return kept
