"""Deterministic mode: draws depend on each sample's own seed."""

from __future__ import annotations

import struct

import torch
from rollout_testing import gen_batch_of, prompts_of
from sglang_testing import Parts

from ppo_lib.sglang_cpu import murmur_hash32


def murmur3(data: bytes) -> int:
    """MurmurHash3 for x86, 32 bits, by its definition."""
    low, state = 0xFFFFFFFF, 0
    for (word,) in struct.iter_unpack("<I", data):
        word = word * 0xCC9E2D51 & low
        word = (word << 15 | word >> 17) & low
        state ^= word * 0x1B873593 & low
        state = ((state << 13 | state >> 19) & low) * 5 + 0xE6546B64 & low
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & low
    state = (state ^ state >> 13) * 0xC2B2AE35 & low
    return state ^ state >> 16


def test_the_hash_that_draws_tokens_is_murmur3():
    assert murmur3(b"\0\0\0\0") == 0x2362F9DE  # a published value
    seeds, positions, columns = [0, 7, 2**31 - 1, 2**40 + 3], [0, 5, 4095, 17], list(range(50)) + [151_935]
    hashed = murmur_hash32(torch.tensor(seeds).to(torch.uint64), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [murmur3(struct.pack("<QII", seed, position, column)) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashed.dtype == torch.uint32
    assert hashed.to(torch.int64).tolist() == expected


def test_rollouts_of_a_group_differ_and_the_same_seed_gives_the_same_ones(model_dirs):
    parts = Parts(model_dirs["qwen3"], **{"engine_kwargs.sglang.enable_deterministic_inference": True})
    try:
        parts.checkpoints.update_weights(0)
        first, again, other_epoch = (
            parts.loops.generate_sequences(gen_batch_of(prompts_of([4, 9]), n=8, epoch=epoch)).batch["responses"]
            for epoch in (0, 0, 1)
        )
    finally:
        parts.close()
    assert first.tolist() == again.tolist()
    for group in (slice(0, 8), slice(8, 16)):
        assert len({tuple(row) for row in first[group].tolist()}) == 8
    assert all(a != b for a, b in zip(first.tolist(), other_epoch.tolist(), strict=True))
