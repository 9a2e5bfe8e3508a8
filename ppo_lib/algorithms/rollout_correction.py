"""Rollouts come from an engine whose log-probs are not quite the trainer's: weigh them, and leave out what is too far.

With r = exp(log_prob - rollout_log_prob) the importance ratio of a token, clamped like every log ratio, the divergence
KL(rollout || policy) of the tokens that were sampled has the estimators k1 = -log r, k2 = (log r)^2 / 2 and
k3 = r - 1 - log r. arXiv:2510.18855 (two-sided), https://fengyao.notion.site/off-policy-rl (truncated).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ppo_lib.algorithms.correction_names import Bounds, Rejection, importance_bounds, rejections
from ppo_lib.algorithms.masked import LOG_RATIO_CLAMP, check_same_shape, log_ratio, masked_mean, masked_sum


@dataclass(frozen=True)
class Correction:
    """What a batch is corrected by."""

    weights: Tensor | None
    """(B, R) float32, 0 where `response_mask` is 0; None where `rollout_is` is null."""
    response_mask: Tensor
    """(B, R), of the type that was given: what is left after rejection."""
    metrics: dict[str, float]
    """`rollout_corr/...`, over the policy tokens before rejection."""


def correct_rollouts(
    old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, config: Any
) -> Correction:
    """Weights, rejection and metrics of a batch, as section `algorithm.rollout_correction` says.

    Args:
        old_log_probs: (B, R) float32, the policy's.
        rollout_log_probs: (B, R) float32, the engine's.
        response_mask: (B, R) bool, int or float.
        config: `rollout_is`, `rollout_is_threshold`, `rollout_is_batch_normalize`, `rollout_rs`,
            `rollout_rs_threshold`.
    """
    kept = response_mask.bool()
    metrics = mismatch_metrics(old_log_probs, rollout_log_probs, kept)
    log_r = log_ratio(old_log_probs, rollout_log_probs, kept)
    weights = None
    if config.rollout_is is not None:
        raw = importance_ratios(log_r, kept, config.rollout_is)
        bounds = importance_bounds(config.rollout_is_threshold)
        weights = bounded(raw, bounds)
        metrics |= _weight_metrics(raw, weights, kept, config.rollout_is)
        if config.rollout_is_batch_normalize:
            weights = weights / batch_mean(weights, kept, config.rollout_is)
    left = left_by_rejection(log_r, kept, config)
    if config.rollout_rs is not None:
        metrics |= _rejection_metrics(kept, left)
    return Correction(weights, torch.where(left, response_mask, torch.zeros_like(response_mask)), metrics)


def left_by_rejection(log_r: Tensor, kept: Tensor, config: Any) -> Tensor:
    """(B, R) bool: the policy tokens that `rollout_rs` and `rollout_rs_threshold` leave, all of them where it is null.

    Args:
        log_r: (B, R) float32, clamped log ratios, 0 off the mask.
        kept: (B, R) bool, the mask.
        config: section `algorithm.rollout_correction`.
    """
    left = kept
    for rule in rejections(config.rollout_rs, config.rollout_rs_threshold):
        left = left & accepted(log_r, kept, rule)
    return left


def importance_weights(log_r: Tensor, kept: Tensor, config: Any) -> Tensor:
    """(B, R) float32 bounded ratios as `rollout_is` and `rollout_is_threshold` say, not normalised; 0 off the mask."""
    return bounded(importance_ratios(log_r, kept, config.rollout_is), importance_bounds(config.rollout_is_threshold))


def importance_ratios(log_r: Tensor, kept: Tensor, level: str) -> Tensor:
    """(B, R) ratios: each token's own (`token`), or the product over its response (`sequence`); 0 off the mask."""
    if level == "sequence":
        log_r = masked_sum(log_r, kept, dim=1)[:, None].expand_as(log_r)
    ratios = log_r.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP).exp()
    return torch.where(kept, ratios, 0)


def bounded(ratios: Tensor, bounds: Bounds) -> Tensor:
    """Truncated from above or, with two bounds, 0 outside of them.

    A ratio that far off says that the token is not to be trusted, no longer how much it counts.
    """
    if bounds.low is None:
        return ratios.clamp(max=bounds.high)
    return torch.where((ratios >= bounds.low) & (ratios <= bounds.high), ratios, 0)


def batch_mean(weights: Tensor, kept: Tensor, level: str) -> float:
    """What `rollout_is_batch_normalize` divides weights by: their mean over tokens or (`sequence`) responses.

    1 where all of them are 0.
    """
    return masked_mean(*_one_each(weights, kept, level)).item() or 1.0


def accepted(log_r: Tensor, kept: Tensor, rule: Rejection) -> Tensor:
    """(B, R) bool: the policy tokens that `rule` leaves."""
    per_token = {"k1": log_r, "k2": 0.5 * log_r.square(), "k3": log_r.exp() - 1 - log_r}[rule.form]
    if rule.level == "token":
        return kept & _within(per_token, rule)
    if rule.level == "seq_max":  # the farthest token decides
        return kept & (_within(per_token, rule) | ~kept).all(dim=1, keepdim=True)
    reduce = masked_sum if rule.level == "seq_sum" else masked_mean
    return kept & _within(reduce(per_token, kept, dim=1)[:, None], rule)


def _within(values: Tensor, rule: Rejection) -> Tensor:
    low, high = rule.bounds.low, rule.bounds.high
    if rule.form == "k1":  # values are log ratios, bounds are ratios
        assert low is not None
        return (values >= math.log(low)) & (values <= math.log(high))
    return values <= high


def _one_each(values: Tensor, kept: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """Values and mask with one entry for each thing that has a weight: a token, or a response."""
    if level == "token":
        return values, kept
    return torch.where(kept, values, 0).amax(dim=1), kept.any(dim=1)  # a response's tokens share its weight


def _weight_metrics(raw: Tensor, used: Tensor, kept: Tensor, level: str) -> dict[str, float]:
    """`rollout_is_*` of what has a weight: a token, or a response.

    Mean, max, min and deviation of the ratios as they are, the share of them that the bounds changed, and the effective
    sample size, (mean w)^2 / mean w^2, of the weights as they are used.
    """
    ratios, mask = _one_each(raw, kept, level)
    weights, _ = _one_each(used, kept, level)
    ratios, weights = ratios[mask].double(), weights[mask].double()
    if not len(ratios):
        return {}
    square = weights.square().mean()
    return {
        "rollout_corr/rollout_is_mean": ratios.mean().item(),
        "rollout_corr/rollout_is_max": ratios.max().item(),
        "rollout_corr/rollout_is_min": ratios.min().item(),
        "rollout_corr/rollout_is_std": ratios.std(correction=0).item(),
        "rollout_corr/rollout_is_bounded_fraction": (ratios != weights).double().mean().item(),
        "rollout_corr/rollout_is_eff_sample_size": (weights.mean().square() / square).item() if square > 0 else 0.0,
    }


def _rejection_metrics(kept: Tensor, left: Tensor) -> dict[str, float]:
    """The shares of policy tokens, and of responses as a whole, that were rejected."""
    tokens, rows = int(kept.sum()), int(kept.any(dim=1).sum())
    if not tokens:
        return {}
    return {
        "rollout_corr/rollout_rs_masked_fraction": 1 - int(left.sum()) / tokens,
        "rollout_corr/rollout_rs_seq_masked_fraction": 1 - int(left.any(dim=1).sum()) / rows,
    }


def mismatch_metrics(old_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """How far engine and policy are apart on the policy tokens, all (B, R); nothing where there are none.

    Means over tokens: `kl` (k1), `k3_kl`, `chi2_token` = mean r^2 - 1. Means over responses, with p and q the mean
    log-probs of a response: `training_ppl` = exp(-p), `rollout_ppl` = exp(-q), `log_ppl_diff` = q - p, and
    `chi2_seq` = mean (prod r)^2 - 1.
    """
    check_same_shape(old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs, response_mask=response_mask)
    kept = response_mask.bool()
    alive = kept.any(dim=1)
    if not alive.any():
        return {}
    log_r = log_ratio(old_log_probs, rollout_log_probs, kept).double()
    ours, theirs = (masked_mean(x.double(), kept, dim=1)[alive] for x in (old_log_probs, rollout_log_probs))
    of_tokens = log_r[kept]
    of_rows = log_r.sum(dim=1)[alive].clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    metrics = {
        "kl": -of_tokens.mean(),
        "k3_kl": (of_tokens.exp() - 1 - of_tokens).mean(),
        "training_ppl": (-ours).exp().mean(),
        "rollout_ppl": (-theirs).exp().mean(),
        "log_ppl_diff": (theirs - ours).mean(),
        "chi2_token": (2 * of_tokens).exp().mean() - 1,
        "chi2_seq": (2 * of_rows).exp().mean() - 1,
    }
    return {f"rollout_corr/{name}": value.item() for name, value in metrics.items()}
