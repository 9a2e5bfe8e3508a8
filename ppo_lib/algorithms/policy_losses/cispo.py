"""Clip the importance weight, not the update."""

from __future__ import annotations

from torch import Tensor

from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.policy_losses.tokens import Tokens


def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh the policy gradient of each token by its clipped ratio, held constant.

        L = -sg(clip(r, 1 - low, 1 + high)) A log pi

    (arXiv:2506.13585; sg stops the gradient). PPO drops the gradient of a clipped token; the rare tokens at which a
    thought turns move far in one step and are the first to be dropped. Here they keep it.

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: clip_ratio_low, clip_ratio_high and the denominators of the mini-batch.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, the share of tokens whose weight was clipped (`pg_clipfrac`), and `ppo_kl`.
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    ratio = tokens.log_r.exp().detach()
    weight = ratio.clamp(*config.clip_bounds)
    return tokens.loss(-weight * tokens.advantages * tokens.log_prob), tokens.metrics(weight != ratio)
