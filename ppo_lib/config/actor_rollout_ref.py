"""Section `actor_rollout_ref`: the policy, its reference and its rollouts share one model."""

from __future__ import annotations

from ppo_lib.config.actor import ActorConfig, RefConfig
from ppo_lib.config.base import ConfigModel, Positive
from ppo_lib.config.model import ModelConfig
from ppo_lib.config.rollout import RolloutConfig


class ActorRolloutRefConfig(ConfigModel):
    """The policy, its reference and its rollouts: what their workers share."""

    model: ModelConfig = ModelConfig()
    """The network."""
    actor: ActorConfig = ActorConfig()
    """The policy update."""
    ref: RefConfig = RefConfig()
    """The frozen reference."""
    rollout: RolloutConfig = RolloutConfig()
    """Generation."""
    nccl_timeout: Positive = 600
    """Seconds one collective operation may take."""
