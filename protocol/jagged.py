"""Rows of unequal length as `torch.jagged` nested tensors: build, select and join without a Python loop over rows.

A jagged tensor is `values`, the rows one after the other along one dimension, and `offsets` (B + 1,), where each row
starts. PyTorch adds two jagged tensors only if they hold one and the same `offsets`, so whatever takes several columns
through an operation hands them one `Gather`, or one offsets tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# torch.nested.nested_tensor_from_jagged is this and a warning about tracing in every process that calls it
from torch.nested._internal.nested_tensor import nested_view_from_values_offsets

from protocol.errors import BatchMismatchError


class Parts(NamedTuple):
    """A jagged tensor taken apart."""

    values: Tensor  # rows joined along `dim - 1`
    offsets: Tensor  # (B + 1,) int64
    dim: int  # the ragged dimension of the nested tensor, 1 for (B, t_i, ...)


class Gather(NamedTuple):
    """Which flat positions the selected rows occupy, and the offsets they get."""

    positions: Tensor | slice
    offsets: Tensor


def parts_of(tensor: Any, name: str = "tensor") -> Parts:
    """Values, offsets and ragged dimension; holes between rows are closed."""
    if tensor.layout is not torch.jagged:
        raise BatchMismatchError(f"{name!r} is a nested tensor of layout {tensor.layout}; expected torch.jagged")
    nested: Any = tensor if tensor.lengths() is None else tensor.contiguous()
    return Parts(nested.values(), nested.offsets(), nested._ragged_idx)


def from_parts(values: Tensor, offsets: Tensor, dim: int = 1) -> Tensor:
    """Jagged tensor over these very `values` and `offsets`, without a copy."""
    return nested_view_from_values_offsets(values, offsets, ragged_idx=dim)


def offsets_of(lengths: Tensor) -> Tensor:
    """(B,) lengths -> (B + 1,) offsets."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def plan_rows(offsets: Tensor, rows: Tensor | slice) -> Gather:
    """Plan the selection of `rows`: an int64 index, or a slice of step 1 whose result shares the values' memory."""
    if isinstance(rows, slice):
        kept = offsets[rows.start : rows.stop + 1]
        return Gather(slice(int(kept[0]), int(kept[-1])), kept - kept[0])
    rows = rows.to(offsets.device)
    lengths = offsets.diff()[rows]
    new = offsets_of(lengths)
    shift = torch.repeat_interleave(offsets[:-1][rows] - new[:-1], lengths)
    return Gather(shift + torch.arange(len(shift), device=offsets.device), new)


def gather_rows(parts: Parts, plan: Gather) -> Tensor:
    """Apply a plan to one jagged tensor."""
    along = parts.dim - 1
    if isinstance(plan.positions, slice):
        start, stop = plan.positions.start, plan.positions.stop
        return from_parts(parts.values.narrow(along, start, stop - start), plan.offsets, parts.dim)
    return from_parts(parts.values.index_select(along, plan.positions), plan.offsets, parts.dim)


def join_offsets(all_offsets: Sequence[Tensor]) -> Tensor:
    """Offsets of the rows of several jagged tensors under one another."""
    return offsets_of(torch.cat([offsets.diff() for offsets in all_offsets]))


def nested_tensor_from_tensor_list(rows: Sequence[Tensor]) -> Tensor:
    """Rows (t_i, ...) of one dtype -> jagged (B, t_i, ...). Copies."""
    if not rows:
        raise BatchMismatchError("a jagged tensor needs at least one row to know its dtype, found none")
    first = rows[0]
    for index, row in enumerate(rows):
        if row.dtype != first.dtype or row.dim() == 0 or row.shape[1:] != first.shape[1:]:
            raise BatchMismatchError(
                f"row {index} is {row.dtype} {tuple(row.shape)}, row 0 is {first.dtype} {tuple(first.shape)}: "
                "rows of a jagged tensor may differ in their first dimension only"
            )
    lengths = torch.tensor([len(row) for row in rows], device=first.device)
    return from_parts(torch.cat(list(rows)), offsets_of(lengths))
