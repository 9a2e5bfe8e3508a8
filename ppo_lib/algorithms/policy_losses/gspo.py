"""Clipping by sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.masked import masked_mean
from ppo_lib.algorithms.policy_losses.tokens import Tokens


def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped objective with one ratio a sequence, the geometric mean of its tokens' ratios.

        s_i = exp(mean_t log_r_it),    s_it = sg(s_i) pi_t / sg(pi_t)
        L_it = max(-A s_it, -A clip(s_it, 1 - low, 1 + high))

    (arXiv:2507.18071; sg stops the gradient, so that tokens may have advantages of their own). The rewards of a
    sequence are rewards of all of it, and so is its importance weight; single tokens' ratios are noise. Published with
    `seq-mean-token-mean` and clips near 3e-4.

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: clip_ratio_low, clip_ratio_high and the denominators of the mini-batch.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, the share of tokens in clipped sequences (`pg_clipfrac`), and `ppo_kl`.
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    lowest, highest = config.clip_bounds
    mean_log_r = masked_mean(tokens.log_r, tokens.kept, dim=1)[:, None].detach()
    ratio = (mean_log_r + tokens.log_r - tokens.log_r.detach()).exp()
    unclipped = -tokens.advantages * ratio
    clipped = -tokens.advantages * ratio.clamp(lowest, highest)
    return tokens.loss(torch.maximum(unclipped, clipped)), tokens.metrics(clipped > unclipped)
