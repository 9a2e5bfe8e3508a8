"""The plain policy gradient: no ratio, nothing clipped."""

from __future__ import annotations

from torch import Tensor

from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.policy_losses.tokens import Tokens


def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Weigh the log-probability of each token by its advantage.

        L = -A log pi

    (group policy gradient, arXiv:2504.02546), with the `gpg` estimator's scaling of the advantage.

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: the denominators of the mini-batch.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, and `ppo_kl`; the clip fractions are 0.
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    return tokens.loss(-tokens.advantages * tokens.log_prob), tokens.metrics()


def compute_policy_loss_reinforce(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: LossConfig,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE on the policy that sampled, with importance weights where rollout correction gives them: bypass mode.

        L = -w A log pi

    `old_log_prob` holds the log-probs of the rollout; it only enters `ppo_kl`, now the distance to the rollout. The
    weights w are constants: unlike a clipped ratio they keep the gradient of every token.

    Args:
        old_log_prob: (b, R) float32, where the ratio is 1; no gradient goes through it.
        log_prob: (b, R) float32, now.
        advantages: (b, R) float32.
        response_mask: (b, R) bool, int or float.
        loss_agg_mode: how tokens are weighed, see `agg_loss`.
        config: the denominators of the mini-batch.
        rollout_is_weights: (b, R) float32, the weights of rollout correction.

    Returns:
        The loss, and `ppo_kl`; the clip fractions are 0.
    """
    tokens = Tokens.of(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights)
    return tokens.loss(-tokens.advantages * tokens.log_prob), tokens.metrics()
