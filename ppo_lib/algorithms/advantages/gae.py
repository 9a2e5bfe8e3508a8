"""Generalised advantage estimation, with a critic."""

from __future__ import annotations

from torch import Tensor

from ppo_lib.algorithms.advantages.discount import DiscountedSum, PolicyTokens, scan_rows
from ppo_lib.algorithms.masked import check_same_shape
from ppo_lib.algorithms.row_blocks import to_float32, whiten


def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """How much better things went from each token on than the critic expected, looking ahead less and less.

        delta_t = r_t + gamma V_{t+1} - V_t
        A_t     = delta_t + gamma lam A_{t+1}
        return_t = A_t + V_t

    (arXiv:1506.02438), and then the advantages are whitened over the batch. t counts policy tokens only: over tokens
    with mask 0 inside a response (what a tool answered) V and A are carried unchanged, so a reward after a tool call
    reaches the tokens before it, undiscounted by the length of the answer. After the last policy token V = A = 0.
    lam = 1 gives the return minus the value, lam = 0 the one-step difference.

    Args:
        token_level_rewards: (B, R) float32.
        response_mask: (B, R) bool, int or float.
        values: (B, R) float32.
        gamma: the discount per policy token.
        lam: how far to trust rewards over values.

    Returns:
        Advantages, whitened, and returns, both (B, R) float32. For rows without a policy token see `advantages`.
    """
    check_same_shape(token_level_rewards=token_level_rewards, response_mask=response_mask, values=values)

    def block(tokens: PolicyTokens, rows: slice, scan: DiscountedSum) -> tuple[Tensor, Tensor]:
        packed_values, deltas = tokens.pack(values[rows]), tokens.pack(token_level_rewards[rows])
        deltas[:, :-1].add_(packed_values[:, 1:], alpha=gamma)
        advantages = scan(deltas.sub_(packed_values))
        return advantages, advantages + packed_values

    advantages, returns = scan_rows(response_mask, gamma * lam, block)
    return to_float32(whiten(advantages, response_mask, out=advantages)), to_float32(returns)
