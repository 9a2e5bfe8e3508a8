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
    kept = response_mask.bool()
    groups = Groups.of(token_level_rewards, response_mask, index)
    weights = _energy(response_mask, old_log_probs, sum_pi_squared, rollout_is_weights).cumsum(dim=1)
    returns = discounted_sum_to_go(torch.where(kept, token_level_rewards.double(), 0), 1.0)
    returns = torch.where(kept, returns, 0)
    return to_float32(_minus_baseline(groups, returns, weights, kept)), to_float32(returns)


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
    groups, tokens = Groups.of(token_level_rewards, response_mask, index), PolicyTokens(response_mask.ne(0).double())
    energy = _energy(response_mask, old_log_probs, sum_pi_squared, rollout_is_weights)
    weights = tokens.pack(energy).cumsum(dim=1)
    returns = discounted_sum_to_go(tokens.pack(token_level_rewards), 1.0)
    there = torch.arange(returns.shape[1], device=returns.device) < groups.lengths[:, None]
    advantages = _minus_baseline(groups, returns, weights, there)
    return to_float32(tokens.unpack(advantages)), to_float32(tokens.unpack(returns))


def _energy(
    response_mask: Tensor, old_log_probs: Tensor, sum_pi_squared: Tensor, rollout_is_weights: Tensor | None
) -> Tensor:
    """w (B, R) float64: the squared gradient of each policy token's logits, 0 off the mask."""
    check_same_shape(response_mask=response_mask, old_log_probs=old_log_probs, sum_pi_squared=sum_pi_squared)
    energy = (1 - 2 * old_log_probs.double().exp() + sum_pi_squared.double()).clamp(min=0)
    if rollout_is_weights is not None:
        check_same_shape(response_mask=response_mask, rollout_is_weights=rollout_is_weights)
        energy = energy * rollout_is_weights.double().square()
    return torch.where(response_mask.bool(), energy, 0)


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
