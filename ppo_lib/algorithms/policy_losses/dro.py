"""A quadratic pull towards the policy that sampled."""

from __future__ import annotations

from torch import Tensor

from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.policy_losses.tokens import Tokens

DRO_BETA = 0.05
"""The weight of the penalty where none is set."""


def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient with a quadratic penalty on the log ratio in place of a clip.

        L = -(A log pi - beta / 2 log_r^2)

    (direct reward optimisation, arXiv:2405.19107). Its optimum has log_r = A / beta, also on responses that another
    policy sampled.

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: policy_loss.dro_beta (None: `DRO_BETA`) and the denominators of the mini-batch.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, and `ppo_kl`; the clip fractions are 0.
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    beta = DRO_BETA if config.policy_loss.dro_beta is None else config.policy_loss.dro_beta
    losses = -(tokens.advantages * tokens.log_prob - 0.5 * beta * tokens.log_r.square())
    return tokens.loss(losses), tokens.metrics()
