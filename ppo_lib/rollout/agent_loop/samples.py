"""From rows of a generation batch to samples: tokens without padding, sampling parameters, seeds, placement."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ppo_lib.config import RolloutConfig
from ppo_lib.errors import BatchMismatchError
from ppo_lib.reward.batch import tensors_of
from ppo_lib.rollout.agent_loop.base import AgentSample
from ppo_lib.rollout.engine import Cohort, SamplingParams
from ppo_lib.rollout.server import LLMServerManager
from protocol import DataProto


def sample_seed(run_seed: int, epoch: int, dataset_row: int, session: int, validate: bool) -> int:
    """31 bits that depend on what is sampled and on nothing else: not on the step, the order or the machine."""
    what = f"{run_seed}/{epoch}/{dataset_row}/{session}/{int(validate)}"
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=4).digest(), "little") >> 1


def sampling_params(config: RolloutConfig, temperature: float, validate: bool) -> SamplingParams:
    """The configured way to sample, for training or (`rollout.val_kwargs`) for validation; the seed is left open.

    Args:
        config: The section `rollout`.
        temperature: What the batch is generated with; greedy generation has its log-probabilities at it too.
        validate: Whether this is validation.
    """
    section = config.val_kwargs if validate else config
    return SamplingParams(
        temperature=temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        max_tokens=config.response_length,
        stop=tuple(config.stop),
        stop_token_ids=tuple(config.stop_token_ids),
        greedy=not section.do_sample,
        ignore_eos=config.ignore_eos,
        logprobs=config.calculate_log_probs,
    )


def samples_of(
    gen_batch: DataProto, config: RolloutConfig, servers: LLMServerManager, batch_name: str
) -> list[AgentSample]:
    """One sample per row, in order.

    Args:
        gen_batch: `input_ids`, `attention_mask` (B, L) left-padded; `uid`; optionally `prompt_row`, `greedy` (B,) bool
            (rows to decode greedily, however the others are sampled), `dataset_row` and any object columns; meta_info
            `temperature`, `epoch`, `validate`.
        config: The section `rollout`.
        servers: Decides which replica serves which row.
        batch_name: Unique name of this batch.

    Raises:
        BatchMismatchError: A row has no prompt token, or there is no `uid`.
    """
    meta, columns = gen_batch.meta_info, gen_batch.non_tensor_batch
    if "uid" not in columns:
        raise BatchMismatchError(f"generation needs the column uid; the batch has {', '.join(columns) or 'none'}")
    validate = bool(meta.get("validate", False))
    temperature = meta.get("temperature", config.val_kwargs.temperature if validate else config.temperature)
    params = sampling_params(config, float(temperature), validate)
    rows = len(gen_batch)
    prompts = prompt_tokens(gen_batch)
    prompt_rows = prompt_rows_of(gen_batch)
    greedy = tensors_of(gen_batch).get("greedy", torch.full((rows,), params.greedy)).tolist()
    replicas = [servers.replica_of(row, rows) for row in range(rows)]
    sizes = Counter(replicas)
    sessions: defaultdict[str, int] = defaultdict(int)
    samples = []
    for row in range(rows):
        uid = str(columns["uid"][row])
        session, sessions[uid] = sessions[uid], sessions[uid] + 1
        dataset_row = int(columns["dataset_row"][row]) if "dataset_row" in columns else int(prompt_rows[row])
        seed = sample_seed(config.seed, int(meta.get("epoch", 0)), dataset_row, session, validate)
        samples.append(
            AgentSample(
                index=row,
                batch=batch_name,
                uid=uid,
                session=session,
                prompt_row=int(prompt_rows[row]),
                prompt_ids=prompts[row],
                params=replace(params, seed=seed, greedy=greedy[row]),
                columns={name: column[row] for name, column in columns.items()},
                replica=replicas[row],
                cohort=Cohort(batch_name, sizes[replicas[row]]) if servers.decodes_cohorts else None,
                min_weight_version=servers.weight_version,
            )
        )
    return samples


def prompt_tokens(gen_batch: DataProto) -> list[list[int]]:
    """The attended tokens of each row.

    Raises:
        BatchMismatchError: A row has none.
    """
    batch = tensors_of(gen_batch, "input_ids", "attention_mask")
    ids, mask = batch["input_ids"], batch["attention_mask"].bool()
    prompts = [row[attended].tolist() for row, attended in zip(ids, mask, strict=True)]
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise BatchMismatchError(f"row {row} of the generation batch has no prompt token: its mask is all zero")
    return prompts


def prompt_rows_of(gen_batch: DataProto) -> np.ndarray:
    """(B,) int64: the column `prompt_row`, or the place of each row's uid among the distinct ones."""
    prompt_row = tensors_of(gen_batch).get("prompt_row", None)
    if prompt_row is not None:
        return prompt_row.numpy()
    places: dict[Any, int] = {}
    return np.array([places.setdefault(uid, len(places)) for uid in gen_batch.non_tensor_batch["uid"]], dtype=np.int64)
