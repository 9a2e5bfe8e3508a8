"""Small runs of the real trainer, for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ppo_lib import RayPPOTrainer, load_config

TINY = (
    "actor_rollout_ref.model.path=builtin:tiny-llama",
    "data.train_files=builtin:repeat-digit",
    "data.val_files=builtin:repeat-digit",
    "data.train_batch_size=4",
    "data.max_prompt_length=4",
    "data.max_response_length=8",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.agent.num_workers=0",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.ref.fsdp_config.dtype=float32",
    "critic.fsdp.dtype=float32",
    "critic.optim.lr=1e-3",
    "reward.num_workers=0",
    "trainer.n_gpus_per_node=1",
    "trainer.device=cpu",
    "trainer.worker_group=local",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.resume_mode=disable",
    "trainer.logger=[file]",
)
PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.01",
    "algorithm.kl_ctrl.horizon=100",
)
GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true")

# Metrics that depend on the clock or on the process, not on the run.
CLOCKED = ("timing_", "perf/")


def tiny_trainer(folder: Path, *overrides: str, **arguments: Any) -> RayPPOTrainer:
    """A trainer on the tiny model, writing to `folder`, its workers not started."""
    return RayPPOTrainer(load_config(overrides=[*TINY, f"trainer.default_local_dir={folder}", *overrides]), **arguments)


def run(folder: Path, *overrides: str, **arguments: Any) -> list[dict[str, float]]:
    """Train to the end and give back the lines of `metrics.jsonl`, without the clocked metrics."""
    trainer = tiny_trainer(folder, *overrides, **arguments)
    try:
        trainer.init_workers()
        trainer.fit()
    finally:
        trainer.close()
    return metrics_of(folder)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """The lines of a run's `metrics.jsonl`, without the clocked metrics."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(CLOCKED)} for line in lines]
