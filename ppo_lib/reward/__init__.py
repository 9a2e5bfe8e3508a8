"""Scores: scorers by `data_source`, managers, and the loop that runs them while other samples are still being written.

The names are loaded when they are used: an actor that only scores does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lib.reward.adapt import as_batch_reward, check_dataset, is_per_sample
    from ppo_lib.reward.batch import columns_of, place_scores
    from ppo_lib.reward.function import load_reward_fn
    from ppo_lib.reward.loop import RewardLoopManager
    from ppo_lib.reward.managers import RewardManager, decode_response, register_reward_manager
    from ppo_lib.reward.sample import RewardResult, RewardSample
    from ppo_lib.reward.scorers import default_compute_score

_HOME = {
    "RewardLoopManager": "loop",
    "RewardManager": "managers",
    "RewardResult": "sample",
    "RewardSample": "sample",
    "as_batch_reward": "adapt",
    "check_dataset": "adapt",
    "columns_of": "batch",
    "decode_response": "managers",
    "default_compute_score": "scorers",
    "is_per_sample": "adapt",
    "load_reward_fn": "function",
    "place_scores": "batch",
    "register_reward_manager": "managers",
}
__all__ = [
    "RewardLoopManager",
    "RewardManager",
    "RewardResult",
    "RewardSample",
    "as_batch_reward",
    "check_dataset",
    "columns_of",
    "decode_response",
    "default_compute_score",
    "is_per_sample",
    "load_reward_fn",
    "place_scores",
    "register_reward_manager",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"ppo_lib.reward.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ppo_lib.reward' has no attribute {name!r}; it has {', '.join(__all__)}")
