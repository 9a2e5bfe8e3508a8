"""Advantages, losses and penalties as pure functions of tensors. `names` says what there is and imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lib.algorithms.advantages.gae import compute_gae_advantage_return as compute_gae_advantage_return
    from ppo_lib.algorithms.advantages.grpo import compute_grpo_advantage as compute_grpo_advantage
    from ppo_lib.algorithms.aggregate import Denominators as Denominators
    from ppo_lib.algorithms.aggregate import agg_loss as agg_loss
    from ppo_lib.algorithms.aggregate import denominators_of as denominators_of
    from ppo_lib.algorithms.kl import AdaptiveKLController as AdaptiveKLController
    from ppo_lib.algorithms.kl import FixedKLController as FixedKLController
    from ppo_lib.algorithms.kl import get_kl_controller as get_kl_controller
    from ppo_lib.algorithms.kl import kl_penalty as kl_penalty
    from ppo_lib.algorithms.loss_config import LossConfig as LossConfig
    from ppo_lib.algorithms.masked import masked_mean as masked_mean
    from ppo_lib.algorithms.masked import masked_sum as masked_sum
    from ppo_lib.algorithms.masked import masked_whiten as masked_whiten
    from ppo_lib.algorithms.policy_losses.vanilla import compute_policy_loss_vanilla as compute_policy_loss_vanilla
    from ppo_lib.algorithms.registry import get_adv_estimator_fn as get_adv_estimator_fn
    from ppo_lib.algorithms.registry import get_policy_loss_fn as get_policy_loss_fn
    from ppo_lib.algorithms.registry import register_adv_est as register_adv_est
    from ppo_lib.algorithms.registry import register_policy_loss as register_policy_loss
    from ppo_lib.algorithms.value_loss import compute_value_loss as compute_value_loss

_HOME = {
    "AdaptiveKLController": "kl",
    "Denominators": "aggregate",
    "FixedKLController": "kl",
    "LossConfig": "loss_config",
    "agg_loss": "aggregate",
    "compute_gae_advantage_return": "advantages.gae",
    "compute_grpo_advantage": "advantages.grpo",
    "compute_policy_loss_vanilla": "policy_losses.vanilla",
    "compute_value_loss": "value_loss",
    "denominators_of": "aggregate",
    "get_adv_estimator_fn": "registry",
    "get_kl_controller": "kl",
    "get_policy_loss_fn": "registry",
    "masked_mean": "masked",
    "masked_sum": "masked",
    "masked_whiten": "masked",
    "kl_penalty": "kl",
    "register_adv_est": "registry",
    "register_policy_loss": "registry",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use, so that importing `names` loads no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'ppo_lib.algorithms' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
