from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ppo_lib.errors import ModelError
from ppo_lib.workers.attention import Bucket, PackedLayout, packed_attention

CPU = torch.device("cpu")
LENGTHS = (1, 3, 3, 7, 2)


def states(heads: int, kv_heads: int, dim: int = 8) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = sum(LENGTHS)
    shapes = [(1, heads, tokens, dim), (1, kv_heads, tokens, dim), (1, kv_heads, tokens, dim)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int,
    prefixes: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Sequence by sequence, token by token."""
    group = query.shape[1] // key.shape[1]
    out, starts = torch.zeros_like(query), [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    for number, (start, length) in enumerate(zip(starts, LENGTHS)):
        parent = -1 if prefixes is None else prefixes[number]
        before = [] if parent < 0 else list(range(starts[parent], starts[parent] + LENGTHS[parent]))
        for i in range(start, start + length):
            seen = (before + list(range(start, i + 1)))[-window:]
            for head in range(query.shape[1]):
                weights = (key[0, head // group, seen] @ query[0, head, i] * scale).softmax(0)
                out[0, head, i] = weights @ value[0, head // group, seen]
    return out.transpose(1, 2)


@pytest.mark.parametrize("prefixes", [None, (-1, -1, 0, 1, 1), (-1, 0, 0, -1, 3)])
@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_each_sequence_sees_its_prefix_and_itself_in_its_window_only(
    heads: int, kv_heads: int, window: int | None, prefixes: tuple[int, ...] | None
) -> None:
    layout = PackedLayout(LENGTHS, CPU, prefixes)
    ours, theirs = states(heads, kv_heads), states(heads, kv_heads)
    out, _ = packed_attention(nn.Identity(), *ours, None, scaling=0.3, packed_rows=layout, sliding_window=window)
    expected = by_hand(*theirs, 0.3, window or 99, prefixes)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_neighbours_of_about_equal_length_attend_together_and_empty_ones_nowhere() -> None:
    layout = PackedLayout((30, 28, 0, 10, 30), CPU)
    assert layout.buckets == [Bucket(2, 30, 0), Bucket(1, 10, 0), Bucket(1, 30, 0)]
    assert len(layout.queries) == 30 + 30 + 10 + 30
    assert torch.equal(layout.queries[layout.answers], torch.arange(98))


def test_equal_lengths_need_no_copy() -> None:
    layout = PackedLayout((5, 5, 5), CPU)
    assert (layout.queries, layout.answers, layout.keys) == (None, None, None)


def test_sequences_behind_a_prefix_attend_to_its_keys_and_their_own() -> None:
    layout = PackedLayout((3, 2, 2), CPU, (-1, 0, 0))
    assert layout.buckets == [Bucket(1, 3, 0), Bucket(2, 2, 3)]
    assert layout.keys.tolist() == layout.key_index.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 5, 6]
    assert layout.cu_seqlens.tolist() == [0, 3, 5, 7]
    assert layout.cu_seqlens_k.tolist() == [0, 3, 8, 13]
    assert layout.max_length == 5


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
