"""From jagged rows to packed micro-batches: which rows go together, and what one forward pass of them needs.

A micro-batch is one packed row of tokens. Its size is either a hard cap of tokens, never exceeded, or a fixed number
of rows. No number the training produces depends on the plan; only speed and memory do.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from tensordict import TensorDict

from ppo_lib.errors import BatchMismatchError, ConfigError, FieldMissingError
from ppo_lib.workers.attention import PackedLayout, ranges
from protocol import jagged
from protocol import tensordict_utils as tu

__all__ = ["JaggedRows", "MicroBatching", "PackedRows", "filler_rows", "pack_rows", "plan_micro_batches"]

_CPU_TOKENS = {"train": 2048, "infer": 4608}


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

    def on(self, device: torch.device, longest: int, training: bool) -> MicroBatching:
        """The size to use where the longest row has this many tokens: a CPU gains nothing beyond what its caches hold.

        A pass without gradient keeps no activations, so that it may take twice as many tokens and save half of what a
        micro-batch costs by itself. A number of rows is left as it was asked for.
        """
        if self.max_tokens is None or device.type != "cpu":
            return self
        held = _CPU_TOKENS["train" if training else "infer"]
        return MicroBatching(max_tokens=min(self.max_tokens, max(longest, held)))


def plan_micro_batches(
    lengths: list[int], size: MicroBatching, at_least: int = 0, prompts: list[tuple[int, int]] | None = None
) -> list[list[int]]:
    """Divide rows into micro-batches.

    Under a token cap the rows are spread evenly over as few micro-batches as fit (the longest first, each to the
    micro-batch with the fewest tokens), rows of one prompt together as far as the cap allows. With a fixed number of
    rows they are taken in order.

    Args:
        lengths: tokens of each row.
        size: the bound of a micro-batch.
        at_least: number of micro-batches wanted, so that all ranks do the same number; the plan may hold empty ones.
        prompts: the number of each row's prompt and how many tokens it has; rows of one prompt hold it once. None:
            every row is its own.

    Returns:
        Row indices of each micro-batch; within one, rows of one prompt are neighbours.

    Raises:
        ConfigError: one row alone exceeds the token cap.
    """
    prompts = prompts or [(row, 0) for row in range(len(lengths))]
    if size.max_tokens is None:
        rows = size.rows
        if not rows or rows < 1:
            raise ConfigError(f"a micro-batch of {rows} rows cannot be made; use at least 1")
        plan = [list(range(start, min(start + rows, len(lengths)))) for start in range(0, len(lengths), rows)]
        plan += [[] for _ in range(at_least - len(plan))]
    else:
        units = _units(lengths, prompts, size.max_tokens)
        tokens = [_tokens(unit, lengths, prompts) for unit in units]
        plan = [[row for i in of for row in units[i]] for of in _plan_under_cap(tokens, size.max_tokens, at_least)]
    return [sorted(rows, key=lambda row: (prompts[row][0], lengths[row], row)) for rows in plan]


def _units(lengths: list[int], prompts: list[tuple[int, int]], cap: int) -> list[list[int]]:
    """Rows that stay together: those of one prompt, as many as fit under the cap."""
    longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
    if longest is not None and lengths[longest] > cap:
        raise ConfigError(
            f"row {longest} has {lengths[longest]} tokens, more than a micro-batch may hold "
            f"(max_token_len_per_gpu {cap}): raise that limit or shorten prompts and responses"
        )
    units: list[list[int]] = []
    open_unit: dict[int, tuple[list[int], int]] = {}
    for row, (prompt, shared) in enumerate(prompts):
        unit, room = open_unit.get(prompt, ([], 0))
        if not unit or lengths[row] - shared > room:
            unit, room = [], cap - shared
            units.append(unit)
        unit.append(row)
        open_unit[prompt] = unit, room - (lengths[row] - shared)
    return units


def _tokens(rows: list[int], lengths: list[int], prompts: list[tuple[int, int]]) -> int:
    """Tokens of these rows, a prompt that several have counted once."""
    return sum(lengths[row] - prompts[row][1] for row in rows) + sum(dict(prompts[row] for row in rows).values())


def _plan_under_cap(lengths: list[int], cap: int, at_least: int) -> list[list[int]]:
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
    def prompts(self) -> list[tuple[int, int]]:
        """For each row a number that rows of the same prompt share, positions included, and the prompt's tokens."""
        ids, positions = self.token_ids.numpy(), self.position_ids.numpy()
        numbers: dict[tuple[bytes, bytes], int] = {}
        prompts = []
        for start, length, response in zip(self.token_starts, self.lengths, self.response_lens):
            part = slice(start, start + length - response)
            number = numbers.setdefault((ids[part].tobytes(), positions[part].tobytes()), len(numbers))
            prompts.append((number, length - response))
        return prompts

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
    """One micro-batch: N tokens of b rows side by side, which predict M response tokens.

    A prompt that several rows continue stands there once, before its responses, and the last token of a row, which
    predicts nothing, is left out.

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
        return ranges(starts, self.response_lens).to(self.labels.device), width

    def to_rows(self, flat: torch.Tensor) -> torch.Tensor:
        """(M) to (b, r), zero on the right of shorter responses; differentiable."""
        cell, width = self._cell
        rows = flat.new_zeros(len(self.response_lens) * width)
        return rows.index_copy(0, cell, flat).view(len(self.response_lens), width)

    def gather(self, column: torch.Tensor) -> torch.Tensor:
        """This micro-batch's part of a flat response column of the batch, as (b, r) rows on the model's device."""
        return self.to_rows(column.index_select(0, self.flat_index.to(column.device)).to(self.labels.device))


def pack_rows(batch: JaggedRows, rows: list[int], device: torch.device) -> PackedRows:
    """Put rows of a batch side by side, in the order given as far as their results are concerned."""
    sequences, of_row = _sequences(batch, rows)
    lengths = [length for _, length, _ in sequences]
    tokens = ranges([start for start, _, _ in sequences], lengths)
    starts = [0, *accumulate(lengths)]
    response_lens = [batch.response_lens[row] for row in rows]
    # The first response token is predicted by the prompt's last token, the others by the one before them.
    first, others = [], []
    for row, (prompt, own) in zip(rows, of_row):
        behind = starts[prompt] + batch.prompts[row][1]
        first.append(behind - 1)
        others.append(behind if own is None else starts[own])
    counts = [count for n in response_lens for count in ((1, n - 1) if n else (0, 0))]
    predict = ranges([start for pair in zip(first, others) for start in pair], counts)
    offsets = batch.response_offsets.tolist()
    responses = [batch.token_starts[row] + batch.prompts[row][1] for row in rows]
    labels = batch.token_ids.index_select(0, ranges(responses, response_lens)).long()
    prefixes = tuple(prefix for _, _, prefix in sequences)
    return PackedRows(
        input_ids=batch.token_ids.index_select(0, tokens).long().unsqueeze(0).to(device),
        position_ids=batch.position_ids.index_select(0, tokens).long().unsqueeze(0).to(device),
        layout=PackedLayout(tuple(lengths), device, prefixes if any(p >= 0 for p in prefixes) else None),
        predict=predict.to(device),
        labels=labels.to(device),
        flat_index=ranges([offsets[row] for row in rows], response_lens),
        response_lens=tuple(response_lens),
    )


def _sequences(batch: JaggedRows, rows: list[int]) -> tuple[list[tuple[int, int, int]], list[tuple[int, int | None]]]:
    """The sequences of a packed row, and where each row finds its own.

    Returns:
        (start in the batch's flat tokens, length, number of the sequence before it or -1) of each sequence: rows that
        share no prompt and prompts that are shared, then responses behind a prompt, similar ones as neighbours; and
        for each row the sequence that holds its prompt and, where that is another, the one of its response.
    """
    rows_of_prompt: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        rows_of_prompt.setdefault(batch.prompts[row][0], []).append(i)

    def read(i: int) -> int:
        """Response tokens that row i reads: all but the last."""
        return max(0, batch.response_lens[rows[i]] - 1)

    roots = [
        (batch.prompts[rows[of[0]]][1] + (read(of[0]) if len(of) == 1 else 0), of) for of in rows_of_prompt.values()
    ]
    roots.sort(key=lambda root: root[0])
    of_row: list[tuple[int, int | None]] = [(0, None)] * len(rows)
    sequences: list[tuple[int, int, int]] = []
    shared: list[tuple[int, int, int, int]] = []
    for number, (length, of) in enumerate(roots):
        sequences.append((batch.token_starts[rows[of[0]]], length, -1))
        for i in of:
            of_row[i] = number, None
            if len(of) > 1:
                shared.append((length, read(i), i, number))
    for prompt, length, i, number in sorted(shared):
        of_row[i] = number, len(sequences)
        sequences.append((batch.token_starts[rows[i]] + prompt, length, number))
    return sequences, of_row


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
