"""A soft gate in place of the clip."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.policy_losses.tokens import Tokens


def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Let the gradient of a token fade, and never stop, as its ratio leaves 1.

        L = -A 4 / tau sigmoid(tau (r - 1)),    tau = tau_pos where A > 0, tau_neg elsewhere

    (arXiv:2511.20347). At r = 1 the slope is that of the ratio itself; a larger tau_neg makes bad tokens fade sooner:
    their gradient spreads over the whole vocabulary. Published with `seq-mean-token-mean`.

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: tau_pos, tau_neg and the denominators of the mini-batch.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, and `ppo_kl`; the clip fractions are 0.
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    tau = torch.where(tokens.advantages > 0, config.tau_pos, config.tau_neg)
    gate = torch.sigmoid(tau * (tokens.log_r.exp() - 1)) * 4 / tau
    return tokens.loss(-tokens.advantages * gate), tokens.metrics()
