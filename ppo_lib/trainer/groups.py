"""The rollouts of one prompt as a group: which groups teach something, and what greedy rollouts say about the rest.

Works on envelopes whose rows were scored: `rm_scores` (B, R), `response_mask` (B, R), `prompt_row` (B), `uid`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_lib.config.algorithm_rules import SCORE_METRICS
from ppo_lib.errors import RewardError, RolloutError, TooFewGroupsError
from protocol import DataProto

__all__ = ["join_generated", "reward_column", "take_baselines", "too_few_groups", "varied_groups", "with_greedy_rows"]


def with_greedy_rows(rollouts: DataProto, prompts: DataProto) -> DataProto:
    """The rows to generate, and behind them each prompt once more, to be decoded greedily (`greedy`, (B,) bool)."""
    for part, greedy in ((rollouts, False), (prompts, True)):
        part.batch["greedy"] = torch.full((len(part),), greedy)
    return DataProto.concat([rollouts, prompts])


def take_baselines(data: DataProto) -> DataProto:
    """The sampled rows, each with the score of its prompt's greedy response as `reward_baselines` (B,) float32.

    Raises:
        RolloutError: a prompt has no greedy response.
    """
    greedy, prompt = data.batch["greedy"], data.batch["prompt_row"].tolist()
    scores = data.batch["rm_scores"].sum(dim=-1).tolist()
    baselines = {prompt[row]: scores[row] for row in greedy.nonzero().flatten().tolist()}
    sampled = (~greedy).nonzero().flatten()
    if missing := sorted({prompt[row] for row in sampled.tolist()} - baselines.keys()):
        raise RolloutError(f"prompt {missing[0]} of the batch came back without its greedy response")
    data = data[sampled]
    data.batch["reward_baselines"] = torch.tensor([baselines[prompt[row]] for row in sampled.tolist()])
    data.pop(batch_keys=["greedy"])
    return data


def varied_groups(data: DataProto, metric: str) -> Tensor:
    """(B,) bool: rows of prompts whose rollouts differ in `metric`.

    Rollouts without a policy token have no say: they are in no comparison of the advantages either.
    """
    values = _metric_values(data, metric)
    counted = data.batch["response_mask"].bool().any(dim=1).tolist()
    seen: dict[str, set[float]] = {}
    for uid, value, counts in zip(data.non_tensor_batch["uid"], values, counted):
        seen.setdefault(uid, set()).update([value] if counts else [])
    return torch.tensor([len(seen[uid]) > 1 for uid in data.non_tensor_batch["uid"]])


def _metric_values(data: DataProto, metric: str) -> list[float]:
    if metric in SCORE_METRICS:
        return data.batch["rm_scores"].sum(dim=-1).tolist()
    return reward_column(data, metric, "algorithm.filter_groups.metric")


def too_few_groups(found: int, seen: int, wanted: int, settings: Any) -> TooFewGroupsError:
    """The error of a step that found `found` varied groups among `seen` prompts, under section `filter_groups`."""
    limit = f"algorithm.filter_groups.max_num_gen_batches={settings.max_num_gen_batches}"
    advice = f"raise {limit} (0 is no limit) or rollout.n, or choose" if found else "raise rollout.n, or choose"
    return TooFewGroupsError(
        f"{found} of {seen} prompts have rollouts that differ in {settings.metric!r}, and a step needs {wanted}: "
        f"{advice} prompts that the policy sometimes solves and sometimes does not"
    )


def reward_column(data: DataProto, name: str, asked_by: str) -> list[float]:
    """A column of numbers that the scorer reported; 0 on padding rows.

    Raises:
        RewardError: there is no such column, or a row has no number in it.
    """
    reported = data.meta_info.get("reward_extra_keys", ())
    if name not in reported or name not in data.non_tensor_batch:
        raise RewardError(
            f"{asked_by} names {name!r}, which the scorer does not report; it reports "
            f"{', '.join(reported) or 'nothing beside the score'}. Return it in the scorer's dict, or name another"
        )
    padding = data.batch["is_padding"].tolist() if "is_padding" in data.tensor_keys() else [False] * len(data)
    values = []
    for row, (value, pads) in enumerate(zip(data.non_tensor_batch[name], padding)):
        if not pads and not isinstance(value, (bool, int, float, np.number, np.bool_)):
            raise RewardError(f"{asked_by} names {name!r}, and the scorer reported {value!r} for row {row}, no number")
        values.append(0.0 if pads else float(value))
    return values


def join_generated(parts: Sequence[DataProto], prompts: int) -> DataProto:
    """The first `prompts` prompts of several generation batches as one batch, their `prompt_row` counted through.

    A column that the scorer reported in some parts only is None in the others. What the engine says of its work
    (`rollout_stats`) is the mean over the parts that have it.
    """
    stats: dict[str, list[float]] = {}
    keys = list(dict.fromkeys(key for part in parts for key in part.meta_info.get("reward_extra_keys", ())))
    for part in parts:
        for key in keys:
            part.non_tensor_batch.setdefault(key, np.full(len(part), None, dtype=object))
        for name, value in part.meta_info.pop("rollout_stats", {}).items():
            stats.setdefault(name, []).append(value)
        for key in ("epoch", "reward_extra_keys"):  # the parts may come from two epochs
            part.meta_info.pop(key, None)
    joined = DataProto.concat(parts)
    numbers: dict[str, int] = {}
    rows = [numbers.setdefault(uid, len(numbers)) for uid in joined.non_tensor_batch["uid"]]
    joined.batch["prompt_row"] = torch.tensor(rows)
    joined.meta_info["reward_extra_keys"] = keys
    joined.meta_info["rollout_stats"] = {name: sum(values) / len(values) for name, values in stats.items()}
    return joined[joined.batch["prompt_row"] < prompts]
