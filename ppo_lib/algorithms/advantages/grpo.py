"""Group-relative advantages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ppo_lib.algorithms.advantages.groups import Groups
from ppo_lib.algorithms.masked import check_same_shape


def compute_grpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Any],
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """How much better a response is than its siblings, the same for all of its tokens.

        A_it = (s_i - mean_g s) / (std_g s + epsilon),    s_i = sum_t r_it,    g the rollouts of i's prompt

    with the unbiased standard deviation (arXiv:2402.03300). Without the division it is Dr. GRPO (arXiv:2503.20783):
    dividing weighs prompts up on which nearly all rollouts agree.

    Args:
        token_level_rewards: (B, R) float32.
        response_mask: (B, R) bool, int or float.
        index: (B,) the uid of each row's prompt.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation.
        epsilon: added to it.

    Returns:
        The advantages (B, R) float32, twice: an outcome has no other return. For a group of one, equal scores and rows
        without a policy token see `advantages`.
    """
    check_same_shape(token_level_rewards=token_level_rewards, response_mask=response_mask)
    groups = Groups.of(token_level_rewards, response_mask, index)
    advantage = groups.scores - groups.sum(groups.scores) / groups.size.clamp(min=1)
    if norm_adv_by_std_in_grpo:
        variance = groups.sum(advantage.square()) / (groups.size - 1).clamp(min=1)
        advantage = advantage / (variance.sqrt() + epsilon)
    advantages = groups.to_tokens(advantage, response_mask)
    return advantages, advantages
