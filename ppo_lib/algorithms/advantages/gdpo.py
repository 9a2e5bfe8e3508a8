"""Several rewards, each normalised in its group before they are added."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ppo_lib.algorithms.advantages.groups import Groups
from ppo_lib.algorithms.advantages.reinforce_plus_plus import whiten_over_tokens
from ppo_lib.errors import BatchMismatchError


def compute_gdpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Iterable[Any],
    reward_components: Tensor | None = None,
    config: Any = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Normalise each component of the reward by its group, add them up, and whiten over the batch.

        A_it = whiten(sum_k w_k (c_ik - mean_g c_k) / (std_g c_k + epsilon))

    (arXiv:2601.05242). Adding first, as `grpo` does, lets the component with the largest spread drown the others, and
    makes different combinations with the same total the same. Groups differ where any component does.

    Args:
        token_level_rewards: (B, R) float32.
        response_mask: (B, R) bool, int or float.
        index: (B,) the uid of each row's prompt.
        reward_components: (B, K) float32, the K rewards of each row; None takes the outcome as the only one.
        config: section `algorithm`; its `gdpo_reward_weights` are the K weights w, none means that all are 1.
        epsilon: added to the standard deviation.

    Returns:
        The advantages (B, R) float32, twice. For the edges see `advantages`.
    """
    groups = Groups.of(token_level_rewards, response_mask, index)
    components = groups.scores[:, None] if reward_components is None else reward_components.double()
    if components.dim() != 2 or len(components) != len(response_mask):
        raise BatchMismatchError(
            f"reward_components must be (rows, components) with {len(response_mask)} rows, "
            f"got {tuple(components.shape)}"
        )
    weights = tuple(getattr(config, "gdpo_reward_weights", None) or (1.0,) * components.shape[1])
    if len(weights) != components.shape[1]:
        raise BatchMismatchError(
            f"algorithm.gdpo_reward_weights has {len(weights)} values for {components.shape[1]} rewards"
        )
    centred = groups.centred(components)
    advantage = (centred / (groups.std(centred) + epsilon)) @ components.new_tensor(weights)
    advantages = whiten_over_tokens(groups, advantage, groups.tell_apart(centred), response_mask)
    return advantages, advantages
