"""The keys and values of the running rows, in buffers where rows come and go without copying the rest.

All rows end in the same column, the newest; shorter rows are padded on the left and masked. That is the form in which
every transformers model accepts a cache, sliding windows included, because within a row the columns are consecutive.

    columns   0 ...... start .......... end ... capacity
    row 0              k k k k k k k k k        the longest row decides start
    row 1                    k k k k k k
    row 2                  k k k k k k k

A row that leaves is overwritten by the last one, so a step never computes a finished row. Columns that only finished
rows used fall off on the left by moving `start`.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

_GROWTH = 64  # columns; with a quarter on top a long decode copies its cache a handful of times


class _Span:
    """Which part of the buffers is in use, shared by all layers."""

    def __init__(self) -> None:
        self.rows = 0
        self.start = 0
        self.end = 0


class _RowLayer(CacheLayerMixin):
    """One layer's buffers: keys and values (row capacity, heads, column capacity, head size)."""

    is_sliding = False
    keys: torch.Tensor  # type: ignore[assignment]  # never None: a layer is made from the states of a prefill
    values: torch.Tensor  # type: ignore[assignment]

    def __init__(self, span: _Span) -> None:
        super().__init__()
        self.span = span

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Start with empty buffers of the model's shapes."""
        self.keys = key_states.new_zeros((0, key_states.shape[1], 0, key_states.shape[3]))
        self.values = value_states.new_zeros((0, value_states.shape[1], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new column and return all columns in use, the new one included."""
        rows, start, end = self.span.rows, self.span.start, self.span.end
        new = end + key_states.shape[2]
        self.keys[:rows, :, end:new] = key_states
        self.values[:rows, :, end:new] = value_states
        return self.keys[:rows, :, start:new], self.values[:rows, :, start:new]

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Width of the keys that the next query of this length sees, and their offset."""
        queries = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.get_seq_length() + queries, 0

    def get_seq_length(self) -> int:
        """Columns in use."""
        return self.span.end - self.span.start

    def get_max_cache_shape(self) -> int:
        """No limit of its own."""
        return -1

    def resize(self, rows: int, columns: int, shift: int) -> None:
        """Take buffers of this capacity, the live part moved `shift` columns to the right."""
        used, start, end = self.span.rows, self.span.start, self.span.end
        for name in ("keys", "values"):
            old: torch.Tensor = getattr(self, name)
            new = old.new_zeros((rows, old.shape[1], columns, old.shape[3]))
            new[:used, :, start + shift : end + shift] = old[:used, :, start:end]
            setattr(self, name, new)


class RowCache(Cache):
    """A transformers cache whose rows join and leave.

    Between steps: `add` rows from a prefill, `remove` finished ones. For a step: `reserve` a column, run the model with
    this as `past_key_values`, then `advance`.
    """

    layers: list[_RowLayer]  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._span = _Span()
        self._lengths: list[int] = []
        self._expected_rows = 0

    @property
    def lengths(self) -> list[int]:
        """Columns that each row uses; do not change it."""
        return self._lengths

    @property
    def width(self) -> int:
        """Columns in use: the longest row's length."""
        return self._span.end - self._span.start

    def nbytes(self) -> int:
        """Memory of the buffers."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in (layer.keys, layer.values))

    def expect(self, rows: int) -> None:
        """Say how many rows are about to be added, so that the buffers grow once for all of them."""
        self._expected_rows = self._span.rows + rows

    def add(self, prefilled: DynamicCache, lengths: list[int], source_rows: list[int]) -> None:
        """Append rows from the cache of a prefill.

        Args:
            prefilled: (m rows, left-padded to one width).
            lengths: (k) tokens of each new row.
            source_rows: (k) the row of `prefilled` that each new row copies; a group of rollouts shares one.
        """
        states: list[tuple[Any, Any]] = [(keys, values) for keys, values, *_ in prefilled]
        while len(self.layers) < len(states):
            layer = _RowLayer(self._span)
            layer.lazy_initialization(*states[len(self.layers)])
            self.layers.append(layer)
        rows, span = len(source_rows), self._span
        longest = max(lengths)
        if not self._lengths:
            span.start = span.end = 0
        self._make_room(rows, columns_before=longest)
        index = torch.tensor(source_rows, device=states[0][0].device)
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            for mine, theirs in ((layer.keys, keys), (layer.values, values)):
                mine[span.rows : span.rows + rows, :, span.end - longest : span.end] = theirs[index][:, :, -longest:]
        span.rows += rows
        self._lengths += lengths
        span.start = span.end - max(self._lengths)

    def remove(self, rows: list[int]) -> list[int]:
        """Drop rows; the last ones move into the holes.

        Args:
            rows: Distinct row numbers.

        Returns:
            For every row that is left, in its new place, the row it was.
        """
        places = list(range(self._span.rows))
        for row in sorted(rows, reverse=True):
            last = len(places) - 1
            if row != last:
                places[row] = places[last]
            places.pop()
        moved = [(row, source) for row, source in enumerate(places) if row != source]
        if moved:
            here, there = torch.tensor(moved, device=self.layers[0].keys.device).unbind(1)
            columns = slice(self._span.start, self._span.end)
            for layer in self.layers:
                for buffer in (layer.keys, layer.values):
                    buffer[here, :, columns] = buffer[there, :, columns]
        self._lengths = [self._lengths[source] for source in places]
        self._span.rows = len(places)
        if places:
            self._span.start = self._span.end - max(self._lengths)
        return places

    def reserve(self) -> None:
        """Make sure that a step can write its column."""
        self._make_room(0, columns_after=1)

    def advance(self) -> None:
        """Count the column that a step has written."""
        self._span.end += 1
        self._lengths = [length + 1 for length in self._lengths]

    def release(self) -> None:
        """Drop all rows and free the buffers."""
        self.layers.clear()
        self._lengths = []
        self._expected_rows = 0
        self._span.rows = self._span.start = self._span.end = 0

    def _make_room(self, rows: int, columns_before: int = 0, columns_after: int = 0) -> None:
        """Have capacity for more rows, for rows this long ending at `end`, and for columns after it."""
        span, buffer = self._span, self.layers[0].keys
        need_rows, need_before = span.rows + rows, max(columns_before, span.end - span.start)
        fits = need_rows <= buffer.shape[0] and span.end >= need_before and span.end + columns_after <= buffer.shape[2]
        if fits:
            return
        need = need_before + columns_after
        capacity = need + max(_GROWTH, need // 4)
        shift = need_before - span.end
        for layer in self.layers:
            layer.resize(max(need_rows, self._expected_rows, buffer.shape[0]), capacity, shift)
        span.start += shift
        span.end += shift
