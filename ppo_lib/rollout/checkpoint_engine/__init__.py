"""Moving weights from training ranks into rollout replicas."""

from __future__ import annotations

from ppo_lib.rollout.checkpoint_engine.base import CheckpointEngine, TrainerGroup, WeightSender
from ppo_lib.rollout.checkpoint_engine.manager import (
    CheckpointEngineManager,
    checkpoint_engine_factory,
    register_checkpoint_engine,
)
from ppo_lib.rollout.checkpoint_engine.naive import NaiveCheckpointEngine

__all__ = [
    "CheckpointEngine",
    "CheckpointEngineManager",
    "NaiveCheckpointEngine",
    "TrainerGroup",
    "WeightSender",
    "checkpoint_engine_factory",
    "register_checkpoint_engine",
]
