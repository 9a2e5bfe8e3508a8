"""The rows of a TensorDict: choosing, cutting, joining and padding them, whatever kinds of entries it holds.

TensorDict's own indexing loops over the rows of a stack and gives every jagged column offsets of its own, after which
two of them cannot be added; these functions do neither.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from protocol import jagged
from protocol.entries import COLUMN_DTYPES, AnyTensorDict, EmptyStack, assign_non_tensor_data, entries, get
from protocol.errors import BatchMismatchError
from protocol.values import common_dtype, deep_equal, short, whole_number

_OBJECT = np.dtype(object)
_Joined = dict[tuple[int, ...], tuple[list[jagged.Parts], Tensor]]  # ids of offsets -> (what keeps them alive, joined)


def row_index(index: Any, rows: int) -> Tensor | slice:
    """Slice, mask, list, array or tensor -> slice of step 1 within 0..rows, or checked non-negative int64 index.

    A boolean index is a mask over all rows, whatever holds it. Negative indices count from the end.
    """
    if isinstance(index, slice):
        start, stop, step = index.indices(rows)
        return slice(start, max(start, stop)) if step == 1 else torch.arange(rows)[range(start, stop, step)]
    if not isinstance(index, (list, tuple, range, np.ndarray, Tensor, int, np.integer)):
        raise BatchMismatchError(
            f"rows are selected by a slice, list, array or tensor, found {short(index)}; "
            "fields stand in data.batch and data.non_tensor_batch"
        )
    index = torch.as_tensor(np.asarray(index) if isinstance(index, (list, tuple, range)) else index).detach().cpu()
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
            return _stack(held[rows] if isinstance(rows, slice) else [held[row] for row in rows.tolist()])
        if isinstance(entry, TensorDictBase):
            return take_rows(entry, rows)
        if entry.is_nested:
            parts = jagged.parts_of(entry, key)
            if id(parts.offsets) not in plans:
                plans[id(parts.offsets)] = (parts.offsets, jagged.plan_rows(parts.offsets, rows))
            return jagged.gather_rows(parts, plans[id(parts.offsets)][1])
        return entry[rows] if isinstance(rows, slice) else entry.index_select(0, rows.to(entry.device))

    return _rebuild(td, {key: take(key, entry) for key, entry in entries(td)}, count)


def _stack(wrapped: Sequence[Any]) -> NonTensorStack:
    return NonTensorStack(*wrapped) if wrapped else EmptyStack()


def _rebuild(like: TensorDictBase, source: dict[str, Any], count: int) -> TensorDict:
    return TensorDict(source, batch_size=[count, *like.batch_size[1:]], device=like.device)


def index_select_tensor_dict(td: TensorDictBase, indices: Any) -> TensorDict:
    """Rows by slice, mask, list, array or tensor."""
    return take_rows(td, row_index(indices, len(td)))


def chunk_tensordict(td: TensorDictBase, chunks: int) -> list[TensorDict]:
    """Equal contiguous parts that share the tensors' memory. Call `pad_to_divisor` first if rows do not divide."""
    if len(td) % whole_number(chunks, "chunks"):
        raise BatchMismatchError(f"{len(td)} rows cannot be split into {chunks} equal parts")
    size = len(td) // chunks
    return [take_rows(td, slice(part * size, (part + 1) * size)) for part in range(chunks)]


def concat_tensordict(parts: Sequence[TensorDictBase]) -> TensorDict:
    """Rows of all parts under one another. Keys, dtypes and trailing shapes must agree, and so must NonTensorData."""
    if not parts:
        raise BatchMismatchError("nothing to concatenate: the list of TensorDicts is empty")
    first = parts[0]
    keys = columns_of(first)
    for number, part in enumerate(parts):
        if odd := set(keys) ^ set(columns_of(part)):
            raise BatchMismatchError(f"part {number} and part 0 differ in fields {sorted(map(str, odd))}")
    joined: _Joined = {}
    source = {key: _concat_entry(str(key), [part.get(key) for part in parts], joined) for key in keys}
    whole = _rebuild(first, source, sum(map(len, parts)))
    stated = [get(part, COLUMN_DTYPES, {}) for part in parts]
    return with_dtypes(whole, {key: common_dtype([dtypes.get(key, _OBJECT) for dtypes in stated]) for key in stated[0]})


def columns_of(td: TensorDictBase) -> list[Any]:
    """Keys of everything but the note on dtypes."""
    return [key for key in td.keys() if key != COLUMN_DTYPES]  # noqa: SIM118


def with_dtypes(td: AnyTensorDict, dtypes: dict[str, np.dtype]) -> AnyTensorDict:
    """Note in `td` which of its stacks come from columns with a dtype of their own, in place."""
    typed = {key: dtype for key, dtype in dtypes.items() if dtype != _OBJECT}
    return assign_non_tensor_data(td, COLUMN_DTYPES, typed) if typed else td


def _concat_entry(key: str, column: list[Any], joined: _Joined) -> Any:
    first = column[0]
    for number, entry in enumerate(column):
        if kind_of(entry) != kind_of(first):
            raise BatchMismatchError(f"{key!r} is {describe(first)} in part 0 and {describe(entry)} in part {number}")
        if isinstance(entry, NonTensorData) and not deep_equal(entry.data, first.data):
            raise BatchMismatchError(f"{key!r} is {first.data!r} in part 0 and {entry.data!r} in part {number}")
    if isinstance(first, NonTensorStack):
        return _stack([row for entry in column for row in entry.tensordicts])
    if isinstance(first, NonTensorData):
        return NonTensorData(first.data, batch_size=[sum(e.batch_size[0] for e in column), *first.batch_size[1:]])
    if isinstance(first, TensorDictBase):
        return concat_tensordict(column)
    if other := next((entry.device for entry in column if entry.device != first.device), None):
        raise BatchMismatchError(f"{key!r} is on {first.device} in part 0 and on {other} in a later part")
    return _concat_jagged(key, column, joined) if first.is_nested else torch.cat(column)


def _concat_jagged(key: str, column: Sequence[Tensor], joined: _Joined) -> Tensor:
    parts = [jagged.parts_of(entry, key) for entry in column]
    identity = tuple(id(part.offsets) for part in parts)
    if identity not in joined:
        joined[identity] = (parts, jagged.join_offsets([part.offsets for part in parts]))
    dim = parts[0].dim
    return jagged.from_parts(torch.cat([part.values for part in parts], dim - 1), joined[identity][1], dim)


def concat_nested_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Jagged tensors of one dtype and trailing shape, rows under one another. Copies."""
    if not tensors:
        raise BatchMismatchError("nothing to concatenate: the list of nested tensors is empty")
    if dense := [number for number, tensor in enumerate(tensors) if not tensor.is_nested]:
        raise BatchMismatchError(f"tensor {dense[0]} is not nested; concatenate dense tensors with torch.cat")
    return _concat_entry("nested tensor", list(tensors), {})


def kind_of(entry: Any) -> Any:
    """What must agree for two entries to stand under one another."""
    if isinstance(entry, (NonTensorStack, NonTensorData)) or not isinstance(entry, Tensor):
        return NonTensorStack if isinstance(entry, NonTensorStack) else type(entry)
    if not entry.is_nested:
        return entry.dtype, tuple(entry.shape[1:])
    values, _, dim = jagged.parts_of(entry)
    return entry.dtype, dim, values.shape[: dim - 1], values.shape[dim:]


def describe(entry: Any) -> str:
    """Dtype and shape, or the kind of wrapper, for an error message."""
    if not isinstance(entry, Tensor):
        return type(entry).__name__
    shape = "(" + ", ".join(str(size) if isinstance(size, int) else "jagged" for size in entry.shape) + ")"
    return f"{str(entry.dtype).removeprefix('torch.')} {shape}"


def contiguous(td: TensorDictBase) -> TensorDict:
    """New TensorDict whose tensors are contiguous; those that were so before are shared."""

    def solid(entry: Any) -> Any:
        if isinstance(entry, (NonTensorData, NonTensorStack)):
            return entry
        return contiguous(entry) if isinstance(entry, TensorDictBase) else entry.contiguous()

    return _rebuild(td, {key: solid(entry) for key, entry in entries(td)}, len(td))


def make_iterator(
    tensordict: TensorDictBase,
    mini_batch_size: int,
    epochs: int,
    seed: int | None = None,
    dataloader_kwargs: Mapping[str, Any] | None = None,
) -> Iterator[TensorDict]:
    """Mini-batches of `mini_batch_size` rows, `epochs` times over the whole; see `minibatch_rows` for the order."""
    plan = minibatch_rows(len(tensordict), mini_batch_size, epochs, seed, dataloader_kwargs)
    return (take_rows(tensordict, rows) for rows in plan)


def minibatch_rows(
    rows: int, mini_batch_size: int, epochs: int, seed: int | None, dataloader_kwargs: Mapping[str, Any] | None
) -> Iterator[Tensor | slice]:
    """Which rows each mini-batch takes: slices in the rows' own order, unless `dataloader_kwargs["shuffle"]` is true.

    Then every epoch has a permutation of its own, drawn from `seed`, or from torch's global generator where that is
    None. A seed with nothing said about shuffling is warned about, since it does nothing. Raises BatchMismatchError
    here, before the first mini-batch, where rows do not divide or an option is unknown.
    """
    options = {"shuffle": None, **(dataloader_kwargs or {})}
    shuffle = options.pop("shuffle")
    if options or shuffle not in (None, False, True):
        raise BatchMismatchError(
            f"dataloader_kwargs may hold shuffle=True or False, found {dict(dataloader_kwargs or {})}"
        )
    if rows % whole_number(mini_batch_size, "mini_batch_size"):
        raise BatchMismatchError(f"{rows} rows cannot be cut into mini-batches of {mini_batch_size} rows")
    epochs = whole_number(epochs, "epochs", 0)
    seed = None if seed is None else whole_number(seed, "seed", 0)
    if seed is not None and shuffle is None:
        warnings.warn(
            f"seed={seed} does nothing: rows keep their order. Pass dataloader_kwargs={{'shuffle': True}} to shuffle.",
            stacklevel=3,
        )
    return _minibatch_rows(rows, mini_batch_size, epochs, seed, bool(shuffle))


def _minibatch_rows(rows: int, size: int, epochs: int, seed: int | None, shuffle: bool) -> Iterator[Tensor | slice]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(rows, generator=generator) if shuffle else None
        for at in range(0, rows, size):
            yield slice(at, at + size) if order is None else order[at : at + size]


def pad_to_divisor(td: TensorDictBase, size_divisor: int) -> tuple[TensorDictBase, int]:
    """Append rows of zero weight until the rows divide; returns the result and how many were appended.

    The new rows repeat the first ones, so every worker can run them; `is_padding` (B,) bool is True and `response_mask`
    is 0 on them. With nothing to append `td` itself comes back.
    """
    pad = -len(td) % whole_number(size_divisor, "size_divisor")
    return (append_padding(td, torch.arange(pad) % len(td)), pad) if pad else (td, 0)


def append_padding(td: TensorDictBase, copies: Tensor) -> TensorDict:
    """Copy of `td` with the rows `copies` (int64) appended as marked rows of zero weight."""
    rows = len(td)
    padded = take_rows(td, torch.cat([torch.arange(rows), copies]))
    if "is_padding" not in padded.keys():  # noqa: SIM118
        padded.set("is_padding", torch.zeros(padded.batch_size, dtype=torch.bool, device=padded.device))
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
    if whole_number(pad_size, "pad_size", 0) > len(td):
        raise BatchMismatchError(f"cannot take {pad_size} padding rows off {len(td)} rows")
    if pad_size == 0:
        return td
    kept = take_rows(td, slice(0, len(td) - pad_size))
    marks: Any = kept.get("is_padding", None)
    if marks is not None and not bool(marks.any()):
        kept.del_("is_padding")
    return kept
