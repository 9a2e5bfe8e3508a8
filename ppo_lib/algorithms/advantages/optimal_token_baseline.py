"""A baseline for every token, weighted by how much gradient its rollout has gathered."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ppo_lib.algorithms.advantages.discount import PolicyTokens, discounted_sum_to_go
from ppo_lib.algorithms.advantages.groups import Groups
from ppo_lib.algorithms.masked import check_same_shape
from ppo_lib.algorithms.row_blocks import to_float32


def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Any],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The reward still to come minus the baseline of least variance for that token position.

        R_t = r_t + R_{t+1},    w_t = 1 - 2 pi_t + sum_v pi_v^2,    W_t = w_1 + ... + w_t
        A_it = R_it - sum_{j in g} W_jt R_jt / sum_{j in g} W_jt

    (Greensmith, Bartlett, Baxter, JMLR 5, 2004, token by token). w_t is the squared gradient of the logits at a token
    of probability pi_t, so W_t is the gradient a rollout has gathered so far; the sums run over the siblings that have
    a policy token in column t. Behind the end of its last sibling a response has no baseline: there A = R.

    Args:
        token_level_rewards: (B, R) float32.
        response_mask: (B, R) bool, int or float.
        index: (B,) the uid of each row's prompt.
        old_log_probs: (B, R) float32, log pi of the sampled tokens.
        sum_pi_squared: (B, R) float32, the sum over the vocabulary of pi^2.
        rollout_is_weights: (B, R) float32; they enter w squared, as they do the variance of the gradient.

    Returns:
        Advantages and returns, both (B, R) float32. For the edges see `advantages`.
    """
    fields = (token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _by_groups(index, fields, closes_holes=False)


def compute_tir_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Any],
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`optimal_token_baseline` for responses with tool answers in them: position t is the t-th policy token.

    The answers of tools have different lengths, so that in one column siblings may be at quite different points of
    their work. With the answers left out, each is compared where it has said as much. Without tool answers the two
    estimators are the same.

    Args, returns and edges are those of `compute_optimal_token_baseline_advantage`.
    """
    fields = (token_level_rewards, response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    return _by_groups(index, fields, closes_holes=True)


def _by_groups(index: Iterable[Any], fields: tuple[Any, ...], closes_holes: bool) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, R), some groups at a time: what is summed over siblings is large and in float64."""
    rewards, mask, *_ = fields
    given = dict(zip(("token_level_rewards", "response_mask", "old_log_probs", "sum_pi_squared"), fields))
    check_same_shape(**given, **({} if fields[-1] is None else {"rollout_is_weights": fields[-1]}))
    advantages, returns = (torch.zeros(mask.shape, dtype=torch.float32, device=mask.device) for _ in range(2))
    for rows, groups in Groups.of(rewards, mask, index).blocks(2**16 // max(mask.shape[1], 1)):
        some: list[Any] = [None if x is None else x[rows] for x in fields]
        some_rewards, some_mask, *others = some
        tokens = PolicyTokens(some_mask.ne(0).double(), closes_holes)
        weights = tokens.pack(_energy(*others)).cumsum(dim=1)
        to_go = discounted_sum_to_go(tokens.pack(some_rewards), 1.0)
        there = tokens.pack(torch.ones_like(weights)).bool()
        advantages[rows] = to_float32(tokens.unpack(_minus_baseline(groups, to_go, weights, there)))
        returns[rows] = to_float32(tokens.unpack(to_go))
    return advantages, returns


def _energy(old_log_probs: Tensor, sum_pi_squared: Tensor, rollout_is_weights: Tensor | None) -> Tensor:
    """w (b, R) float64: the squared gradient of each token's logits."""
    energy = (1 - 2 * old_log_probs.double().exp() + sum_pi_squared.double()).clamp(min=0)
    return energy if rollout_is_weights is None else energy * rollout_is_weights.double().square()


def _minus_baseline(groups: Groups, returns: Tensor, weights: Tensor, there: Tensor) -> Tensor:
    """Returns minus their weighted mean over the siblings that are `there`, all (B, R) in float64; 0 where it is not.

    Where all weights are 0 (the policy had no choice up to here) every sibling weighs the same.
    """
    together = groups.sum(there.double())
    total = groups.sum(torch.where(there, weights, 0))
    weights = torch.where(there, torch.where(total > 0, weights, 1), 0)
    baseline = groups.sum(weights * returns) / groups.sum(weights).clamp(min=torch.finfo(torch.float64).tiny)
    advantages = returns - torch.where(together > 1, baseline, 0)
    differ = groups.tell_apart(groups.centred(groups.scores))
    return torch.where(differ[:, None] & there, advantages, 0)
