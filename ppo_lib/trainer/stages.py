"""What each stage of a step does. No loop, no schedule: only the config, the worker groups and the batch.

`RayPPOTrainer` strings these methods together; a notebook calls them one cell at a time and gets the same numbers;
another trainer can inherit them and order them differently. Every method takes the envelope and returns either the
fields it computed, as an envelope to `union`, or the metrics of an update.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from ppo_lib.algorithms.aggregate import agg_loss, denominators_of
from ppo_lib.config import PPOConfig, StepArithmetic, estimator_reads, need_sum_pi_squared
from ppo_lib.trainer.balance import balanced_partitions, log_seqlen_unbalance
from ppo_lib.trainer.batch_math import (
    apply_kl_penalty,
    apply_rollout_correction,
    compute_advantage,
    compute_response_mask,
    extract_reward,
    mask_rejected,
    mini_batch_of,
    mini_batch_sizes,
    rank_major_order,
    rollout_log_probs_as_old,
)
from ppo_lib.trainer.groups import join_generated, take_baselines, too_few_groups, varied_groups, with_greedy_rows
from ppo_lib.trainer.rollout_diff import rollout_diff_metrics
from protocol import DataProto
from protocol import tensordict_utils as tu
from protocol.no_padding import left_right_2_no_padding, no_padding_2_padding

# The prompt's own tensors: generation takes them away and brings back the full rows under the same names.
PROMPT_TENSORS = ["input_ids", "attention_mask", "position_ids"]
# What a model pass reads of every row.
ROW_TENSORS = [*PROMPT_TENSORS, "responses", "response_mask"]


class PPOStages:
    """The stages of a PPO step, as methods. The attributes below are set by whoever builds the worker groups."""

    config: PPOConfig
    arithmetic: StepArithmetic
    actor_rollout_wg: Any
    ref_policy_wg: Any
    critic_wg: Any
    train_dataloader: Any
    async_rollout_manager: Any
    checkpoint_manager: Any
    reward_loop_manager: Any
    reward_fn: Callable[[DataProto], Any] | None
    kl_ctrl_in_reward: Any
    use_old_log_probs: bool
    use_critic: bool
    use_reference_policy: bool

    def _load_batch(self, batch_dict: dict[str, Any], epoch: int, global_steps: int) -> DataProto:
        """One dataloader item becomes the envelope: P rows, a fresh `uid` each, the temperature in meta_info."""
        batch = DataProto.from_single_dict(batch_dict)
        batch.meta_info.update(
            temperature=self.config.actor_rollout_ref.rollout.temperature, epoch=epoch, global_steps=global_steps
        )
        batch.non_tensor_batch["uid"] = np.array([str(uuid.uuid4()) for _ in range(len(batch))], dtype=object)
        return batch

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """Split off what generation needs: the prompt tensors leave `batch`; the object columns stay in both.

        Adds `prompt_row` (P) int64, so that every rollout can say which prompt it continues.
        """
        columns = batch.select(batch_keys=[], meta_info_keys=list(batch.meta_info))
        gen_batch = batch.pop(batch_keys=PROMPT_TENSORS).union(columns)
        gen_batch.batch["prompt_row"] = torch.arange(len(gen_batch))
        return gen_batch

    def _generate(self, gen_batch: DataProto) -> DataProto:
        """n rollouts per prompt: P rows in, B = P*n rows out; the engines sleep when it returns."""
        output = self._rollouts(gen_batch)
        self.checkpoint_manager.sleep_replicas()
        return output

    def _rollouts(self, gen_batch: DataProto) -> DataProto:
        """n rollouts per prompt, and one greedy one more where the estimator compares with it (`greedy`, (B,) bool)."""
        rollouts = gen_batch.repeat(self.config.actor_rollout_ref.rollout.n, interleave=True)
        if estimator_reads(self.config, "reward_baselines"):
            rollouts = with_greedy_rows(rollouts, gen_batch)
        return self.async_rollout_manager.generate_sequences(rollouts)

    def _join_rollouts(self, batch: DataProto, gen_output: DataProto) -> DataProto:
        """Each rollout joins its prompt's columns: `batch.repeat(n)` where all came back, right where some did not.

        Greedy rollouts leave again: their scores become `reward_baselines` (B,) of the others.
        """
        joined = batch[gen_output.batch["prompt_row"]].union(gen_output)
        if "response_mask" not in joined.tensor_keys():
            joined.batch["response_mask"] = compute_response_mask(joined)
        return take_baselines(self._scored(joined)) if "greedy" in joined.tensor_keys() else joined

    def _generate_varied_groups(self, batch: DataProto, metrics: dict[str, Any]) -> DataProto:
        """Generate and score until `train_batch_size` prompts have rollouts that differ; those are the batch.

        The first generation batch is `batch`, the next ones come from the dataloader; what is left of the last one is
        not used, so nothing but the dataloader's place has to be kept for resuming.

        Raises:
            TooFewGroupsError: `max_num_gen_batches` were not enough, or there is none in a whole epoch of prompts.
        """
        settings, wanted = self.config.algorithm.filter_groups, self.config.data.train_batch_size
        meta, a_whole_epoch = batch.meta_info, len(self.train_dataloader)
        parts: list[DataProto] = []
        seen = found = 0
        while found < wanted:
            if parts:
                if len(parts) == settings.max_num_gen_batches or (not found and len(parts) >= a_whole_epoch):
                    raise too_few_groups(found, seen, wanted, settings)
                more = self.train_dataloader.next_batch()
                batch = self._load_batch(more, self.train_dataloader.epoch_of_last_batch, meta["global_steps"])
            seen += len(batch)
            scored = self._scored(self._join_rollouts(batch, self._rollouts(self._get_gen_batch(batch))))
            parts.append(scored[varied_groups(scored, settings.metric)])
            found += len(set(parts[-1].non_tensor_batch["uid"]))
        self.checkpoint_manager.sleep_replicas()
        metrics["train/num_gen_batches"] = len(parts)
        metrics["train/constant_group_fraction"] = 1 - found / seen
        metrics["train/unused_groups"] = found - wanted
        joined = join_generated(parts, wanted)
        joined.meta_info["epoch"] = meta["epoch"]
        return joined

    def _balance_batch(self, batch: DataProto, metrics: dict[str, Any]) -> DataProto:
        """Order rows so that every data-parallel rank gets an equal share of each mini-batch, of about equal length.

        The mini-batches themselves are fixed by the prompts; only the rank that computes a row changes here. Where a
        mini-batch does not divide by the ranks, rows marked `is_padding` with an all-zero response_mask fill it up.
        """
        ranks = self.actor_rollout_wg.world_size
        lengths = batch.batch["attention_mask"].sum(dim=-1).tolist()
        balance = self.config.trainer.balance_batch
        partition = partial(balanced_partitions, equal_size=True) if balance else contiguous_partitions
        mini_batch = self._mini_batches(batch, self.config.actor_rollout_ref.actor).tolist()
        if ranks == 1:
            order, padding = list(range(len(batch))), []
        else:
            order, padding = rank_major_order(mini_batch, lengths, ranks, partition)
        batch = batch[torch.tensor(order)]
        is_padding = torch.zeros(len(batch), dtype=torch.bool)
        is_padding[padding] = True
        batch.batch["is_padding"] = is_padding
        batch.batch["response_mask"] = torch.where(is_padding[:, None], 0, batch.batch["response_mask"])
        share = len(order) // ranks
        shares = [order[r * share : (r + 1) * share] for r in range(ranks)]
        metrics.update(log_seqlen_unbalance(lengths, shares, prefix="global_seqlen"))
        return batch

    def _compute_reward_colocate(self, batch: DataProto) -> DataProto:
        """`rm_scores` (B, R) of a batch that generation did not score: by `reward_fn`, else by the reward loop."""
        if self.reward_fn is not None:
            scores, extra = self.reward_fn(batch)
        else:
            scores, extra = self.reward_loop_manager.score_batch(batch)
        return DataProto.from_dict(
            tensors={"rm_scores": scores}, non_tensors=extra, meta_info={"reward_extra_keys": list(extra)}
        )

    def _scored(self, batch: DataProto) -> DataProto:
        """The batch with `rm_scores`, whether generation wrote them or not."""
        if "rm_scores" in batch.tensor_keys():
            return batch
        batch.meta_info.pop("reward_extra_keys", None)  # generation named none, since it scored nothing
        return batch.union(self._compute_reward_colocate(batch))

    def _compute_reward(self, batch: DataProto) -> DataProto:
        """Write `token_level_scores` (B, R): the raw score on the last policy token; nothing on padding rows."""
        batch = self._scored(batch)
        scores, _ = extract_reward(batch)
        batch.batch["token_level_scores"] = torch.where(batch.batch["is_padding"][:, None], 0.0, scores)
        return batch

    def _compute_old_log_prob(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """`old_log_probs` (B, R) of the actor before its update, and the metrics that need this pass.

        In bypass mode they are the rollout's, and there is no pass. Where the estimator asks for it, `sum_pi_squared`
        (B, R) comes with them. Metrics: `actor/entropy` and, where the engine gave its log-probs,
        `training/rollout_probs_diff_*`.
        """
        if self.config.algorithm.rollout_correction.bypass_mode:
            return rollout_log_probs_as_old(batch), {}
        squared = need_sum_pi_squared(self.config)
        td = self._worker_batch(batch, calculate_entropy=True, calculate_sum_pi_squared=squared)
        names = {"log_probs": "old_log_probs", "entropys": "entropys"}
        names |= {"sum_pi_squared": "sum_pi_squared"} if squared else {}
        padded = self._padded(self.actor_rollout_wg.compute_log_prob(td), batch, **names)
        mask, actor = batch.batch["response_mask"], self.config.actor_rollout_ref.actor
        entropys = padded.pop(batch_keys=["entropys"]).batch["entropys"]
        whole = denominators_of(mask, actor.loss_scale_factor or self.config.data.max_response_length)
        metrics = {"actor/entropy": agg_loss(entropys, mask, actor.loss_agg_mode, whole).item()}
        if "rollout_log_probs" in batch.tensor_keys():
            rollout = batch.batch["rollout_log_probs"]
            metrics |= rollout_diff_metrics(padded.batch["old_log_probs"], rollout, mask)
        return padded, metrics

    def _compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        """`ref_log_prob` (B, R) of the frozen reference policy."""
        output = self.ref_policy_wg.compute_ref_log_prob(self._worker_batch(batch, calculate_entropy=False))
        return self._padded(output, batch, log_probs="ref_log_prob")

    def _compute_values(self, batch: DataProto) -> DataProto:
        """`values` (B, R): the critic's estimate before each response token is chosen."""
        return self._padded(self.critic_wg.compute_values(self._worker_batch(batch)), batch, values="values")

    def _compute_advantage(self, batch: DataProto) -> tuple[DataProto, dict[str, float]]:
        """Write `token_level_rewards`, `advantages`, `returns` on the driver; metrics of KL and rollout correction.

        What rollout correction rejects leaves `response_mask`, and with it every loss and its denominators. In bypass
        mode the actor's update corrects.
        """
        algorithm, metrics, left = self.config.algorithm, {}, None
        if algorithm.use_kl_in_reward:
            batch, metrics = apply_kl_penalty(batch, self.kl_ctrl_in_reward, algorithm.kl_penalty)
        else:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        if self.use_old_log_probs and not algorithm.rollout_correction.bypass_mode:
            batch, left, correction_metrics = apply_rollout_correction(batch, algorithm.rollout_correction)
            metrics |= correction_metrics
        batch = compute_advantage(
            batch,
            algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.config.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=algorithm,
        )
        return batch if left is None else mask_rejected(batch, left), metrics

    def _update_critic(self, batch: DataProto) -> dict[str, float]:
        """Fit the critic to `returns`; its metrics."""
        td = self._worker_batch(batch, "values", "returns")
        return self.critic_wg.update_critic(self._with_mini_batches(td, batch, self.config.critic))

    def _update_actor(self, batch: DataProto) -> dict[str, float]:
        """Move the policy along the advantages; its metrics."""
        fields = ["advantages"]
        fields += [f for f in ("old_log_probs", "ref_log_prob", "rollout_is_weights") if f in batch.tensor_keys()]
        # where no pass before the update measured the entropy, the update does
        unmeasured = not self.use_old_log_probs or self.config.algorithm.rollout_correction.bypass_mode
        td = self._worker_batch(batch, *fields, calculate_entropy=unmeasured)
        return self.actor_rollout_wg.update_actor(
            self._with_mini_batches(td, batch, self.config.actor_rollout_ref.actor)
        )

    # ---------------------------------------------------------------- the way to the workers and back

    def _worker_batch(self, batch: DataProto, *fields: str, **settings: Any) -> TensorDict:
        """The rows a worker needs, without padding, and the settings of this call."""
        padded = batch.select(batch_keys=[*ROW_TENSORS, *fields], non_tensor_batch_keys=[], meta_info_keys=[])
        padded = padded.to_tensordict()
        for name in ("input_ids", "position_ids", "response_mask"):  # half the bytes on the way
            padded[name] = padded[name].to(torch.int32)
        td = left_right_2_no_padding(padded)
        meta = batch.meta_info
        tu.assign_non_tensor(td, temperature=meta["temperature"], global_steps=meta["global_steps"], **settings)
        return td

    def _padded(self, output: TensorDict, batch: DataProto, **names: str) -> DataProto:
        """A worker's jagged fields, back at (B, R) under their names in the envelope."""
        width = batch.batch["responses"].shape[1]
        return DataProto.from_dict(
            {ours: no_padding_2_padding(output[theirs], width) for theirs, ours in names.items()}
        )

    def _mini_batches(self, batch: DataProto, config: Any) -> torch.Tensor:
        """(B,) int64 mini-batch of each row under an actor's or critic's settings."""
        seed = config.data_loader_seed + batch.meta_info["global_steps"] if config.shuffle else None
        return mini_batch_of(batch.batch["prompt_row"], config.ppo_mini_batch_size, seed)

    def _with_mini_batches(self, td: TensorDict, batch: DataProto, config: Any) -> TensorDict:
        """Add the mini-batch of each row and the denominators of each mini-batch over all ranks."""
        td["mini_batch"] = self._mini_batches(batch, config)
        num_tokens, num_seqs = mini_batch_sizes(td["mini_batch"], batch.batch["response_mask"])
        tu.assign_non_tensor(td, mini_batch_num_tokens=num_tokens, mini_batch_num_seqs=num_seqs)
        return td


def contiguous_partitions(lengths: list[int], parts: int) -> list[list[int]]:
    """Equal runs of rows in the order they stand, whatever their lengths."""
    share = len(lengths) // parts
    return [list(range(r * share, (r + 1) * share)) for r in range(parts)]
