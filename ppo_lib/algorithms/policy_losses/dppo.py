"""Trust regions by divergence in place of the ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.policy_losses.tokens import Tokens


def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Drop the gradient of tokens whose probability has moved further than it may, in the direction they push.

        D_t = |pi_t - pi_old_t|
        L = -A sg(min(r, c)) log pi,    and 0 where D > high, A > 0, r > 1, or D > low, A < 0, r < 1

    D is the total variation over {the token, all others} (arXiv:2602.04879). A ratio says little about how far a policy
    went: an unlikely token doubles its probability at once, a likely one cannot, though that moves far more mass.

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: clip_ratio_low, clip_ratio_high (bounds of D), clip_ratio_c and the denominators of the mini-batch.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, the shares of tokens that were dropped (`pg_clipfrac`) and whose ratio was cut at c
        (`pg_clipfrac_lower`), and `ppo_kl`.
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    prob, old_prob = _probabilities(old_log_prob, tokens)
    return _within(tokens, (prob - old_prob).abs(), config)


def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`dppo_tv` with the KL divergence over {the token, all others} as the distance.

        D_t = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))

    (arXiv:2602.04879).

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: clip_ratio_low, clip_ratio_high (bounds of D), clip_ratio_c and the denominators of the mini-batch.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        Loss and metrics as those of `compute_policy_loss_dppo_tv`.
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    prob, old_prob = _probabilities(old_log_prob, tokens)
    rest, old_rest = (1 - prob).clamp(min=1e-7), (1 - old_prob).clamp(min=1e-7)
    return _within(tokens, -old_prob * tokens.log_r + old_rest * (old_rest / rest).log(), config)


def _probabilities(old_log_prob: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    return tokens.log_prob.detach().exp().clamp(max=1), old_log_prob.detach().exp().clamp(max=1)


def _within(tokens: Tokens, distance: Tensor, config: LossConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The truncated policy gradient of the tokens that may still go where their advantage pushes them."""
    low, high = 1 - config.clip_bounds[0], config.clip_bounds[1] - 1
    log_r, advantages = tokens.log_r.detach(), tokens.advantages
    too_far = ((advantages > 0) & (log_r > 0) & (distance > high)) | ((advantages < 0) & (log_r < 0) & (distance > low))
    ratio = log_r.exp()
    losses = -advantages * ratio.clamp(max=config.clip_ratio_c) * tokens.log_prob
    return tokens.loss(torch.where(too_far, 0, losses)), tokens.metrics(too_far, ratio > config.clip_ratio_c)
