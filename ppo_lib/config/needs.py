"""Which parts a run needs: the trainer builds them, `check` prints them, the rules hold their keys together."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ppo_lib.algorithms import names

if TYPE_CHECKING:
    from ppo_lib.config.actor import ActorConfig
    from ppo_lib.config.algorithm import RolloutCorrectionConfig
    from ppo_lib.config.model import NetworkConfig
    from ppo_lib.config.ppo import PPOConfig


def need_critic(config: PPOConfig) -> bool:
    """Whether a value model is trained: as `critic.enable` says, else where the advantage estimator reads values."""
    if config.critic.enable is not None:
        return config.critic.enable
    return names.find_adv_estimator(config.algorithm.adv_estimator).needs_critic


def need_reference_policy(config: PPOConfig) -> bool:
    """Whether the frozen reference is kept: for the KL in the reward or the KL in the loss."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def reads_field(adv_estimator: str, field: str) -> bool:
    """Whether an advantage estimator needs a field of the envelope, or takes it where it is there."""
    row = names.find_adv_estimator(adv_estimator)
    return field in row.needs | row.uses


def estimator_reads(config: PPOConfig, field: str) -> bool:
    """`reads_field` for the estimator of this run."""
    return reads_field(config.algorithm.adv_estimator, field)


def need_sum_pi_squared(config: PPOConfig) -> bool:
    """Whether the pass over the old log-probs also measures `sum_pi_squared`."""
    return config.actor_rollout_ref.actor.calculate_sum_pi_squared or estimator_reads(config, "sum_pi_squared")


def corrects_rollouts(config: PPOConfig) -> bool:
    """Whether rollouts are weighed or rejected before the update, by the trainer's own log-probs."""
    correction = config.algorithm.rollout_correction
    return not correction.bypass_mode and (correction.rollout_is is not None or correction.rollout_rs is not None)


def policy_loss_mode(actor: ActorConfig, correction: RolloutCorrectionConfig) -> str:
    """The policy loss: `policy_loss.loss_mode`, or in bypass mode, where that is vanilla, `loss_type`."""
    mode = actor.policy_loss.loss_mode
    return correction.loss_type if correction.bypass_mode and mode == "vanilla" else mode


def weighs_in_update(loss_mode: str, correction: RolloutCorrectionConfig) -> bool:
    """Whether the policy loss is weighed by the policy of each update step over the rollout's: reinforce's bypass."""
    return correction.bypass_mode and correction.rollout_is is not None and loss_mode == "reinforce"


def need_old_log_probs(config: PPOConfig, engine: str | None = None) -> bool:
    """Whether the actor's log-probs are computed before the update.

    With `recompute_old_log_probs: auto` and exactly one optimizer step after each rollout, the actor that updates is
    the actor that would be measured, so the pass is left out, unless something else reads its result: the KL in the
    reward, rollout correction, the advantage estimator, or (since nobody knows what that reads) an estimator of the
    user's own. Under sglang it stays, because only it shows how far that engine's log-probs stand from the actor's. In
    bypass mode the rollout's log-probs stand in for them. `engine` is what `rollout.name: auto` came to.
    """
    if config.algorithm.rollout_correction.bypass_mode:
        return False
    actor, estimator = config.actor_rollout_ref.actor, config.algorithm.adv_estimator
    rollout = config.actor_rollout_ref.rollout
    one_step = actor.ppo_mini_batch_size == config.data.train_batch_size and actor.ppo_epochs == 1
    return (
        actor.recompute_old_log_probs == "always"
        or not one_step
        or ((engine or rollout.name) == "sglang" and rollout.calculate_log_probs)
        or config.algorithm.use_kl_in_reward
        or corrects_rollouts(config)
        or need_sum_pi_squared(config)
        or names.is_reference(estimator)
        or "old_log_probs" in names.find_adv_estimator(estimator).needs
    )


def uses_lora(model: NetworkConfig) -> bool:
    """Whether a low-rank adapter is trained in place of the network's own weights."""
    return model.lora_rank > 0 or model.lora_adapter_path is not None


def worker_count(configured: int | None) -> int:
    """A worker count as configured, where null means min(8, cores)."""
    return min(8, os.cpu_count() or 1) if configured is None else configured
