"""Calling a scorer, and holding what it returns to what a score is: one finite number, and a dict beside it at most."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from ppo_lib.errors import ConfigError
from ppo_lib.load_object import load_object
from ppo_lib.reward.sample import RewardResult
from ppo_lib.reward.scorers import default_compute_score

ScoreFn = Callable[..., Any]
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
KEY = "reward.custom_reward_function"
FLOAT32_MAX = 3.4028234663852886e38


class ScoreFailure(Exception):
    """Why a scorer gave no score, as text: it crosses processes, and becomes a `RewardError` that names the sample."""


def load_reward_fn(config: Any) -> ScoreFn:
    """The scorer of the section `reward`: `custom_reward_function`, else `default_compute_score`, with `reward_kwargs`.

    It is called with the keywords data_source, solution_str, ground_truth, extra_info; it may be `async`; it returns a
    number, or a dict with `score` in it.

    Raises `ConfigError` if the file or the function is not there, or does not take these arguments.
    """
    custom = config.custom_reward_function
    fn = load_object(custom.path, custom.name, KEY) if custom.path else default_compute_score
    check_signature(fn, dict(custom.reward_kwargs), f"{custom.name} in {custom.path}" if custom.path else "scoring")
    return functools.partial(fn, **custom.reward_kwargs) if custom.reward_kwargs else fn


def check_signature(fn: ScoreFn, kwargs: Mapping[str, Any], what: str) -> None:
    """Raise `ConfigError` if `fn` cannot be called with the four arguments of a scorer and `kwargs`."""
    if not callable(fn):
        raise ConfigError(f"{KEY}: {what} is not a function but a {type(fn).__name__}.")
    try:
        inspect.signature(fn).bind(**dict.fromkeys(ARGUMENTS), **kwargs)
    except (TypeError, ValueError) as error:
        given = f" and reward_kwargs {', '.join(kwargs)}" if kwargs else ""
        raise ConfigError(f"{KEY}: {what} cannot be called with {', '.join(ARGUMENTS)}{given}: {error}.") from error


def is_async(fn: ScoreFn) -> bool:
    """Whether calling `fn` gives a coroutine."""
    inner = fn.func if isinstance(fn, functools.partial) else fn
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def call(fn: ScoreFn, arguments: Mapping[str, Any]) -> RewardResult:
    """Score with a plain function. Raises `ScoreFailure`."""
    try:
        returned = fn(**arguments)
    except (Exception, SystemExit) as error:
        raise ScoreFailure(describe(error)) from error
    return check(returned)


async def call_async(fn: ScoreFn, arguments: Mapping[str, Any]) -> RewardResult:
    """Score with an async function. Raises `ScoreFailure`."""
    try:
        returned = await fn(**arguments)
    except (Exception, SystemExit) as error:
        raise ScoreFailure(describe(error)) from error
    return check(returned)


def check(returned: Any) -> RewardResult:
    """A finite number, or a dict with one under `score`, as a `RewardResult`; else raises `ScoreFailure`."""
    extra: dict[str, Any] = {}
    score = returned
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise ScoreFailure(
                f"the scorer returned a dict without 'score'; it has {', '.join(map(str, returned)) or 'nothing'}"
            )
        score = returned["score"]
        extra = {str(key): value for key, value in returned.items() if key != "score"}
    if getattr(score, "ndim", None) == 0 and hasattr(score, "item"):  # a numpy or torch scalar
        score = score.item()
    if score is None:
        raise ScoreFailure("the scorer returned None; expected a number or a dict with 'score'")
    if not isinstance(score, numbers.Real):
        raise ScoreFailure(f"the scorer returned a {type(score).__name__}; expected a number or a dict with 'score'")
    if not math.isfinite(score) or abs(float(score)) > FLOAT32_MAX:
        raise ScoreFailure(f"the scorer returned {float(score)}; expected a finite number that float32 can hold")
    return RewardResult(float(score), extra)


def describe(error: BaseException) -> str:
    """Type and message of an exception, and the line of code it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"
