"""The losses of actor and critic as functions of (b, r) matrices, closed over their configuration."""

from __future__ import annotations

from dataclasses import dataclass
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
from ppo_lib.algorithms.names import find_policy_loss
from ppo_lib.config import policy_loss_mode
from ppo_lib.workers.metrics import StepMetrics
from ppo_lib.workers.training_worker import LossFunction, Observe, OfMiniBatch, Tokens
from ppo_lib.workers.update_correction import UpdateCorrection

__all__ = ["draws_tokens", "observe_correction", "of_mini_batch", "policy_loss", "value_loss"]


@dataclass(frozen=True)
class Found:
    """What a policy loss has to know of its whole mini-batch."""

    mean_weight: float = 1.0
    """What the importance weights of bypass mode are divided by."""
    of_loss: Any = None
    """What the loss's own `of_mini_batch` function found."""


def policy_loss(actor: Any, correction: Any = None) -> LossFunction:
    """Policy loss - entropy_coeff * entropy + kl_loss_coef * KL to the reference, as an `actor` section says.

    `correction` is section `algorithm.rollout_correction`: in bypass mode it chooses the policy loss, and rejects and
    weighs here, by the policy now over the rollout, whose log-probs the old ones are.

    Columns: `advantages`, and where present `old_log_probs` (absent: the log-probabilities now, which is what they are
    when one step follows a rollout), `ref_log_prob` (needed with `use_kl_loss`), `rollout_is_weights`, `draws`.
    """
    policy_loss_fn = get_policy_loss_fn(_loss_mode(actor, correction))
    in_update = _in_update(actor, correction)
    mode = actor.loss_agg_mode

    def loss_fn(
        outputs: dict[str, torch.Tensor], given: dict[str, torch.Tensor], denominators: Denominators, found: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See `LossFunction`."""
        log_probs, mask, found = outputs["log_probs"], given["response_mask"], found or Found()
        old_log_probs = given.get("old_log_probs", log_probs.detach())
        weights = given.get("rollout_is_weights")
        if in_update is not None:
            mask, weights = in_update.correct(log_probs.detach(), old_log_probs, mask, found.mean_weight)
        loss, metrics = policy_loss_fn(
            old_log_probs,
            log_probs,
            given["advantages"],
            mask,
            mode,
            LossConfig.from_actor(actor, denominators, found.of_loss, given.get("draws")),
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
    """What the policy loss of an `actor` section has to find out from a whole mini-batch; None if nothing.

    Where bypass mode rejects, the denominators are counted anew here.
    """
    find_out = get_of_mini_batch_fn(_loss_mode(actor, correction))
    in_update = _in_update(actor, correction)
    if find_out is None and (in_update is None or not in_update.looks_ahead):
        return None

    def of_tokens(tokens: Tokens, denominators: Denominators) -> tuple[Found, Denominators]:
        """See `OfMiniBatch`."""
        log_probs, advantages = tokens.outputs["log_probs"], tokens.columns["advantages"]
        old_log_probs, draws = tokens.columns.get("old_log_probs", log_probs), tokens.columns.get("draws")
        mean_weight = 1.0
        if in_update is not None and in_update.looks_ahead:
            ahead = in_update.look_ahead(log_probs, old_log_probs, tokens.lengths, denominators)
            denominators, mean_weight = ahead.denominators, ahead.mean_weight
            old_log_probs, log_probs, advantages = (x[ahead.left] for x in (old_log_probs, log_probs, advantages))
            draws = draws if draws is None else draws[ahead.left]
        if find_out is None:
            return Found(mean_weight), denominators
        of_loss = find_out(old_log_probs, log_probs, advantages, LossConfig.from_actor(actor, draws=draws))
        return Found(mean_weight, of_loss), denominators

    return of_tokens


def draws_tokens(actor: Any, correction: Any = None) -> bool:
    """Whether the policy loss of an `actor` section takes the column `draws`."""
    return find_policy_loss(_loss_mode(actor, correction)).draws


def observe_correction(actor: Any, correction: Any, metrics: StepMetrics) -> Observe | None:
    """What measures the rollout correction of bypass mode, adding `rollout_corr/...` to `metrics`; else None."""
    in_update = _in_update(actor, correction)
    if in_update is None:
        return None

    def observe(tokens: Tokens) -> None:
        """See `Observe`."""
        log_probs, rollout_log_probs = tokens.outputs["log_probs"], tokens.columns["old_log_probs"]
        in_update.measure(log_probs, rollout_log_probs, tokens.lengths, metrics)

    return observe


def _loss_mode(actor: Any, correction: Any) -> str:
    return actor.policy_loss.loss_mode if correction is None else policy_loss_mode(actor, correction)


def _in_update(actor: Any, correction: Any) -> UpdateCorrection | None:
    if correction is None or not correction.bypass_mode:
        return None
    return UpdateCorrection(correction, _loss_mode(actor, correction))


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
