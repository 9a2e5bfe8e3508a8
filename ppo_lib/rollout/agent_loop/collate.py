"""Finished samples become the padded envelope."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ppo_lib.errors import RolloutError
from ppo_lib.reward.batch import columns_of, place_scores, tensors_of
from ppo_lib.rollout.agent_loop.base import AgentLoopOutput
from ppo_lib.rollout.agent_loop.samples import prompt_rows_of
from protocol import DataProto


def collate(
    samples: Sequence[AgentLoopOutput], gen_batch: DataProto, response_length: int, pad_token_id: int
) -> DataProto:
    """Join samples with their prompts, in the order of the batch.

    Args:
        samples: One per row of `gen_batch`, in any order.
        gen_batch: The batch they were generated for: `input_ids`, `attention_mask`, `position_ids` (B, L).
        response_length: R, the width of a response.
        pad_token_id: Fills responses on the right.

    Returns:
        Tensors `prompts` (B, L), `responses`, `response_mask` (B, R), `input_ids`, `attention_mask`, `position_ids`
        (B, L + R), `prompt_row`, `weight_version_min`, `weight_version_max` (B), all int64; `rollout_log_probs` (B, R)
        float32 where the samples have them; `greedy` (B) bool where the batch has it; `rm_scores` (B, R) float32 where
        they were scored. Object columns `__num_turns__`, `finish_reason` and what the scorer reported.
        Meta_info `timing`, `reward_extra_keys`, `rollout_stats` (metrics).

    Raises:
        RolloutError: A sample is missing, or a response is longer than R or its parts differ in length.
    """
    samples = sorted(samples, key=lambda sample: sample.index)
    if [sample.index for sample in samples] != list(range(len(gen_batch))):
        raise RolloutError(f"{len(samples)} samples came back for the {len(gen_batch)} rows of the batch")
    for sample in samples:
        _check(sample, response_length)
    tensors = _tensors(samples, gen_batch, response_length, pad_token_id)
    extra: dict[str, np.ndarray] = {}
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    if rewards:
        tensors["rm_scores"] = place_scores([reward.score for reward in rewards], tensors["response_mask"])
        extra = columns_of([reward.extra for reward in rewards])
    return DataProto.from_dict(
        tensors=tensors,
        non_tensors={
            "__num_turns__": np.array([sample.num_turns for sample in samples], dtype=np.int32),
            "finish_reason": np.array([sample.finish_reason for sample in samples], dtype=object),
            **extra,
        },
        meta_info={
            "timing": _timing(samples, tensors_of(gen_batch, "attention_mask")["attention_mask"]),
            "reward_extra_keys": list(extra),
            "rollout_stats": _stats(samples),
        },
    )


def _tensors(
    samples: Sequence[AgentLoopOutput], gen_batch: DataProto, response_length: int, pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Everything but the scores; the samples are in the order of the batch."""
    batch = tensors_of(gen_batch, "input_ids", "attention_mask", "position_ids")
    prompts, attention, positions = batch["input_ids"], batch["attention_mask"], batch["position_ids"]
    responses = _rows([s.response_ids for s in samples], response_length, torch.int64, pad_token_id)
    response_mask = _rows([s.response_mask for s in samples], response_length, torch.int64)
    produced = _rows([[1] * len(s.response_ids) for s in samples], response_length, attention.dtype)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([prompts, responses], dim=1),
        "attention_mask": torch.cat([attention, produced], dim=1),
        "position_ids": torch.cat([positions, positions[:, -1:] + produced.cumsum(dim=1)], dim=1),
        "prompt_row": torch.from_numpy(prompt_rows_of(gen_batch)),
        "weight_version_min": torch.tensor([s.weight_version_min for s in samples]),
        "weight_version_max": torch.tensor([s.weight_version_max for s in samples]),
    }
    if "greedy" in batch:
        tensors["greedy"] = batch["greedy"]
    log_probs = [sample.log_probs for sample in samples]
    if all(row is not None for row in log_probs):
        tensors["rollout_log_probs"] = _rows(log_probs, response_length, torch.float32)
    return tensors


def _check(sample: AgentLoopOutput, response_length: int) -> None:
    sizes = {len(sample.response_ids), len(sample.response_mask)}
    if sample.log_probs is not None:
        sizes.add(len(sample.log_probs))
    if len(sizes) > 1:
        raise RolloutError(
            f"the agent loop's output for row {sample.index} has response_ids, response_mask and log_probs of "
            f"different lengths: {sorted(sizes)}"
        )
    if max(sizes) > response_length:
        raise RolloutError(
            f"the agent loop's response for row {sample.index} has {max(sizes)} tokens; at most "
            f"rollout.response_length={response_length} fit"
        )


def _rows(rows: Sequence[Any], width: int, dtype: torch.dtype, fill: int = 0) -> torch.Tensor:
    """(B, width), each row filled up on the right."""
    out = torch.full((len(rows), width), fill, dtype=dtype)
    for i, row in enumerate(rows):
        out[i, : len(row)] = torch.tensor(row, dtype=dtype)
    return out


def _stats(samples: Sequence[AgentLoopOutput]) -> dict[str, float]:
    """Means over the samples of which the engine reported something: `rollout/spec_accept_rate` and the like."""
    stats: dict[str, float] = {}
    for name in dict.fromkeys(name for sample in samples for name in sample.stats):
        values = [sample.stats[name] for sample in samples if name in sample.stats]
        stats[f"rollout/{name}"] = sum(values) / len(values)
    return stats


def _timing(samples: Sequence[AgentLoopOutput], attention: torch.Tensor) -> dict[str, float]:
    """Seconds by activity over the samples, and what the sample that held the batch up looked like."""
    timing: dict[str, float] = {}
    for activity in dict.fromkeys(name for sample in samples for name in sample.timing):
        seconds = [sample.timing.get(activity, 0.0) for sample in samples]
        timing[f"agent_loop/{activity}/min"] = min(seconds)
        timing[f"agent_loop/{activity}/max"] = max(seconds)
        timing[f"agent_loop/{activity}/mean"] = sum(seconds) / len(seconds)
    slowest = max(samples, key=lambda sample: sum(sample.timing.values()))
    for activity, seconds in slowest.timing.items():
        timing[f"agent_loop/slowest/{activity}"] = seconds
    timing["agent_loop/slowest/prompt_length"] = float(attention[slowest.index].sum())
    timing["agent_loop/slowest/response_length"] = float(len(slowest.response_ids))
    return timing
