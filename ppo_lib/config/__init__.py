"""The configuration: pydantic models, one file per section, and `load_config`. Imports no torch."""

from __future__ import annotations

from ppo_lib.config.actor import ActorConfig, PolicyLossConfig, RefConfig
from ppo_lib.config.actor_rollout_ref import ActorRolloutRefConfig
from ppo_lib.config.algorithm import AlgorithmConfig, KLCtrlConfig
from ppo_lib.config.arithmetic import StepArithmetic, UpdateArithmetic, step_arithmetic
from ppo_lib.config.critic import CriticConfig
from ppo_lib.config.data import DataConfig
from ppo_lib.config.loader import as_config, load_config
from ppo_lib.config.model import CriticModelConfig, ModelConfig
from ppo_lib.config.needs import (
    corrects_rollouts,
    estimator_reads,
    need_critic,
    need_old_log_probs,
    need_reference_policy,
    need_sum_pi_squared,
    policy_loss_mode,
    reads_field,
    weighs_in_update,
    worker_count,
)
from ppo_lib.config.ppo import PPOConfig
from ppo_lib.config.reward import RewardConfig
from ppo_lib.config.rollout import RolloutConfig
from ppo_lib.config.trainer import RayKwargsConfig, TrainerConfig
from ppo_lib.config.training import CheckpointConfig, CriticOptimConfig, FSDPConfig, OptimConfig, TrainedFSDPConfig

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgorithmConfig",
    "CheckpointConfig",
    "CriticConfig",
    "CriticModelConfig",
    "CriticOptimConfig",
    "DataConfig",
    "FSDPConfig",
    "KLCtrlConfig",
    "ModelConfig",
    "OptimConfig",
    "PPOConfig",
    "PolicyLossConfig",
    "RayKwargsConfig",
    "RefConfig",
    "RewardConfig",
    "RolloutConfig",
    "StepArithmetic",
    "TrainedFSDPConfig",
    "TrainerConfig",
    "UpdateArithmetic",
    "as_config",
    "corrects_rollouts",
    "estimator_reads",
    "load_config",
    "need_critic",
    "need_old_log_probs",
    "need_reference_policy",
    "need_sum_pi_squared",
    "policy_loss_mode",
    "reads_field",
    "step_arithmetic",
    "weighs_in_update",
    "worker_count",
]
