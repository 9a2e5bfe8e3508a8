"""Reward functions as people hand them to a trainer, in the one shape it calls; and a check that data can be scored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_lib.errors import DataError, RewardError
from ppo_lib.reward.batch import columns_of, place_scores, tensors_of
from ppo_lib.reward.function import describe, load_reward_fn
from ppo_lib.reward.loop import RewardLoopManager
from ppo_lib.reward.scorers import SCORERS, unknown_source
from protocol import DataProto

BatchReward = Callable[[DataProto], tuple[Tensor, dict[str, np.ndarray]]]


def is_per_sample(fn: Callable[..., Any]) -> bool:
    """Whether `fn` scores one response (it takes `solution_str`) and not a whole batch."""
    return "solution_str" in inspect.signature(fn).parameters


def as_batch_reward(fn: Callable[..., Any], tokenizer: Any, timeout_s: float | None = None) -> BatchReward:
    """`fn` as a function from the batch to `rm_scores` (B, R) float32 and extra columns (B,).

    `fn` is either a scorer of one response, `(data_source, solution_str, ground_truth, extra_info) -> float | dict`,
    which then runs in this process; or a function of the whole batch that returns (B, R) scores, or a dict with
    `reward_tensor` and `reward_extra_info` (it is called with `return_dict=True` if it takes that).

    A batch function's score on a token that the policy did not write (a tool's, or padding) moves to the row's last
    policy token. Raises `RewardError` if it raises or returns anything but finite scores of that shape.
    """
    if is_per_sample(fn):
        config = SimpleNamespace(
            num_workers=0,
            timeout_s=timeout_s,
            custom_reward_function=SimpleNamespace(path=None, name="compute_score", reward_kwargs={}),
            reward_manager=SimpleNamespace(source="register", name="naive"),
            reward_kwargs={},
        )
        return RewardLoopManager(config, tokenizer, compute_score=fn).score_batch
    options = {"return_dict": True} if "return_dict" in inspect.signature(fn).parameters else {}
    name = getattr(fn, "__name__", type(fn).__name__)

    def score(data: DataProto) -> tuple[Tensor, dict[str, np.ndarray]]:
        try:
            returned = fn(data, **options)
        except Exception as error:
            raise RewardError(
                f"the reward function {name} failed on a batch of {len(data)}: {describe(error)}"
            ) from error
        extra = {}
        if isinstance(returned, dict):
            extra = dict(returned.get("reward_extra_info") or {})
            returned = returned.get("reward_tensor")
        return _checked_scores(returned, data, name), _checked_columns(extra, len(data), name)

    return score


def _checked_scores(scores: Any, data: DataProto, name: str) -> Tensor:
    mask = tensors_of(data, "response_mask")["response_mask"].bool()  # (B, R)
    if not isinstance(scores, Tensor):
        raise RewardError(
            f"the reward function {name} returned a {type(scores).__name__}; expected a tensor {tuple(mask.shape)}, "
            "or a dict with one under 'reward_tensor'."
        )
    if scores.shape != mask.shape:
        raise RewardError(
            f"the reward function {name} returned scores of shape {tuple(scores.shape)}; expected {tuple(mask.shape)}, "
            "a score for each response token."
        )
    scores = scores.detach().to(device="cpu", dtype=torch.float32)
    bad = (~torch.isfinite(scores)).any(-1).nonzero()
    if len(bad):
        row = int(bad[0])
        source = data.non_tensor_batch.get("data_source", [None] * len(data))[row]
        raise RewardError(f"the reward function {name} returned a score that is not finite in row {row} ({source!r}).")
    astray = torch.where(mask, 0.0, scores).sum(-1)  # (B,)
    return torch.where(mask, scores, 0.0) + place_scores(astray.tolist(), mask)


def _checked_columns(extra: dict[str, Any], rows: int, name: str) -> dict[str, np.ndarray]:
    for key, values in extra.items():
        if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != rows:
            found = f"{len(values)} values" if hasattr(values, "__len__") else f"a {type(values).__name__}"
            raise RewardError(
                f"the reward function {name} returned {found} under {key!r}; expected one for each of {rows} rows."
            )
    return columns_of([{key: values[row] for key, values in extra.items()} for row in range(rows)])


def check_dataset(config: Any, dataset: Any) -> None:
    """Raise before a run if the configured scorer cannot score `dataset`: to find out at the first sample is late.

    Without a scorer or manager of the user's own, each row needs a `data_source` that has a scorer, and a ground truth.
    Reads `dataset.column(name)` and `dataset.where(index)`; a dataset without them is not checked.

    Raises `ConfigError` if the scorer cannot be loaded, `DataError` naming file and row.
    """
    load_reward_fn(config)
    own = config.custom_reward_function.path or config.reward_manager.source != "register"
    if (
        own
        or config.reward_manager.name not in ("naive", "dapo")
        or not (hasattr(dataset, "column") and hasattr(dataset, "where"))
    ):
        return
    key = dataset.config.reward_fn_key
    for index, (source, rule) in enumerate(zip(dataset.column(key), dataset.column("reward_model"))):
        if source not in SCORERS:
            raise DataError(f"{dataset.where(index)}: column {key!r}: {unknown_source(source)}.")
        if not isinstance(rule, dict) or rule.get("ground_truth") is None:
            raise DataError(
                f"{dataset.where(index)}: column 'reward_model' is {rule!r}; the scorer for {source!r} needs "
                "{'style': ..., 'ground_truth': ...}."
            )
