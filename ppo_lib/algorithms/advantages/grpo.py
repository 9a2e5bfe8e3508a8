"""Group-relative advantages: each response against its siblings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ppo_lib.algorithms.advantages.groups import Groups
from ppo_lib.algorithms.row_blocks import to_tokens


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
        The advantages (B, R) float32, twice: an outcome has no other return. For a group of one, equal outcomes and
        rows without a policy token see `advantages`.
    """
    groups = Groups.of(token_level_rewards, response_mask, index)
    advantage = groups.centred(groups.scores)
    differ = groups.tell_apart(advantage)
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (groups.std(advantage) + epsilon)
    advantages = to_tokens(torch.where(differ, advantage, 0), response_mask)
    return advantages, advantages


def compute_grpo_passk_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Any],
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """What the best response adds to its group: only the winner is rewarded, by its lead over the runner-up.

        A_it = (s_i - max_{j != i} s_j) / (std_g s + epsilon)  for the best response i of a group,  0 for the others

    the gradient of the expected maximum of a group (arXiv:2503.19595). Two equal winners lead by 0.

    Args:
        token_level_rewards: (B, R) float32.
        response_mask: (B, R) bool, int or float.
        index: (B,) the uid of each row's prompt.
        norm_adv_by_std_in_grpo: whether to divide by the standard deviation.
        epsilon: added to it.

    Returns:
        The advantages (B, R) float32, twice. For the edges see `advantages`.
    """
    groups = Groups.of(token_level_rewards, response_mask, index)
    centred = groups.centred(groups.scores)
    best = groups.counted & (groups.scores == groups.max(groups.scores))
    runner_up = groups.max(torch.where(best, -torch.inf, groups.scores))
    alone = best & (groups.sum(best.double()) == 1) & groups.tell_apart(centred)
    advantage = torch.where(alone, groups.scores - runner_up, 0)
    if norm_adv_by_std_in_grpo:
        advantage = advantage / (groups.std(centred) + epsilon)
    advantages = to_tokens(advantage, response_mask)
    return advantages, advantages
