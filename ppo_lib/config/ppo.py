"""The whole configuration."""

from __future__ import annotations

from typing import Any

import yaml
from pydantic import PrivateAttr, model_validator

from ppo_lib.config.actor_rollout_ref import ActorRolloutRefConfig
from ppo_lib.config.algorithm import AlgorithmConfig
from ppo_lib.config.base import ConfigModel
from ppo_lib.config.critic import CriticConfig
from ppo_lib.config.data import DataConfig
from ppo_lib.config.references import resolve
from ppo_lib.config.reward import RewardConfig
from ppo_lib.config.trainer import RayKwargsConfig, TrainerConfig
from ppo_lib.config.tree import copy


class PPOConfig(ConfigModel):
    """One run, validated: every key in it acts, and no two contradict each other."""

    data: DataConfig = DataConfig()
    """Prompts."""
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    """Policy, reference and rollouts."""
    critic: CriticConfig = CriticConfig()
    """Value model."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages."""
    trainer: TrainerConfig = TrainerConfig()
    """The run."""
    ray_kwargs: RayKwargsConfig = RayKwargsConfig()
    """Ray."""

    _notices: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, tree: Any) -> Any:
        return resolve(tree, cls) if isinstance(tree, dict) else tree

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for each key that was renamed, is ignored, or has no effect beside the others."""
        return self._notices

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as plain dictionaries and lists; validates to an equal configuration."""
        return copy(self.model_dump(mode="python"))

    def to_yaml(self) -> str:
        """The same as YAML."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
