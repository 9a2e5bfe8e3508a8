"""Advantages, losses and penalties as pure functions of tensors. `names` says what there is and imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lib.algorithms.advantages.gae import compute_gae_advantage_return
    from ppo_lib.algorithms.advantages.grpo import compute_grpo_advantage
    from ppo_lib.algorithms.aggregate import Denominators, agg_loss, denominators_of
    from ppo_lib.algorithms.kl import AdaptiveKLController, FixedKLController, full_kl, get_kl_controller, kl_penalty
    from ppo_lib.algorithms.loss_config import LossConfig, PolicyLossSettings
    from ppo_lib.algorithms.masked import masked_mean, masked_sum, masked_whiten
    from ppo_lib.algorithms.policy_losses.vanilla import compute_policy_loss_vanilla
    from ppo_lib.algorithms.registry import (
        get_adv_estimator_fn,
        get_of_mini_batch_fn,
        get_policy_loss_fn,
        register_adv_est,
        register_policy_loss,
    )
    from ppo_lib.algorithms.value_loss import compute_value_loss

_HOME = {
    "AdaptiveKLController": "kl",
    "Denominators": "aggregate",
    "FixedKLController": "kl",
    "LossConfig": "loss_config",
    "PolicyLossSettings": "loss_config",
    "agg_loss": "aggregate",
    "compute_gae_advantage_return": "advantages.gae",
    "compute_grpo_advantage": "advantages.grpo",
    "compute_policy_loss_vanilla": "policy_losses.vanilla",
    "compute_value_loss": "value_loss",
    "denominators_of": "aggregate",
    "full_kl": "kl",
    "get_adv_estimator_fn": "registry",
    "get_kl_controller": "kl",
    "get_of_mini_batch_fn": "registry",
    "get_policy_loss_fn": "registry",
    "kl_penalty": "kl",
    "masked_mean": "masked",
    "masked_sum": "masked",
    "masked_whiten": "masked",
    "register_adv_est": "registry",
    "register_policy_loss": "registry",
}
__all__ = [
    "AdaptiveKLController",
    "Denominators",
    "FixedKLController",
    "LossConfig",
    "PolicyLossSettings",
    "agg_loss",
    "compute_gae_advantage_return",
    "compute_grpo_advantage",
    "compute_policy_loss_vanilla",
    "compute_value_loss",
    "denominators_of",
    "full_kl",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_of_mini_batch_fn",
    "get_policy_loss_fn",
    "kl_penalty",
    "masked_mean",
    "masked_sum",
    "masked_whiten",
    "register_adv_est",
    "register_policy_loss",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use, so that importing `names` loads no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'ppo_lib.algorithms' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
