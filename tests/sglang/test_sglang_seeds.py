"""Deterministic mode: draws depend on each sample's own seed."""

from __future__ import annotations

from rollout_testing import gen_batch_of, prompts_of
from sglang_testing import Parts


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
