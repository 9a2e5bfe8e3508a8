"""What a worker does in a run. A role maps to a worker class in one place and to a resource pool in another."""

from __future__ import annotations

from enum import Enum

__all__ = ["Role"]


class Role(Enum):
    """A job in the run. `str(role)` is the key under which its worker group is found, and its name in errors."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "reward_model"
    ActorRolloutRef = "actor_rollout_ref"

    def __str__(self) -> str:
        return self.value
