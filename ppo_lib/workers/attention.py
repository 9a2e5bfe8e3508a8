"""Attention over packed rows: many sequences side by side in one row of tokens, none seeing its neighbours.

A packed row has no padding, so no token is computed in vain. On CUDA in half precision the variable-length flash
kernel that comes with torch does the work; elsewhere each run of equally long sequences is viewed as a
batch and goes through `scaled_dot_product_attention`, without a copy and without a mask of the packed width.

The layout travels to the attention layers as a keyword argument of the model's forward, not through a global: with
activation checkpointing a layer is run a second time during backward, when a global would already be gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ppo_lib.errors import ModelError

__all__ = ["PACKED_ATTENTION", "PackedLayout", "packed_attention", "register_packed_attention"]

PACKED_ATTENTION = "ppo_lib_packed"
"""The name under which `packed_attention` stands in transformers' table of attention functions."""


@dataclass(frozen=True)
class PackedLayout:
    """How a packed row of N tokens divides into sequences, in order."""

    lengths: tuple[int, ...]
    device: torch.device

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbours of equal length taken together: `(length, count)`, in order, empty sequences left out."""
        runs: list[tuple[int, int]] = []
        for length in self.lengths:
            if runs and runs[-1][0] == length:
                runs[-1] = (length, runs[-1][1] + 1)
            elif length:
                runs.append((length, 1))
        return runs

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """Where each sequence starts, and the end: (rows + 1) int32."""
        bounds = torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return bounds.to(self.device)

    @cached_property
    def max_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths, default=0)


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
    out = varlen_attn(
        query,
        key,
        value,
        rows.cu_seqlens,
        rows.cu_seqlens,
        rows.max_length,
        rows.max_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
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
    sizes = [length * count for length, count in rows.runs]
    outputs = []
    # `split` and not slicing: the backward of a slice writes a whole packed row of zeros, once per slice.
    for (length, count), q, k, v in zip(rows.runs, *(_split(states, sizes) for states in (query, key, value))):
        # (count, heads, length, head_dim)
        q, k, v = (states.unflatten(0, (count, length)).transpose(1, 2) for states in (q, k, v))
        band = None if window is None or length <= window else _causal_band(length, window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=grouped
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))  # (count * len, heads, d)
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


def _split(states: torch.Tensor, sizes: list[int]) -> Sequence[torch.Tensor]:
    """(1, heads, N, head_dim) to one (size, heads, head_dim) per run."""
    tokens = states[0].transpose(0, 1)
    return [tokens] if len(sizes) == 1 else tokens.split(sizes)  # splitting into one still copies in backward


def _causal_band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """True where position i may see position j: i - window < j <= i."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    return (distance >= 0) & (distance < window)
