"""The runs of `yaml_configs/` that a CPU can do learn what they promise, on three seeds. Minutes each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CONFIGS = Path(__file__).parents[1] / "yaml_configs"
SEEDS = (42, 1, 2)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def train(config: str, seed: int, folder: Path) -> list[dict[str, float]]:
    """Run a shipped configuration from the command line, over Ray; the lines of its metrics."""
    words = [str(CONFIGS / config), f"trainer.seed={seed}", f"trainer.default_local_dir={folder}"]
    subprocess.run([sys.executable, "-m", "ppo_lib", "train", *words], check=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def mean(lines: list[dict[str, float]], name: str) -> float:
    values = [line[name] for line in lines]
    return sum(values) / len(values)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pretrained_model_learns_arithmetic_it_was_not_trained_on(seed, tmp_path):
    before, *steps = train("quickstart.yaml", seed, tmp_path)
    assert mean(steps[:3], "critic/score/mean") <= 0.4
    assert mean(steps[-5:], "critic/score/mean") >= 0.8
    held_out = "val-core/arithmetic/acc/mean@1"
    assert before[held_out] < 0.5
    assert steps[-1][held_out] >= 0.7


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_with_a_critic_learns_from_random_weights(seed, tmp_path):
    _, *steps = train("ppo_gae_tiny.yaml", seed, tmp_path)
    assert mean(steps[:3], "critic/score/mean") < 0.1
    assert mean(steps[-5:], "critic/score/mean") >= 0.9
