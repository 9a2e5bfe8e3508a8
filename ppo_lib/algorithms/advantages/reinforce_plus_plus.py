"""REINFORCE++: advantages on one scale for the whole batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ppo_lib.algorithms.advantages.discount import DiscountedSum, PolicyTokens, scan_rows
from ppo_lib.algorithms.advantages.groups import Groups
from ppo_lib.algorithms.masked import check_same_shape
from ppo_lib.algorithms.row_blocks import to_float32, to_tokens, whiten


def compute_reinforce_plus_plus_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The discounted reward still to come, whitened over all policy tokens of the batch.

        R_t = r_t + gamma R_{t+1},    A_t = (R_t - mean R) / std R

    (arXiv:2501.03262). No critic and no groups: one rollout a prompt is enough, and a KL in the reward counts token by
    token. t counts policy tokens only.

    Args:
        token_level_rewards: (B, R) float32.
        response_mask: (B, R) bool, int or float.
        gamma: the discount per policy token.

    Returns:
        Advantages, whitened, and returns, both (B, R) float32. For the edges see `advantages`.
    """
    check_same_shape(token_level_rewards=token_level_rewards, response_mask=response_mask)

    def block(tokens: PolicyTokens, rows: slice, scan: DiscountedSum) -> tuple[Tensor]:
        return (scan(tokens.pack(token_level_rewards[rows])),)

    (returns,) = scan_rows(response_mask, gamma, block)
    return to_float32(whiten(returns, response_mask)), to_float32(returns)


def compute_reinforce_plus_plus_baseline_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Any]
) -> tuple[Tensor, Tensor]:
    """The outcome minus the mean of its group, whitened over all policy tokens of the batch.

        A_it = (s_i - mean_g s - mu) / sigma,    mu and sigma over the tokens of the batch

    (arXiv:2501.03262). One scale for all prompts: unlike `grpo`, a prompt on which nearly all rollouts agree is not
    weighed up.

    Args:
        token_level_rewards: (B, R) float32.
        response_mask: (B, R) bool, int or float.
        index: (B,) the uid of each row's prompt.

    Returns:
        The advantages (B, R) float32, twice. For the edges see `advantages`.
    """
    groups = Groups.of(token_level_rewards, response_mask, index)
    centred = groups.centred(groups.scores)
    advantages = whiten_over_tokens(groups, centred, groups.tell_apart(centred), response_mask)
    return advantages, advantages


def whiten_over_tokens(groups: Groups, advantage: Tensor, differ: Tensor, response_mask: Tensor) -> Tensor:
    """Whiten advantages of rows (B,) over all policy tokens of the batch -> (B, R); 0 in rows that do not `differ`.

    The mean and deviation count the tokens of all rows, those of equal outcomes with their 0.
    """
    advantage = torch.where(groups.counted, advantage, 0)
    count = groups.lengths.sum().clamp(min=2)
    advantage = advantage - (groups.lengths * advantage).sum() / count
    variance = (groups.lengths * advantage.square()).sum() / (count - 1)
    return to_tokens(torch.where(differ, advantage * (variance + 1e-8).rsqrt(), 0), response_mask)
