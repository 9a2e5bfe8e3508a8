"""The clipped objective of PPO, with asymmetric clip and dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_lib.algorithms.aggregate import agg_loss
from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.masked import check_same_shape, log_ratio


def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Raise the probability of good tokens and lower that of bad ones, but not far from the policy that sampled them.

    With r = exp(log_prob - old_log_prob), A the advantage, and w the importance weight (1 without one), per token

        L = w max(-A r, -A clip(r, 1 - low, 1 + high))      and, where A < 0,  L = w min(that, -A c)

    Equal low and high are PPO (arXiv:1707.06347), a larger high is the clip-higher of DAPO (arXiv:2503.14476), and the
    bound c is dual clip (arXiv:1912.09729): without it a bad token that became likely has an unbounded loss.

    Args:
        old_log_prob: (b, R) float32, before the update; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: the clip settings and the mini-batch's denominators.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, and the shares of tokens that were clipped (`pg_clipfrac`, `pg_clipfrac_lower`) and the mean of
        old_log_prob - log_prob (`ppo_kl`); all are contributions to the mini-batch.
    """
    check_same_shape(old_log_prob=old_log_prob, log_prob=log_prob, advantages=advantages, response_mask=response_mask)
    kept = response_mask.bool()
    whole = config.denominators_for(kept)
    lowest, highest = config.clip_bounds

    log_r = log_ratio(log_prob, old_log_prob.detach(), kept)
    ratio = log_r.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(lowest, highest)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -advantages * config.clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights

    per_token = {
        "pg_clipfrac": (clipped > unclipped).float(),
        "pg_clipfrac_lower": ((pessimistic > bound) & (advantages < 0)).float(),
        "ppo_kl": -log_r.detach(),
    }
    metrics = {name: agg_loss(values, kept, "token-mean", whole) for name, values in per_token.items()}
    return agg_loss(losses, kept, loss_agg_mode, whole), metrics
