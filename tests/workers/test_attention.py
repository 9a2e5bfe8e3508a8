from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ppo_lib.errors import ModelError
from ppo_lib.workers.attention import PackedLayout, packed_attention

CPU = torch.device("cpu")
LENGTHS = (1, 3, 3, 7, 2)


def states(heads: int, kv_heads: int, dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = sum(LENGTHS)
    shapes = [(1, heads, tokens, dim), (1, kv_heads, tokens, dim), (1, kv_heads, tokens, dim)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int) -> torch.Tensor:
    """Row by row, token by token."""
    group = query.shape[1] // key.shape[1]
    out, start = torch.zeros_like(query), 0
    for length in LENGTHS:
        for i in range(start, start + length):
            seen = slice(max(start, i - window + 1), i + 1)
            for head in range(query.shape[1]):
                weights = (key[0, head // group, seen] @ query[0, head, i] * scale).softmax(0)
                out[0, head, i] = weights @ value[0, head // group, seen]
        start += length
    return out.transpose(1, 2)


@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_each_row_sees_itself_and_its_window_only(heads: int, kv_heads: int, window: int | None) -> None:
    layout = PackedLayout(LENGTHS, CPU)
    ours, theirs = states(heads, kv_heads), states(heads, kv_heads)
    out, _ = packed_attention(nn.Identity(), *ours, None, scaling=0.3, packed_rows=layout, sliding_window=window)
    expected = by_hand(*theirs, 0.3, window or 99)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_equal_neighbours_form_runs_and_empty_rows_none() -> None:
    assert PackedLayout((3, 3, 0, 5, 3), CPU).runs == [(3, 2), (5, 1), (3, 1)]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"packed_rows": None}, "without the layout"),
        ({"attention_mask": torch.zeros(1)}, "attention mask"),
        ({"dropout": 0.1}, "dropout 0.1"),
        ({"softcap": 30.0}, "softcap 30"),
        ({"s_aux": torch.zeros(4)}, "attention sinks"),
    ],
)
def test_what_is_not_computed_is_refused(argument: dict[str, Any], message: str) -> None:
    arguments = {"attention_mask": None, "packed_rows": PackedLayout(LENGTHS, CPU)} | argument
    with pytest.raises(ModelError, match=message):
        packed_attention(nn.Identity(), *states(2, 2), **arguments)


def test_attention_stays_in_fp32_under_autocast() -> None:
    query, key, value = (tensor.detach() for tensor in states(2, 2))
    plain, _ = packed_attention(nn.Identity(), query, key, value, None, packed_rows=PackedLayout(LENGTHS, CPU))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = packed_attention(nn.Identity(), query, key, value, None, packed_rows=PackedLayout(LENGTHS, CPU))
    assert cast.dtype == torch.float32
    assert torch.equal(plain, cast)
