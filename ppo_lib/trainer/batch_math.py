"""What the driver computes on the envelope itself: masks, rewards, advantages, mini-batches and their denominators.

Module functions, not methods: a script or a notebook can call each on any `DataProto` that has the fields. Shapes:
B rows, R response width (right-padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_lib.algorithms import get_adv_estimator_fn
from ppo_lib.algorithms.kl import AdaptiveKLController, FixedKLController
from ppo_lib.algorithms.kl import kl_penalty as token_kl
from ppo_lib.algorithms.masked import masked_mean
from ppo_lib.algorithms.rollout_correction import correct_rollouts
from ppo_lib.config import need_critic, need_reference_policy, reads_field
from ppo_lib.trainer.groups import reward_column
from protocol import DataProto
from protocol.errors import FieldMissingError

__all__ = [
    "apply_kl_penalty",
    "apply_rollout_correction",
    "compute_advantage",
    "compute_response_mask",
    "extract_reward",
    "mask_rejected",
    "mini_batch_of",
    "mini_batch_sizes",
    "need_critic",
    "need_reference_policy",
    "rollout_log_probs_as_old",
]


ESTIMATOR_FIELDS = ("values", "old_log_probs", "sum_pi_squared", "reward_baselines", "rollout_is_weights")
"""(B, R) or (B,) tensors that an advantage estimator may take, where the batch has them."""


def compute_response_mask(data: DataProto) -> Tensor:
    """(B, R) int64: the attended part of the response, for rollouts whose engine wrote no `response_mask`."""
    width = data.batch["responses"].shape[1]
    return data.batch["attention_mask"][:, -width:].to(torch.int64)


def extract_reward(data: DataProto) -> tuple[Tensor, dict[str, np.ndarray]]:
    """The scores that the reward loop wrote: `rm_scores` (B, R) float32 and the extra columns it named in meta_info."""
    if "rm_scores" not in data.tensor_keys():
        raise FieldMissingError(
            "the batch has no 'rm_scores': the reward loop did not score it, and no reward_fn was given"
        )
    extra = {
        k: data.non_tensor_batch[k] for k in data.meta_info.get("reward_extra_keys", ()) if k in data.non_tensor_batch
    }
    return data.batch["rm_scores"], extra


def apply_kl_penalty(
    data: DataProto, kl_ctrl: FixedKLController | AdaptiveKLController, kl_penalty: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Write `token_level_rewards` = scores - beta * KL(old || ref), token by token, and move the controller one step.

    The measured KL is the mean over rows of each row's token mean; rows without a policy token take no part.
    """
    mask = data.batch["response_mask"].bool()
    kld = token_kl(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty, mask)  # (B, R)
    beta = kl_ctrl.value
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - beta * kld
    alive = mask.any(dim=-1)
    measured = masked_mean(kld, mask, dim=-1)[alive].mean().item() if alive.any() else 0.0
    kl_ctrl.update(current_kl=measured, n_steps=int(alive.sum()))
    return data, {"actor/reward_kl_penalty": measured, "actor/reward_kl_penalty_coeff": beta}


def rollout_log_probs_as_old(data: DataProto) -> DataProto:
    """`old_log_probs` (B, R) that are the engine's own, 0 off the policy tokens."""
    if "rollout_log_probs" not in data.tensor_keys():
        raise FieldMissingError("bypass mode takes the rollout's log-probs, and the rollouts came back without any")
    kept = data.batch["response_mask"].bool()
    return DataProto.from_dict({"old_log_probs": torch.where(kept, data.batch["rollout_log_probs"], 0)})


def apply_rollout_correction(data: DataProto, config: Any) -> tuple[DataProto, Tensor | None, dict[str, float]]:
    """Write `rollout_is_weights` (B, R) as section `algorithm.rollout_correction` says; rows rejected whole leave.

    Returns the envelope, what rejection leaves of `response_mask` (None where nothing is rejected), and the metrics.
    A row of which some tokens are left keeps them all for now, so that its score, which stands on the last of them,
    still counts in the advantages: see `mask_rejected`. Without the engine's log-probs nothing is done.

    Raises:
        FieldMissingError: a correction is asked for, and the rollouts came back without log-probs.
    """
    if "rollout_log_probs" not in data.tensor_keys():
        if config.rollout_is is not None or config.rollout_rs is not None:
            raise FieldMissingError("rollout correction needs rollout_log_probs, and the rollouts came back without")
        return data, None, {}
    batch = data.batch
    result = correct_rollouts(batch["old_log_probs"], batch["rollout_log_probs"], batch["response_mask"], config)
    if result.weights is not None:
        batch["rollout_is_weights"] = result.weights
    if config.rollout_rs is None:
        return data, None, result.metrics
    alive = result.response_mask.bool().any(dim=1, keepdim=True)
    batch["response_mask"] = torch.where(alive, batch["response_mask"], 0)
    return data, result.response_mask, result.metrics


def mask_rejected(data: DataProto, left: Tensor) -> DataProto:
    """Take rejected tokens out of `response_mask`, `advantages` and `returns`; `left` (B, R) is the new mask."""
    for name in ("advantages", "returns"):
        data.batch[name] = torch.where(left.bool(), data.batch[name], 0)
    data.batch["response_mask"] = left
    return data


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    num_repeat: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    config: Any = None,
) -> DataProto:
    """Write `advantages` and `returns` (B, R) float32, zero where `response_mask` is 0.

    `num_repeat` is accepted for existing callers; groups are read from `uid`, dropped rollouts or not.
    """
    batch = data.batch
    fields = {name: batch[name] for name in ESTIMATOR_FIELDS if name in data.tensor_keys()}
    keys = getattr(config, "gdpo_reward_keys", ())
    if keys and reads_field(adv_estimator, "reward_components"):
        columns = [reward_column(data, key, "algorithm.gdpo_reward_keys") for key in keys]
        fields["reward_components"] = torch.tensor(columns, dtype=torch.float32).T  # (B, K)
    advantages, returns = get_adv_estimator_fn(adv_estimator)(
        token_level_rewards=batch["token_level_rewards"],
        response_mask=batch["response_mask"],
        index=data.non_tensor_batch.get("uid"),
        gamma=gamma,
        lam=lam,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        config=config,
        **fields,
    )
    batch["advantages"], batch["returns"] = advantages, returns
    return data


def mini_batch_of(prompt_row: Tensor, prompts_per_mini_batch: int, shuffle_seed: int | None = None) -> Tensor:
    """(B,) int64: the mini-batch each row belongs to, all rows of a prompt in the same one.

    Prompts fill mini-batches in dataloader order or, given a seed, in an order drawn from it.
    """
    order = torch.arange(int(prompt_row.max()) + 1 if len(prompt_row) else 0)
    if shuffle_seed is not None:
        order = torch.randperm(len(order), generator=torch.Generator().manual_seed(shuffle_seed))
    return order[prompt_row] // prompts_per_mini_batch


def mini_batch_sizes(mini_batch: Tensor, response_mask: Tensor) -> tuple[list[float], list[float]]:
    """Policy tokens, and rows with at least one, per mini-batch over all ranks: the denominators of the losses."""
    tokens = response_mask.bool().sum(dim=-1)  # (B,)
    count = int(mini_batch.max()) + 1 if len(mini_batch) else 0
    zeros = torch.zeros(count, dtype=torch.float64)
    num_tokens = zeros.index_add(0, mini_batch, tokens.double())
    num_seqs = zeros.index_add(0, mini_batch, (tokens > 0).double())
    return num_tokens.tolist(), num_seqs.tolist()


def rank_major_order(
    mini_batch: Sequence[int], lengths: Sequence[int], ranks: int, partition: Any
) -> tuple[list[int], list[int]]:
    """The row order in which each rank's contiguous share holds its part of every mini-batch.

    Returns `(order, padding)`: `order` indexes rows, `padding` lists the positions in `order` that only fill up a
    mini-batch to a multiple of `ranks` (they repeat that mini-batch's shortest row). `partition(lengths, ranks)` gives
    equally many positions to each rank.
    """
    shares: list[list[tuple[int, bool]]] = [[] for _ in range(ranks)]
    for k in sorted(set(mini_batch)):
        rows = [(i, False) for i, m in enumerate(mini_batch) if m == k]
        shortest = min(rows, key=lambda row: lengths[row[0]])[0]
        rows += [(shortest, True)] * (-len(rows) % ranks)
        for rank, part in enumerate(partition([lengths[i] for i, _ in rows], ranks)):
            shares[rank] += [rows[j] for j in sorted(part)]
    flat = [row for share in shares for row in share]
    return [i for i, _ in flat], [at for at, (_, pad) in enumerate(flat) if pad]
