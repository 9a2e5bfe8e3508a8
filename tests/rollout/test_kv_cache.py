from __future__ import annotations

import random

import pytest
import torch
from transformers.cache_utils import DynamicCache

from ppo_lib.rollout.attention import decode_attention
from ppo_lib.rollout.kv_cache import RowCache

LAYERS, HEADS, SIZE = 2, 2, 4


def _column(row: int, position: int) -> torch.Tensor:
    """What layer 0 holds for one token: (heads, size) that tells which token it is."""
    return torch.full((HEADS, SIZE), float(row * 1000 + position))


def _prefill(rows: list[tuple[int, int]]) -> DynamicCache:
    """Left-padded states of (row id, length); the padding is not zero, as in a real prefill."""
    width = max(length for _, length in rows)
    states = torch.full((len(rows), HEADS, width, SIZE), -7.0)
    for i, (row, length) in enumerate(rows):
        for position in range(length):
            states[i, :, width - length + position] = _column(row, position)
    cache = DynamicCache()
    for layer in range(LAYERS):
        cache.update(states + layer, states - layer, layer)
    return cache


def _step(cache: RowCache, ids: list[int], lengths: list[int]) -> list[torch.Tensor]:
    cache.reserve()
    new = torch.stack([_column(row, length) for row, length in zip(ids, lengths, strict=True)]).unsqueeze(2)
    seen = [cache.update(new + layer, new - layer, layer)[0] for layer in range(LAYERS)]
    cache.advance()
    return seen


def test_rows_keep_their_tokens_through_any_joins_steps_and_removals():
    for seed in range(20):
        chance = random.Random(seed)
        cache, ids, lengths, made = RowCache(), [], [], 0
        for _ in range(60):
            if not ids or chance.random() < 0.15:
                joining = [(made + i, chance.randint(1, 90)) for i in range(chance.randint(1, 5))]
                made += len(joining)
                cache.expect(len(joining))
                cache.add(_prefill(joining), [length for _, length in joining], list(range(len(joining))))
                ids += [row for row, _ in joining]
                lengths += [length for _, length in joining]
            seen = _step(cache, ids, lengths)
            lengths = [length + 1 for length in lengths]
            assert cache.lengths == lengths
            assert cache.width == max(lengths)
            assert cache.get_seq_length() == max(lengths)
            for layer, keys in enumerate(seen):
                assert keys.shape == (len(ids), HEADS, max(lengths), SIZE)
                for place, (row, length) in enumerate(zip(ids, lengths, strict=True)):
                    expected = torch.stack([_column(row, position) for position in range(length)], 1) + layer
                    assert torch.equal(keys[place, :, -length:], expected)
            gone = [place for place in range(len(ids)) if chance.random() < 0.1]
            if gone:
                places = cache.remove(gone)
                assert sorted(places) == [place for place in range(len(ids)) if place not in gone]
                ids, lengths = [ids[place] for place in places], [lengths[place] for place in places]


def test_a_group_copies_the_row_of_its_prompt():
    cache = RowCache()
    cache.add(_prefill([(1, 5), (2, 3)]), [5, 5, 3], [0, 0, 1])
    keys = _step(cache, [1, 1, 2], [5, 5, 3])[0]
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(keys[2, :, -4:], torch.stack([_column(2, position) for position in range(4)], 1))


def test_release_frees_the_buffers():
    cache = RowCache()
    cache.add(_prefill([(1, 5)]), [5], [0])
    assert cache.nbytes() > 0
    cache.release()
    assert (cache.nbytes(), cache.lengths, cache.width) == (0, [], 0)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("queries", [1, 3])
def test_grouped_decoding_equals_attention_over_repeated_heads(kv_heads, masked, queries):
    generator = torch.Generator().manual_seed(0)
    rows, heads, width = 3, 8, 6
    query = torch.randn(rows, heads, queries, SIZE, generator=generator)
    key, value = (torch.randn(rows, kv_heads, width, SIZE, generator=generator) for _ in range(2))
    allowed = torch.arange(width) >= torch.tensor([0, 2, 5])[:, None]  # (rows, width), left-padded
    causal = torch.ones(queries, width, dtype=torch.bool).tril(width - queries)
    mask = (
        (allowed[:, None, None] & causal if masked else causal.expand(rows, 1, -1, -1))
        if masked or queries > 1
        else None
    )
    module = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads
    out, _ = decode_attention(module, query, key, value, mask, scaling=0.3)
    scores = query @ key.repeat_interleave(heads // kv_heads, 1).transpose(2, 3) * 0.3
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    expected = scores.softmax(-1).nan_to_num() @ value.repeat_interleave(heads // kv_heads, 1)
    torch.testing.assert_close(out, expected.transpose(1, 2), atol=1e-5, rtol=0)
