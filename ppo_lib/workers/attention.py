"""Attention over packed rows: many sequences side by side in one row of tokens, none seeing its neighbours.

A packed row has no padding, so no token is computed in vain, and a prompt that several responses continue stands in it
once: the responses see its keys and values as if each had a copy. On CUDA in half precision the variable-length flash
kernel that comes with torch does the work; elsewhere sequences of about the same length are viewed as a batch and go
through `scaled_dot_product_attention`, without a mask of the packed width.

The layout travels to the attention layers as a keyword argument of the model's forward, not through a global: with
activation checkpointing a layer is run a second time during backward, when a global would already be gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ppo_lib.errors import ModelError

__all__ = ["PACKED_ATTENTION", "PackedLayout", "packed_attention", "ranges", "register_packed_attention"]

PACKED_ATTENTION = "ppo_lib_packed"
"""The name under which `packed_attention` stands in transformers' table of attention functions."""

_WASTE = 0.15  # padding that a batch of sequences may have for being one call instead of two


@dataclass(frozen=True)
class Bucket:
    """Neighbouring sequences that attend in one call: `count` of them, the longest `width` tokens long, each behind a
    prefix of `prefix` tokens.
    """

    count: int
    width: int
    prefix: int


@dataclass(frozen=True)
class PackedLayout:
    """How a packed row of N tokens divides into sequences, in order.

    `prefixes`, where there are any, names for each sequence the one whose tokens come before its own, or -1. A sequence
    that is a prefix has none itself.
    """

    lengths: tuple[int, ...]
    device: torch.device
    prefixes: tuple[int, ...] | None = None

    @cached_property
    def starts(self) -> list[int]:
        """Where each sequence starts, and the end."""
        return [0, *accumulate(self.lengths)]

    @cached_property
    def before(self) -> list[tuple[int, int]]:
        """Where the prefix of each sequence starts, and its length; (0, 0) where it has none."""
        of = self.prefixes or (-1,) * len(self.lengths)
        return [(0, 0) if i < 0 else (self.starts[i], self.lengths[i]) for i in of]

    @cached_property
    def _members(self) -> list[list[int]]:
        """The sequences of each bucket."""
        members: list[list[int]] = []
        for i, length in enumerate(self.lengths):
            if not length:
                continue
            if members and self.before[members[-1][0]][1] == self.before[i][1]:
                extremes = [self.lengths[members[-1][0]], self.lengths[members[-1][-1]], length]
                if min(extremes) >= (1 - _WASTE) * max(extremes):
                    members[-1].append(i)
                    continue
            members.append([i])
        return members

    @cached_property
    def buckets(self) -> list[Bucket]:
        """The sequences in batches of about equal length and equally long prefixes, in order, empty ones left out."""
        return [Bucket(len(of), max(self.lengths[i] for i in of), self.before[of[0]][1]) for of in self._members]

    @cached_property
    def _own(self) -> list[torch.Tensor]:
        """(count, width) of each bucket: packed tokens; behind a shorter sequence its last one again."""
        own = []
        for bucket, members in zip(self.buckets, self._members):
            starts = torch.tensor([self.starts[i] for i in members])[:, None]
            last = torch.tensor([self.lengths[i] - 1 for i in members])[:, None]
            own.append(starts + torch.minimum(torch.arange(bucket.width), last))
        return own

    @cached_property
    def queries(self) -> torch.Tensor | None:
        """The packed token behind each query of all buckets; None where that is every token in order."""
        index = torch.cat([own.flatten() for own in self._own])
        return None if len(index) == self.starts[-1] else index.to(self.device)

    @cached_property
    def answers(self) -> torch.Tensor | None:
        """(N) int64: where the query of each token stands among `queries`; None where that is None."""
        if self.queries is None:
            return None
        starts, lengths, begin = [], [], 0
        for bucket, members in zip(self.buckets, self._members):
            starts += [begin + row * bucket.width for row in range(bucket.count)]
            lengths += [self.lengths[i] for i in members]
            begin += bucket.count * bucket.width
        return ranges(starts, lengths).to(self.device)

    @cached_property
    def keys(self) -> torch.Tensor | None:
        """The packed token behind each key of all buckets; None where that is every token in order."""
        if self.prefixes is None:
            return self.queries
        index = []
        for bucket, own, members in zip(self.buckets, self._own, self._members):
            before = torch.tensor([self.before[i][0] for i in members])[:, None] + torch.arange(bucket.prefix)
            index.append(torch.cat([before, own], dim=1).flatten())
        return torch.cat(index).to(self.device)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """Where each sequence's own tokens start, and the end: (sequences + 1) int32."""
        return torch.tensor(self.starts, dtype=torch.int32, device=self.device)

    @cached_property
    def cu_seqlens_k(self) -> torch.Tensor:
        """Where each sequence's keys start, its prefix's included, among `key_index`: (sequences + 1) int32."""
        lengths = [length + prefix for length, (_, prefix) in zip(self.lengths, self.before)]
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def key_index(self) -> torch.Tensor | None:
        """The packed token behind each key, sequence after sequence; None where none has a prefix."""
        if self.prefixes is None:
            return None
        own = zip(self.starts, self.lengths)
        parts = [part for before, mine in zip(self.before, own) for part in (before, mine)]
        return ranges([start for start, _ in parts], [length for _, length in parts]).to(self.device)

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest sequence, its prefix included."""
        return max((length + prefix for length, (_, prefix) in zip(self.lengths, self.before)), default=0)


def ranges(starts: list[int], lengths: list[int] | tuple[int, ...]) -> torch.Tensor:
    """The integers [start, start + length) of every pair, one after the other."""
    if not starts:
        return torch.zeros(0, dtype=torch.int64)
    counts = torch.tensor(lengths, dtype=torch.int64)
    offsets = torch.tensor(starts, dtype=torch.int64) - (counts.cumsum(0) - counts)
    return torch.arange(int(counts.sum())) + offsets.repeat_interleave(counts)


def register_packed_attention() -> None:
    """Make `attn_implementation=PACKED_ATTENTION` known to transformers, with no mask built for it. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    return None


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_rows: PackedLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention inside each sequence of a packed row; the signature is the one transformers calls.

    Args:
        module: the attention layer, named in errors.
        query: (1, heads, N, head_dim).
        key: (1, kv_heads, N, head_dim); heads are shared in groups where kv_heads is smaller.
        value: like `key`.
        attention_mask: must be None: a mask would silently undo the packing.
        scaling: factor of the scores, default head_dim ** -0.5.
        dropout: must be 0.
        packed_rows: the division into sequences.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.
        softcap: refused.
        s_aux: attention sinks, refused.

    Returns:
        (1, N, heads, head_dim) and None, as transformers expects it.

    Raises:
        ModelError: something is asked for that this attention does not compute.
    """
    rows = _checked_layout(module, packed_rows, attention_mask, dropout, softcap, s_aux)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _varlen(query, key, value, scaling, rows, sliding_window), None
    # In bf16 the CPU kernel's backward is nine times slower than in fp32 (88 ms against 10 ms for 2816 tokens, AMX
    # machine) and its forward no faster, so under autocast only the projections around it are bf16.
    with torch.autocast(query.device.type, enabled=False):
        out = _sliced(query.float(), key.float(), value.float(), scaling, rows, sliding_window)
    return out.to(query.dtype), None


def _checked_layout(
    module: nn.Module,
    packed_rows: PackedLayout | None,
    attention_mask: torch.Tensor | None,
    dropout: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> PackedLayout:
    """The layout, once nothing is asked for that is not computed."""
    layer = type(module).__name__
    if packed_rows is None:
        raise ModelError(
            f"{layer} was called without the layout of its packed rows: this model family does not hand keyword "
            "arguments of its forward down to its attention layers, so it cannot be trained on packed rows"
        )
    if attention_mask is not None:
        raise ModelError(f"{layer} brought an attention mask of its own; packed rows take none")
    if dropout:
        raise ModelError(f"{layer} asks for attention dropout {dropout}, which packed attention does not compute")
    if softcap is not None:
        raise ModelError(f"{layer} caps its scores (softcap {softcap}), which packed attention does not compute")
    if s_aux is not None:
        raise ModelError(f"{layer} uses attention sinks, which packed attention does not compute")
    return packed_rows


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    rows: PackedLayout,
    window: int | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # (N, heads, head_dim)
    if rows.key_index is not None:
        key, value = key.index_select(0, rows.key_index), value.index_select(0, rows.key_index)
    out = varlen_attn(
        query,
        key,
        value,
        rows.cu_seqlens,
        rows.cu_seqlens_k,
        rows.max_length,
        rows.max_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),  # aligned at the last query and key of each sequence
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast(torch.Tensor, out).unsqueeze(0)  # a pair only where more is asked for


def _sliced(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    rows: PackedLayout,
    window: int | None,
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # (N, heads, head_dim)
    if rows.queries is not None:
        query = query.index_select(0, rows.queries)
    if rows.keys is not None:
        key, value = key.index_select(0, rows.keys), value.index_select(0, rows.keys)
    # `split` and not slicing: the backward of a slice writes a whole packed row of zeros, once per slice.
    queries = _split(query, [bucket.count * bucket.width for bucket in rows.buckets])
    sizes = [bucket.count * (bucket.prefix + bucket.width) for bucket in rows.buckets]
    outputs = []
    for bucket, *states in zip(rows.buckets, queries, _split(key, sizes), _split(value, sizes)):
        # (count, heads, width, head_dim)
        q, k, v = (part.unflatten(0, (bucket.count, -1)).transpose(1, 2) for part in states)
        mask = _causal_mask(bucket, window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # (count * width, heads, head_dim)
    answer = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (answer if rows.answers is None else answer.index_select(0, rows.answers)).unsqueeze(0)


def _split(states: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    return (states,) if len(sizes) == 1 else states.split(sizes)  # splitting into one still copies in backward


def _causal_mask(bucket: Bucket, window: int | None, device: torch.device) -> torch.Tensor | None:
    """(width, prefix + width), true where a query may see a key; None where plain causality says it all."""
    if bucket.prefix == 0 and (window is None or bucket.width <= window):
        return None
    queries = torch.arange(bucket.width, device=device)[:, None] + bucket.prefix
    distance = queries - torch.arange(bucket.prefix + bucket.width, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)
