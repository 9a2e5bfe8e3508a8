"""Outcome minus a baseline taken from the siblings of a response, or from its prompt's greedy response."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ppo_lib.algorithms.advantages.discount import DiscountedSum, PolicyTokens, scan_rows
from ppo_lib.algorithms.advantages.groups import Groups
from ppo_lib.algorithms.masked import check_same_shape
from ppo_lib.algorithms.row_blocks import to_float32, to_tokens
from ppo_lib.errors import BatchMismatchError


def compute_rloo_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Any]
) -> tuple[Tensor, Tensor]:
    """The outcome minus the mean outcome of the other responses to the prompt (REINFORCE leave-one-out).

        A_it = s_i - mean_{j in g, j != i} s_j = (s_i - mean_g s) n / (n - 1)

    An unbiased baseline, since it does not know the response it is compared with (arXiv:2402.14740).

    Args:
        token_level_rewards: (B, R) float32.
        response_mask: (B, R) bool, int or float.
        index: (B,) the uid of each row's prompt.

    Returns:
        The advantages (B, R) float32, twice. For the edges see `advantages`.
    """
    groups = Groups.of(token_level_rewards, response_mask, index)
    centred = groups.centred(groups.scores)
    advantage = centred * groups.size / (groups.size - 1).clamp(min=1)
    advantages = to_tokens(torch.where(groups.tell_apart(centred), advantage, 0), response_mask)
    return advantages, advantages


def compute_opo_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Any]
) -> tuple[Tensor, Tensor]:
    """The outcome minus the mean outcome of the group weighted by length, the baseline of least variance.

        A_it = s_i - sum_{j in g} l_j s_j / sum_{j in g} l_j,    l_j the policy tokens of j

    where the squared gradient of a response grows like its length (arXiv:2505.23585).

    Args:
        token_level_rewards: (B, R) float32.
        response_mask: (B, R) bool, int or float.
        index: (B,) the uid of each row's prompt.

    Returns:
        The advantages (B, R) float32, twice. For the edges see `advantages`.
    """
    groups = Groups.of(token_level_rewards, response_mask, index)
    lengths, centred = groups.lengths, groups.centred(groups.scores)
    advantage = centred - groups.sum(lengths * centred) / groups.sum(lengths).clamp(min=1)
    advantages = to_tokens(torch.where(groups.tell_apart(centred), advantage, 0), response_mask)
    return advantages, advantages


def compute_gpg_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Any]
) -> tuple[Tensor, Tensor]:
    """The outcome minus the mean of its group, scaled up by how few outcomes of the batch are not 0.

        A_it = alpha (s_i - mean_g s),    alpha = B / #{j: s_j != 0}

    so that a batch in which few responses earn anything still makes a full step (arXiv:2504.02546). B counts rows with
    a policy token.

    Args:
        token_level_rewards: (B, R) float32.
        response_mask: (B, R) bool, int or float.
        index: (B,) the uid of each row's prompt.

    Returns:
        The advantages (B, R) float32, twice. For the edges see `advantages`.
    """
    groups = Groups.of(token_level_rewards, response_mask, index)
    centred = groups.centred(groups.scores)
    earning = (groups.counted & (groups.scores != 0)).count_nonzero()
    alpha = groups.counted.count_nonzero() / earning.clamp(min=1)
    advantages = to_tokens(torch.where(groups.tell_apart(centred), alpha * centred, 0), response_mask)
    return advantages, advantages


def compute_remax_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, reward_baselines: Tensor
) -> tuple[Tensor, Tensor]:
    """The reward still to come minus the outcome of the prompt's greedy response.

        R_t = r_t + R_{t+1},    A_t = R_t - b

    (arXiv:2310.10505). The greedy response is generated and scored beside the sampled ones.

    Args:
        token_level_rewards: (B, R) float32.
        response_mask: (B, R) bool, int or float.
        reward_baselines: (B,) float32, the outcome of the greedy response to each row's prompt.

    Returns:
        Advantages and returns, both (B, R) float32. For the edges see `advantages`.
    """
    check_same_shape(token_level_rewards=token_level_rewards, response_mask=response_mask)
    if reward_baselines.shape != response_mask.shape[:1]:
        raise BatchMismatchError(
            f"reward_baselines must have one entry for each of {len(response_mask)} rows, "
            f"got {tuple(reward_baselines.shape)}"
        )

    def block(tokens: PolicyTokens, rows: slice, scan: DiscountedSum) -> tuple[Tensor, Tensor]:
        returns = scan(tokens.pack(token_level_rewards[rows]))
        baselines = torch.where(tokens.kept.any(dim=1), reward_baselines[rows].to(returns.dtype), 0)
        return returns - baselines[:, None], returns

    advantages, returns = scan_rows(response_mask, 1.0, block)
    return to_float32(advantages), to_float32(returns)
