"""The clipped objective of PPO, with asymmetric clip and dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.policy_losses.tokens import Tokens


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
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: clip_ratio_low, clip_ratio_high, clip_ratio_c and the denominators of the mini-batch.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, and the shares of tokens that were clipped (`pg_clipfrac`, `pg_clipfrac_lower`) and the mean of
        old_log_prob - log_prob (`ppo_kl`); all are contributions to the mini-batch.
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    lowest, highest = config.clip_bounds
    advantages, ratio = tokens.advantages, tokens.log_r.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(lowest, highest)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -advantages * config.clip_ratio_c
    losses = torch.where(advantages < 0, torch.minimum(pessimistic, bound), pessimistic)
    bounded = (pessimistic > bound) & (advantages < 0)
    return tokens.loss(losses), tokens.metrics(clipped > unclipped, bounded)


def compute_policy_loss_ppo_clip(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped objective against the policy that sampled: `vanilla` in bypass mode.

    There `old_log_prob` holds the log-probs of the rollout, so that the ratio already is the whole importance weight:
    weights of rollout correction are left out, which would count it twice. What correction rejects is in the mask.

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: clip_ratio_low, clip_ratio_high, clip_ratio_c and the denominators of the mini-batch.
        rollout_is_weights: (b, R) float32, not used.

    Returns:
        Loss and metrics as those of `compute_policy_loss_vanilla`.
    """
    return compute_policy_loss_vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config)
