"""Hold back the few tokens that use up most of the entropy."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.masked import distance, log_ratio
from ppo_lib.algorithms.policy_losses.tokens import Tokens


@dataclass(frozen=True)
class CovarianceRule:
    """Which tokens of a mini-batch are held back: the same for all of its micro-batches and ranks.

    The covariance of a token is (log_prob - mean_log_prob) (A - mean_advantage).
    """

    mean_log_prob: float
    mean_advantage: float
    threshold: float  # the smallest covariance that is held back; of clip_cov, the smallest draw

    def covariance(self, log_prob: Tensor, advantages: Tensor) -> Tensor:
        """Of each token; any shape."""
        return (log_prob.detach() - self.mean_log_prob) * (advantages - self.mean_advantage)


def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO without the tokens that would lower the entropy most: likely tokens with a good advantage.

        cov = (log pi - mean log pi) (A - mean A)
        L = max(-A r, -A clip(r, 1 - low, 1 + high)),    0 for the tokens held back

    (arXiv:2505.22617). Held back are, of the N tokens of the mini-batch, N clip_cov_ratio (at least one) drawn at
    random from those with clip_cov_lb < cov < clip_cov_ub that are not clipped anyway: those of the largest `draws`.

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: clip_ratio_low, clip_ratio_high, policy_loss.clip_cov_ratio, clip_cov_lb, clip_cov_ub, draws; of the
            mini-batch the denominators and, as `mini_batch`, its `clip_cov_rule`.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, the shares of tokens held back (`pg_clipfrac`) and clipped (`pg_clipfrac_lower`), and `ppo_kl`.
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    draws = torch.rand_like(tokens.advantages) if config.draws is None else config.draws
    flat_config = replace(config, draws=draws[tokens.kept])
    rule = config.mini_batch or clip_cov_rule(*_flat(old_log_prob, tokens), flat_config)
    covariance = rule.covariance(tokens.log_prob, tokens.advantages)
    unclipped, clipped = _clip(tokens.log_r, tokens.advantages, config)
    held = _in_range(covariance, config) & (draws >= rule.threshold) & (clipped <= unclipped)
    losses = torch.where(held, 0, torch.maximum(unclipped, clipped))
    return tokens.loss(losses), tokens.metrics(held, clipped > unclipped)


def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient, with a penalty on how far the tokens go that would lower the entropy most.

        cov = (log pi - mean log pi) (A - mean A)
        L = -A r,    and + ppo_kl_coef |log_r| for the N kl_cov_ratio tokens (at least one) of largest covariance

    of the N tokens of the mini-batch (arXiv:2505.22617). |log_r| has no gradient while it is a rounding error, see
    `masked.distance`.

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: policy_loss.kl_cov_ratio, ppo_kl_coef; of the mini-batch the denominators and, as `mini_batch`, its
            `kl_cov_rule`.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, and the mean of |log_r| (`ppo_kl`).
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    rule = config.mini_batch or kl_cov_rule(*_flat(old_log_prob, tokens), config)
    held = rule.covariance(tokens.log_prob, tokens.advantages) >= rule.threshold
    penalty = torch.where(held, config.policy_loss.ppo_kl_coef * distance(tokens.log_r), 0)
    losses = -tokens.advantages * tokens.log_r.exp() + penalty
    return tokens.loss(losses), {"ppo_kl": tokens.mean(tokens.log_r.abs())}


def clip_cov_rule(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: LossConfig) -> CovarianceRule:
    """The rule of `clip_cov` from all policy tokens (N,) of a mini-batch, `config.draws` too."""
    rule = _means(log_prob, advantages)
    covariance = rule.covariance(log_prob, advantages)
    draws = torch.rand_like(advantages) if config.draws is None else config.draws
    unclipped, clipped = _clip(log_ratio(log_prob, old_log_prob), advantages, config)
    candidates = draws[_in_range(covariance, config) & (clipped <= unclipped)]
    return replace(rule, threshold=_of_largest(candidates, config.policy_loss.clip_cov_ratio * len(log_prob)))


def kl_cov_rule(old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, config: LossConfig) -> CovarianceRule:
    """The rule of `kl_cov` from all policy tokens (N,) of a mini-batch.

    Where all covariances are equal, as they are without an advantage, none is the largest and no token is held back.
    """
    rule = _means(log_prob, advantages)
    covariance = rule.covariance(log_prob, advantages)
    if len(covariance) and bool(covariance.max() == covariance.min()):
        return rule
    return replace(rule, threshold=_of_largest(covariance, config.policy_loss.kl_cov_ratio * len(log_prob)))


def _flat(old_log_prob: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """The policy tokens (N,) of a micro-batch that is its whole mini-batch."""
    return old_log_prob[tokens.kept], tokens.log_prob[tokens.kept], tokens.advantages[tokens.kept]


def _means(log_prob: Tensor, advantages: Tensor) -> CovarianceRule:
    count = max(len(log_prob), 1)
    mean_log_prob, mean_advantage = (float(x.detach().double().sum()) / count for x in (log_prob, advantages))
    return CovarianceRule(mean_log_prob, mean_advantage, torch.inf)


def _of_largest(values: Tensor, count: float) -> float:
    """A threshold that `count` of `values` (n,), rounded down and at least one, are above; ties go together.

    It lies halfway to the next value, so that the rounding error of another forward pass moves none across.
    """
    count = max(int(count), 1)
    if len(values) <= count:
        return -torch.inf
    largest = values.topk(count + 1).values
    return float(largest[-2:].double().mean())


def _clip(log_r: Tensor, advantages: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    ratio = log_r.exp()
    return -advantages * ratio, -advantages * ratio.clamp(*config.clip_bounds)


def _in_range(covariance: Tensor, config: LossConfig) -> Tensor:
    return (covariance > config.policy_loss.clip_cov_lb) & (covariance < config.policy_loss.clip_cov_ub)
