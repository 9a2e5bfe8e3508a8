"""Metrics of a training step and of a validation, under the names that dashboards of this pipeline use.

Rows marked `is_padding` are in no metric. A statistic over nothing (no rows, no tokens) is left out, not reported as 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from ppo_lib.trainer.majority import win_probabilities
from protocol import DataProto, FieldMissingError

# ---------------------------------------------------------------- a training step


def compute_data_metrics(batch: DataProto, use_critic: bool | None = None) -> dict[str, float]:
    """What a step's batch looks like: scores, rewards, advantages, returns, values, lengths, turns.

    Scores and rewards are sums over a row, of rows with a response; advantages, returns and values are taken token by
    token where `response_mask` is 1; lengths count attended tokens, tool tokens included. An aborted row is one with an
    empty response, a fully masked one has no policy token.

    Args:
        batch: B rows with `token_level_scores`, `token_level_rewards`, `advantages`, `returns`, `response_mask`
            (all (B, R)), `attention_mask` (B, T), perhaps `values`, `is_padding`, `__num_turns__`.
        use_critic: whether there are values; None looks.
    """
    rows = _RealRows(batch)
    answered = rows.response_lengths > 0
    metrics: dict[str, float] = {}
    for name in ("score", "rewards"):
        per_token = rows["token_level_scores" if name == "score" else "token_level_rewards"]
        metrics |= _mean_max_min(f"critic/{name}", per_token.sum(dim=-1)[answered])

    policy_token = rows["response_mask"].bool()
    returns = rows["returns"][policy_token]
    metrics |= _mean_max_min("critic/advantages", rows["advantages"][policy_token])
    metrics |= _mean_max_min("critic/returns", returns)
    if use_critic or (use_critic is None and "values" in rows.fields):
        values = rows["values"][policy_token]
        metrics |= _mean_max_min("critic/values", values)
        if len(values) > 1:
            unexplained = torch.var(returns - values) / (torch.var(returns) + 1e-5)
            metrics["critic/vf_explained_var"] = 1.0 - unexplained.item()

    prompt_width = rows["attention_mask"].shape[1] - policy_token.shape[1]
    metrics |= _length_metrics("response_length", rows.response_lengths, policy_token.shape[1])
    metrics |= _length_metrics("response_length_non_aborted", rows.response_lengths[answered], policy_token.shape[1])
    metrics |= _length_metrics("prompt_length", rows.prompt_lengths, prompt_width)
    if len(answered):
        metrics["response/aborted_ratio"] = 1.0 - _mean(answered)
        metrics["response/fully_masked_ratio"] = 1.0 - _mean(policy_token.any(dim=1))
    if "__num_turns__" in batch.non_tensor_batch:
        turns = torch.from_numpy(batch.non_tensor_batch["__num_turns__"].astype(np.int64))
        metrics |= _mean_max_min("num_turns", turns[rows.real])
    return metrics


def compute_timing_metrics(batch: DataProto, timing_raw: Mapping[str, float]) -> dict[str, float]:
    """`timing_s/{stage}` for every stage timed, and milliseconds per token for those that work on tokens.

    Generation is charged to response tokens, the other stages to all tokens.
    """
    rows = _RealRows(batch)
    response = int(rows.response_lengths.sum())
    overall = response + int(rows.prompt_lengths.sum())
    charged_to = {"gen": response} | dict.fromkeys(("ref", "values", "adv", "update_critic", "update_actor"), overall)
    metrics = {f"timing_s/{stage}": float(seconds) for stage, seconds in timing_raw.items()}
    for stage, tokens in charged_to.items():
        if stage in timing_raw and tokens > 0:
            metrics[f"timing_per_token_ms/{stage}"] = timing_raw[stage] * 1000 / tokens
    return metrics


def compute_throughout_metrics(batch: DataProto, timing_raw: Mapping[str, float], n_gpus: int) -> dict[str, float]:
    """Tokens of the step, its seconds (`timing_raw["step"]`), tokens per second and rank, memory used on this node."""
    rows = _RealRows(batch)
    tokens = int(rows.prompt_lengths.sum() + rows.response_lengths.sum())
    seconds = timing_raw["step"]
    return {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": float(seconds),
        "perf/throughput": tokens / (seconds * n_gpus),
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / 2**30,
    }


class _RealRows:
    """The rows of a batch that are not padding; `rows[field]` selects them."""

    def __init__(self, batch: DataProto) -> None:
        self._tensors = {} if batch.batch is None else dict(batch.batch.items())
        self.fields = self._tensors.keys()
        self.real = ~self._tensors.get("is_padding", torch.zeros(len(batch), dtype=torch.bool))
        attended = self["attention_mask"].bool()
        width = self["response_mask"].shape[1]
        self.prompt_lengths = attended[:, :-width].sum(dim=1)
        self.response_lengths = attended[:, -width:].sum(dim=1)

    def __getitem__(self, field: str) -> Tensor:
        if field not in self._tensors:
            raise FieldMissingError(f"the metrics of a step need {field!r}; the batch has {', '.join(self.fields)}")
        return self._tensors[field][self.real]


def _mean(x: Tensor) -> float:
    return x.double().mean().item()


def _mean_max_min(prefix: str, x: Tensor) -> dict[str, float]:
    if x.numel() == 0:
        return {}
    return {f"{prefix}/mean": _mean(x), f"{prefix}/max": float(x.max()), f"{prefix}/min": float(x.min())}


def _length_metrics(prefix: str, lengths: Tensor, width: int) -> dict[str, float]:
    if len(lengths) == 0:
        return {}
    return {**_mean_max_min(prefix, lengths), f"{prefix}/clip_ratio": _mean(lengths == width)}


# ---------------------------------------------------------------- a validation


def process_validation_metrics(
    data_sources: Sequence[str], uids: Sequence[Hashable], infos: Mapping[str, Sequence[Any]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Reduce what was measured on each response to statistics of each data source, averaged over prompts.

    Responses are grouped by `uid` within their data source: two prompts of equal text are two prompts. For a prompt
    with N responses:

        mean@N, std@N             of its responses; std from N = 2 on
        best@k/mean, best@k/std   of the largest value among k responses drawn with replacement, for k = 2, 4, ... N
        worst@k/mean, ...         of the smallest
        maj@k/mean, ...           of a response with the most frequent `pred` among the k, if `infos` has `pred`

    These are expectations in closed form, not resampled (votes of more than 16 responses excepted, see `majority`).

    Args:
        data_sources: one per response.
        uids: one per response, equal for responses to the same prompt.
        infos: for each variable one entry per response. None or NaN is a missing value, left out of its prompt's N. A
            variable with any other entry that is no number is skipped.

    Returns:
        {data_source: {variable: {metric: value}}}
    """
    prompts: dict[str, dict[Hashable, list[int]]] = {}
    for row, (source, uid) in enumerate(zip(data_sources, uids, strict=True)):
        prompts.setdefault(source, {}).setdefault(uid, []).append(row)
    columns = {name: _as_numbers(values) for name, values in infos.items()}
    votes = infos.get("pred")
    reduced: dict[str, dict[str, dict[str, float]]] = {}
    for source, rows_of_uid in prompts.items():
        rows_of_prompt = [np.array(rows) for rows in rows_of_uid.values()]
        voted = votes is not None and any(votes[row] is not None for rows in rows_of_prompt for row in rows)
        reduced[source] = {}
        for name, values in columns.items():
            metrics = {} if values is None else _variable_metrics(values, votes if voted else None, rows_of_prompt)
            if metrics:
                reduced[source][name] = metrics
    return reduced


def validation_metric_names(reduced: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """Flatten to `val-core/{source}/{variable}/{metric}` for what a run is judged by, and `val-aux/...` for the rest.

    Judged by: `acc` if the source has it, else `reward`; mean@N, best@N/mean and maj@N/mean at its largest N.
    """
    flat: dict[str, float] = {}
    for source, variables in reduced.items():
        core_variable = "acc" if "acc" in variables else "reward"
        for variable, metrics in variables.items():
            largest = max(int(name.split("@")[1].split("/")[0]) for name in metrics)
            core = {f"mean@{largest}", f"best@{largest}/mean", f"maj@{largest}/mean"}
            for name, value in metrics.items():
                section = "val-core" if variable == core_variable and name in core else "val-aux"
                flat[f"{section}/{source}/{variable}/{name}"] = value
    return flat


def _as_numbers(values: Sequence[Any]) -> np.ndarray | None:
    """(rows,) float64 with NaN for a missing value; None if some entry is no number."""
    missing = [value is None for value in values]
    if not all(
        gone or isinstance(value, (bool, int, float, np.number, np.bool_)) for value, gone in zip(values, missing)
    ):
        return None
    return np.array([np.nan if gone else float(value) for value, gone in zip(values, missing)])


def _variable_metrics(
    values: np.ndarray, votes: Sequence[Any] | None, rows_of_prompt: Sequence[np.ndarray]
) -> dict[str, float]:
    """The statistics of one variable on one data source, each averaged over the prompts that have it."""
    by_size: dict[int, list[np.ndarray]] = defaultdict(list)
    for rows in rows_of_prompt:
        present = rows[~np.isnan(values[rows])]
        if len(present):
            by_size[len(present)].append(present)
    per_prompt: dict[str, list[np.ndarray]] = defaultdict(list)
    for _, prompts in sorted(by_size.items()):
        rows = np.stack(prompts)  # (prompts, N)
        ballots = None if votes is None else [_ballot([votes[row] for row in of_prompt]) for of_prompt in prompts]
        for name, statistic in _size_metrics(values[rows], ballots).items():
            per_prompt[name].append(statistic)
    return {name: float(np.concatenate(statistics).mean()) for name, statistics in per_prompt.items()}


def _size_metrics(values: np.ndarray, ballots: Sequence[np.ndarray] | None) -> dict[str, np.ndarray]:
    """Each statistic of prompts with N responses: values (prompts, N) -> (prompts,)."""
    size = values.shape[1]
    metrics = {f"mean@{size}": values.mean(axis=1)}
    if size == 1:
        return metrics
    metrics[f"std@{size}"] = values.std(axis=1)
    ascending = np.sort(values, axis=1)
    for draws in _draws_up_to(size):
        # of draws with replacement, all are among the lowest i of N with probability (i / N) ** draws
        is_the_largest = np.diff((np.arange(size + 1) / size) ** draws)
        metrics |= _mean_std(f"best@{draws}", ascending, is_the_largest)
        metrics |= _mean_std(f"worst@{draws}", ascending, is_the_largest[::-1])
        if ballots is not None:
            weights = np.stack([_chance_to_represent(ballot, draws) for ballot in ballots])  # (prompts, N)
            metrics |= _mean_std(f"maj@{draws}", values, weights)
    return metrics


def _draws_up_to(size: int) -> list[int]:
    powers = [2**exponent for exponent in range(1, size.bit_length()) if 2**exponent < size]
    return [*powers, size]


def _mean_std(name: str, values: np.ndarray, weights: np.ndarray) -> dict[str, np.ndarray]:
    """Mean and deviation along each row of `values` under probabilities `weights`."""
    mean = (values * weights).sum(axis=1)
    variance = ((values - mean[:, None]) ** 2 * weights).sum(axis=1)
    return {f"{name}/mean": mean, f"{name}/std": np.sqrt(variance)}


def _ballot(votes: Sequence[Any]) -> np.ndarray:
    """How many of the N responses gave the same vote as each, and which vote: (2, N) int64."""
    numbers: dict[Hashable, int] = {}
    vote = np.array([numbers.setdefault(v if isinstance(v, Hashable) else repr(v), len(numbers)) for v in votes])
    return np.stack([np.bincount(vote)[vote], vote])


def _chance_to_represent(ballot: np.ndarray, draws: int) -> np.ndarray:
    """The probability that each response is the one that stands for the winning vote, (N,).

    The votes for one answer share its probability to win, since any of them may be drawn first.
    """
    size, vote = ballot
    first = np.unique(vote, return_index=True)[1]
    order = first[np.argsort(-size[first], kind="stable")]  # one response per answer, the most frequent answer first
    chance = dict(zip(vote[order].tolist(), win_probabilities(tuple(size[order].tolist()), draws)))
    return np.array([chance[v] for v in vote.tolist()]) / size
