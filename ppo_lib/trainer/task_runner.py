"""One training run from a resolved configuration, and a clean machine after it."""

from __future__ import annotations

from typing import Any

from ppo_lib.config import PPOConfig
from ppo_lib.trainer.ray_trainer import RayPPOTrainer


class TaskRunner:
    """Build the trainer, run it, close it. Subclass and override `trainer_arguments` to bring your own parts.

    A plain class: it runs in the calling process, and `ray.remote(TaskRunner)` runs it on a cluster's node.
    """

    def trainer_arguments(self, config: PPOConfig) -> dict[str, Any]:
        """Keyword arguments of `RayPPOTrainer` beyond the config: datasets, reward functions, role mappings."""
        return {}

    def run(self, config: PPOConfig) -> dict[str, float]:
        """Train to the end and return the last step's metrics. Whatever happens, nothing this started stays running."""
        trainer = RayPPOTrainer(config, **self.trainer_arguments(config))
        try:
            trainer.init_workers()
            return trainer.fit()
        finally:
            trainer.close()
