"""From jagged rows to packed micro-batches: which rows go together, and what one forward pass of them needs.

A micro-batch is one packed row of tokens. Its size is either a hard cap of tokens, never exceeded, or a fixed number
of rows. No number the training produces depends on the plan; only speed and memory do.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict

from ppo_lib.errors import BatchMismatchError, ConfigError, FieldMissingError
from ppo_lib.workers.attention import PackedLayout
from protocol import jagged
from protocol import tensordict_utils as tu

__all__ = ["JaggedRows", "MicroBatching", "PackedRows", "filler_rows", "pack_rows", "plan_micro_batches"]


@dataclass(frozen=True)
class MicroBatching:
    """How large a micro-batch may be: exactly one of the two is set."""

    rows: int | None = None
    max_tokens: int | None = None

    @classmethod
    def from_sizes(
        cls,
        *,
        dynamic: bool,
        rows: int | None,
        max_tokens: int,
    ) -> MicroBatching:
        """The configured sizes, read the way they are typed.

        Args:
            dynamic: pack up to `max_tokens`, whatever the number of rows.
            rows: rows of one rank's micro-batch, or None.
            max_tokens: tokens of one rank's micro-batch; used when `dynamic`, or when no number of rows is given.
        """
        return cls(max_tokens=max_tokens) if dynamic or rows is None else cls(rows=rows)


def plan_micro_batches(lengths: list[int], size: MicroBatching, at_least: int = 0) -> list[list[int]]:
    """Divide rows into micro-batches.

    Under a token cap the rows are spread evenly over as few micro-batches as fit (the longest row first, each to the
    micro-batch with the fewest tokens). With a fixed number of rows they are taken in order.

    Args:
        lengths: tokens of each row.
        size: the bound of a micro-batch.
        at_least: number of micro-batches wanted, so that all ranks do the same number; the plan may hold empty ones.

    Returns:
        Row indices of each micro-batch; within one, rows of equal length are neighbours.

    Raises:
        ConfigError: one row alone exceeds the token cap.
    """
    if size.max_tokens is None:
        rows = size.rows
        if not rows or rows < 1:
            raise ConfigError(f"a micro-batch of {rows} rows cannot be made; use at least 1")
        plan = [list(range(start, min(start + rows, len(lengths)))) for start in range(0, len(lengths), rows)]
        plan += [[] for _ in range(at_least - len(plan))]
    else:
        plan = _plan_under_cap(lengths, size.max_tokens, at_least)
    return [sorted(rows, key=lambda row: (lengths[row], row)) for rows in plan]


def _plan_under_cap(lengths: list[int], cap: int, at_least: int) -> list[list[int]]:
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if longest is not None and lengths[longest] > cap:
        raise ConfigError(
            f"row {longest} has {lengths[longest]} tokens, more than a micro-batch may hold "
            f"(max_token_len_per_gpu {cap}): raise that limit or shorten prompts and responses"
        )
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    fallback = _first_fit(order, lengths, cap)
    fewest = max(at_least, -(-sum(lengths) // cap))
    for count in range(fewest, len(fallback)):
        if (plan := _spread(order, lengths, count, cap)) is not None:
            return plan
    # As many as first-fit needs, or more: spreading evenly nearly always fits too, and is faster to compute with.
    count = max(at_least, len(fallback))
    return _spread(order, lengths, count, cap) or fallback + [[] for _ in range(count - len(fallback))]


def _first_fit(order: list[int], lengths: list[int], cap: int) -> list[list[int]]:
    plan: list[list[int]] = []
    room: list[int] = []
    for row in order:
        slot = next((i for i, free in enumerate(room) if free >= lengths[row]), None)
        if slot is None:
            plan.append([row])
            room.append(cap - lengths[row])
        else:
            plan[slot].append(row)
            room[slot] -= lengths[row]
    return plan


def _spread(order: list[int], lengths: list[int], count: int, cap: int) -> list[list[int]] | None:
    """Rows to the least loaded of `count` micro-batches, longest first; None if one would exceed the cap."""
    plan: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, slot) for slot in range(count)]
    for row in order:
        load, slot = heapq.heappop(loads)
        if load + lengths[row] > cap:
            return None
        plan[slot].append(row)
        heapq.heappush(loads, (load + lengths[row], slot))
    return plan


class JaggedRows:
    """A TensorDict of jagged rows, opened once: flat values and where each row starts.

    `input_ids` and `position_ids` have a row's t_i attended tokens; `response_lens` says how many of them, r_i, are the
    response at the end; every other jagged column has r_i entries.
    """

    def __init__(self, data: TensorDict) -> None:
        self.data = data
        self.token_ids, offsets, _ = jagged.parts_of(self.need("input_ids"), "input_ids")
        self.position_ids, position_offsets, _ = jagged.parts_of(self.need("position_ids"), "position_ids")
        if not torch.equal(offsets, position_offsets):
            raise BatchMismatchError("position_ids and input_ids differ in the lengths of their rows")
        self.lengths: list[int] = offsets.diff().tolist()
        self.token_starts: list[int] = offsets[:-1].tolist()
        self.response_lens: list[int] = self.need("response_lens").tolist()
        for row, (length, response) in enumerate(zip(self.lengths, self.response_lens, strict=True)):
            if not 0 <= response < length:
                raise BatchMismatchError(
                    f"row {row} has {length} tokens of which {response} are its response; "
                    "a row needs at least one prompt token, whose output predicts the first response token"
                )

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def response_offsets(self) -> torch.Tensor:
        """(B + 1) int64: where each row starts in the flat values of a response column, and the end.

        Those of the batch's own mask where it has one: rows that share their offsets can be added to one another.
        """
        if self.has("response_mask"):
            self.column("response_mask")
            return jagged.parts_of(self.need("response_mask"))[1]
        return jagged.offsets_of(torch.tensor(self.response_lens, dtype=torch.int64))

    def column(self, name: str) -> torch.Tensor:
        """Flat values of a response column.

        Raises:
            FieldMissingError: the batch has no such column.
            BatchMismatchError: its rows are not as long as the responses.
        """
        values, offsets, _ = jagged.parts_of(self.need(name), name)
        lengths = offsets.diff().tolist()
        if lengths != self.response_lens:
            row = next(i for i, (a, b) in enumerate(zip(lengths, self.response_lens)) if a != b)
            raise BatchMismatchError(
                f"row {row} of {name!r} has {lengths[row]} entries, its response {self.response_lens[row]} tokens"
            )
        return values

    def need(self, name: str) -> Any:
        """An entry of the batch, whatever it is; FieldMissingError where there is none."""
        value = tu.get(self.data, name)
        if value is None:
            raise FieldMissingError(f"a worker needs the field {name!r}; present: {sorted(map(str, self.data.keys()))}")
        return value

    def has(self, name: str) -> bool:
        """Whether the batch brings this column."""
        return name in self.data.keys()  # noqa: SIM118  (iterating a TensorDict gives its rows)

    def as_jagged(self, flat: torch.Tensor) -> torch.Tensor:
        """Flat values of a response column as jagged rows, without a copy."""
        return jagged.from_parts(flat, self.response_offsets)


@dataclass(frozen=True)
class PackedRows:
    """One micro-batch: N tokens of b rows side by side, M of which are predicted response tokens.

    `input_ids`, `position_ids`: (1, N) int64. `predict`: (M) int64, where in the packed row the token *before* each
    response token stands. `labels`: (M) int64, the response tokens. `flat_index`: (M) int64, where each of them stands
    in a flat response column of the whole batch. `response_lens`: r_i of each row, summing to M.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: PackedLayout
    predict: torch.Tensor
    labels: torch.Tensor
    flat_index: torch.Tensor
    response_lens: tuple[int, ...]

    @cached_property
    def _cell(self) -> tuple[torch.Tensor, int]:
        """Where entry m of a flat column lands in a (b * r) matrix, and r, the longest response."""
        width = max(self.response_lens, default=0)
        starts = [row * width for row in range(len(self.response_lens))]
        return _ranges(starts, self.response_lens).to(self.labels.device), width

    def to_rows(self, flat: torch.Tensor) -> torch.Tensor:
        """(M) to (b, r), zero on the right of shorter responses; differentiable."""
        cell, width = self._cell
        rows = flat.new_zeros(len(self.response_lens) * width)
        return rows.index_copy(0, cell, flat).view(len(self.response_lens), width)

    def gather(self, column: torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of a flat response column of the batch, as (b, r) rows on the model's device."""
        return self.to_rows(column.index_select(0, self.flat_index.to(column.device)).to(self.labels.device))


def pack_rows(batch: JaggedRows, rows: list[int], device: torch.device) -> PackedRows:
    """Put rows of a batch side by side, in the order given."""
    lengths = [batch.lengths[row] for row in rows]
    response_lens = [batch.response_lens[row] for row in rows]
    tokens = _ranges([batch.token_starts[row] for row in rows], lengths)
    starts = batch.response_offsets.tolist()
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()
    predict = _ranges([end - count - 1 for end, count in zip(ends, response_lens)], response_lens)
    input_ids = batch.token_ids.index_select(0, tokens).long()
    return PackedRows(
        input_ids=input_ids.unsqueeze(0).to(device),
        position_ids=batch.position_ids.index_select(0, tokens).long().unsqueeze(0).to(device),
        layout=PackedLayout(tuple(lengths), device),
        predict=predict.to(device),
        labels=input_ids.index_select(0, predict + 1).to(device),
        flat_index=_ranges([starts[row] for row in rows], response_lens),
        response_lens=tuple(response_lens),
    )


def filler_rows(device: torch.device) -> PackedRows:
    """A row of two tokens that a rank without rows computes so that the others do not wait for it; weight zero."""
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return PackedRows(
        input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device),
        position_ids=torch.arange(2, device=device).unsqueeze(0),
        layout=PackedLayout((2,), device),
        predict=zero,
        labels=zero,
        flat_index=torch.zeros(0, dtype=torch.int64),
        response_lens=(1,),
    )


def _ranges(starts: list[int], lengths: list[int] | tuple[int, ...]) -> torch.Tensor:
    """The integers [start, start + length) of every pair, one after the other."""
    if not starts:
        return torch.zeros(0, dtype=torch.int64)
    counts = torch.tensor(lengths, dtype=torch.int64)
    offsets = torch.tensor(starts, dtype=torch.int64) - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + offsets.repeat_interleave(counts)
