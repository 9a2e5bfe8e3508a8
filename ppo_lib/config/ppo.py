"""The whole configuration."""

from __future__ import annotations

import logging
from typing import Any

import yaml
from pydantic import ModelWrapValidatorHandler, PrivateAttr, ValidationInfo, model_validator

from ppo_lib.config import compat
from ppo_lib.config.actor_rollout_ref import ActorRolloutRefConfig
from ppo_lib.config.algorithm import AlgorithmConfig
from ppo_lib.config.base import ConfigModel, takes_text
from ppo_lib.config.critic import CriticConfig
from ppo_lib.config.data import DataConfig
from ppo_lib.config.effects import notices_on
from ppo_lib.config.references import Resolver, fields_of, sections_of
from ppo_lib.config.reward import RewardConfig
from ppo_lib.config.rules import problems_of
from ppo_lib.config.sources import Sources
from ppo_lib.config.trainer import RayKwargsConfig, TrainerConfig
from ppo_lib.config.tree import Path, copy, dotted, get, leaves, put, remove
from ppo_lib.errors import ConfigError

logger = logging.getLogger("ppo_lib.config")


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

    @model_validator(mode="wrap")
    @classmethod
    def _whole(cls, tree: Any, validate: ModelWrapValidatorHandler[PPOConfig], info: ValidationInfo) -> PPOConfig:
        if not isinstance(tree, dict):
            return validate(tree)
        tree, typed, notices = _prepare(tree, info.context if isinstance(info.context, Sources) else Sources())
        config = validate(tree)
        if problems := problems_of(config):
            raise ConfigError("\n".join(problems))
        config._notices = (*notices, *notices_on(config, typed))
        for line in config.notices:
            logger.warning(line)
        return config

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for each key that was renamed, is ignored, or has no effect beside the others."""
        return self._notices

    def __eq__(self, other: object) -> bool:
        """Whether every key is the same; by what names they were typed does not matter."""
        return isinstance(other, PPOConfig) and self.to_dict() == other.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as plain dictionaries and lists; validates to an equal configuration."""
        return copy(self.model_dump(mode="python"))

    def to_yaml(self) -> str:
        """The same as YAML. Raises ConfigError where an open dictionary holds what YAML cannot."""
        try:
            return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        except yaml.YAMLError as error:
            raise ConfigError(f"the configuration cannot be written as YAML: {error}") from None


def _prepare(tree: dict[str, Any], sources: Sources) -> tuple[dict[str, Any], dict[Path, Any], list[str]]:
    """What the models validate; each typed key with the value it would have had anyway; a line for each foreign key."""
    tree = copy(tree)
    for section in sections_of(PPOConfig):
        if get(tree, section) is None:  # `critic:` with nothing under it
            remove(tree, section)

    def acts(path: Path) -> bool:
        return any(path[:end] in fields_of(PPOConfig) for end in range(1, len(path) + 1))

    notices = compat.rename(tree, sources, acts)
    tree = Resolver(tree, PPOConfig).expanded()
    notices += compat.retire(tree, sources, acts, Resolver(tree, PPOConfig).look_up)
    for path, text in sources.texts.items():
        if path in fields_of(PPOConfig) and takes_text(fields_of(PPOConfig)[path]) and _is_number(get(tree, path)):
            put(tree, path, text)  # a run named 010 or 1e-6 keeps its name
    left_open = [
        f"{dotted(path)} is ???, left open{sources.of(path)}; set it" for path, v in leaves(tree) if v == "???"
    ]
    if left_open:
        raise ConfigError("\n".join(left_open))
    typed = {path[:end] for path, _ in leaves(tree) for end in range(1, len(path) + 1)} & fields_of(PPOConfig).keys()
    otherwise = {path: Resolver(tree, PPOConfig).untyped(path) for path in typed}
    sources.following = Resolver(tree, PPOConfig).fill()
    return tree, otherwise, notices


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
