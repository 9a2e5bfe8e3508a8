"""The losses of actor and critic as functions of (b, r) matrices, closed over their configuration."""

from __future__ import annotations

from typing import Any

import torch

from ppo_lib.algorithms import (
    Denominators,
    LossConfig,
    agg_loss,
    compute_value_loss,
    get_of_mini_batch_fn,
    get_policy_loss_fn,
    kl_penalty,
)
from ppo_lib.algorithms.rollout_correction import importance_weights
from ppo_lib.config import policy_loss_mode, weighs_in_update
from ppo_lib.workers.training_worker import LossFunction, OfMiniBatch

__all__ = ["of_mini_batch", "policy_loss", "value_loss"]


def policy_loss(actor: Any, correction: Any = None) -> LossFunction:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL to the reference, as an `actor` section says.

    `correction` is section `algorithm.rollout_correction`: in bypass mode it chooses the policy loss, and how reinforce
    weighs: by the policy now over the rollout, whose log-probs the old ones are.

    Columns: `advantages`, and where present `old_log_probs` (absent: the log-probabilities now, which is what they are
    when one step follows a rollout), `ref_log_prob` (needed with `use_kl_loss`), `rollout_is_weights`.
    """
    loss_mode = _loss_mode(actor, correction)
    policy_loss_fn = get_policy_loss_fn(loss_mode)
    weighs = correction is not None and weighs_in_update(loss_mode, correction)
    mode = actor.loss_agg_mode

    def loss_fn(
        outputs: dict[str, torch.Tensor], given: dict[str, torch.Tensor], denominators: Denominators, found: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `LossFunction`."""
        log_probs, mask = outputs["log_probs"], given["response_mask"]
        old_log_probs = given.get("old_log_probs", log_probs.detach())
        weights = given.get("rollout_is_weights")
        if weighs:
            weights = importance_weights(log_probs.detach(), old_log_probs, mask, correction)
        loss, metrics = policy_loss_fn(
            old_log_probs,
            log_probs,
            given["advantages"],
            mask,
            mode,
            LossConfig.from_actor(actor, denominators, found),
            weights,
        )
        metrics = {"pg_loss": loss.detach(), **metrics}
        if "entropys" in outputs:
            entropy = agg_loss(outputs["entropys"], mask, mode, denominators)
            metrics["entropy"] = entropy.detach()
            if actor.entropy_coeff:
                loss = loss - actor.entropy_coeff * entropy
        if actor.use_kl_loss:
            kl = agg_loss(
                kl_penalty(log_probs, given["ref_log_prob"], actor.kl_loss_type, mask), mask, mode, denominators
            )
            metrics["kl_loss"] = kl.detach()
            loss = loss + actor.kl_loss_coef * kl
        return loss, metrics

    return loss_fn


def of_mini_batch(actor: Any, correction: Any = None) -> OfMiniBatch | None:
    """What the policy loss of an `actor` section has to find out from a whole mini-batch; None if nothing."""
    find_out = get_of_mini_batch_fn(_loss_mode(actor, correction))
    if find_out is None:
        return None

    def of_tokens(outputs: dict[str, torch.Tensor], given: dict[str, torch.Tensor]) -> Any:
        """See `OfMiniBatch`."""
        log_probs = outputs["log_probs"]
        old_log_probs = given.get("old_log_probs", log_probs)
        return find_out(old_log_probs, log_probs, given["advantages"], LossConfig.from_actor(actor))

    return of_tokens


def _loss_mode(actor: Any, correction: Any) -> str:
    return actor.policy_loss.loss_mode if correction is None else policy_loss_mode(actor, correction)


def value_loss(critic: Any) -> LossFunction:
    """The clipped value loss of a `critic` section. Columns: `values`, `returns`."""

    def loss_fn(
        outputs: dict[str, torch.Tensor], given: dict[str, torch.Tensor], denominators: Denominators, found: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `LossFunction`."""
        loss, metrics = compute_value_loss(
            outputs["values"],
            given["returns"],
            given["values"],
            given["response_mask"],
            critic.cliprange_value,
            critic.loss_agg_mode,
            denominators,
        )
        return loss, {"vf_loss": loss.detach(), **metrics}

    return loss_fn
