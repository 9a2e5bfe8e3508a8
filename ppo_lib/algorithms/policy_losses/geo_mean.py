"""The geometric mean of the ratios of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.masked import masked_mean
from ppo_lib.algorithms.policy_losses.tokens import Tokens


def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Maximise the geometric mean of a sequence's ratios, each clipped where it would gain by going on.

        d_it = log_r_it clipped to at most high where A > 0, to at least -low where A < 0
        L_i = -A_i exp(mean_t d_it)

    (GMPO, arXiv:2507.20673). An arithmetic mean follows its largest ratios; this one does not. Here low and high bound
    the log ratio. A_i is the mean advantage of the sequence, and its importance weight the geometric mean of its
    tokens' weights. Published with `seq-mean-token-mean`.

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: clip_ratio_low, clip_ratio_high and the denominators of the mini-batch.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, the shares of tokens with a ratio outside the range at a positive advantage (`pg_clipfrac`) and at a
        negative one (`pg_clipfrac_lower`), and `ppo_kl`.
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    lowest, highest = (bound - 1 for bound in config.clip_bounds)
    within = tokens.log_r.clamp(lowest, highest)
    good, bad = tokens.advantages > 0, tokens.advantages < 0
    log_r = torch.where(good, torch.minimum(tokens.log_r, within), torch.maximum(tokens.log_r, within))
    log_r = torch.where(good | bad, log_r, 0)
    if tokens.weights is not None:
        log_r = log_r + torch.where(tokens.kept, tokens.weights, 1).clamp(min=torch.finfo(torch.float32).tiny).log()
    ratio, advantage = (masked_mean(x, tokens.kept, dim=1)[:, None] for x in (log_r, tokens.advantages))
    losses = (-advantage * ratio.exp()).expand_as(tokens.kept)
    outside = tokens.log_r != within
    return tokens.loss(losses, weighted=False), tokens.metrics(outside & good, outside & bad)
