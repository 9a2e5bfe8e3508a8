"""Generalised advantage estimation, with a critic."""

from __future__ import annotations

from torch import Tensor

from ppo_lib.algorithms.advantages.discount import PolicyTokens, discounted_sum_to_go
from ppo_lib.algorithms.masked import check_same_shape, masked_whiten


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
    tokens = PolicyTokens(response_mask)
    deltas, values = tokens.pack(token_level_rewards.float()), tokens.pack(values.float())
    deltas[:, :-1] += gamma * values[:, 1:]
    deltas -= values
    advantages = discounted_sum_to_go(deltas, gamma * lam)
    returns = advantages + values
    return masked_whiten(tokens.unpack(advantages), tokens.kept), tokens.unpack(returns)
