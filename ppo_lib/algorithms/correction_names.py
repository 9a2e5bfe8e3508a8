"""What `algorithm.rollout_correction` may say, read into numbers. Imports no torch.

A threshold is one number, or two joined by an underscore: "0.5_2" is from 0.5 to 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from ppo_lib.errors import ConfigError

Level = Literal["token", "seq_sum", "seq_mean", "seq_max"]
Divergence = Literal["k1", "k2", "k3"]

REJECTIONS: tuple[str, ...] = tuple(
    f"{level}_{form}" for level in ("token", "seq_sum", "seq_mean", "seq_max") for form in ("k1", "k2", "k3")
)
"""What `rollout_rs` may list, comma-separated."""


@dataclass(frozen=True)
class Bounds:
    """From `low` (None: no bound) to `high`, both included."""

    low: float | None
    high: float


@dataclass(frozen=True)
class Rejection:
    """One entry of `rollout_rs`.

    `level` says what is rejected: a token for its own value, or a whole response for the sum, the mean or the largest
    of its tokens. For `k1` the bounds are those of the importance ratio, for `k2` and `k3` of the divergence itself.
    """

    level: Level
    form: Divergence
    bounds: Bounds


def importance_bounds(threshold: Any) -> Bounds:
    """`rollout_is_threshold`: a number truncates weights from above; "lo_hi" sets those outside to 0.

    Raises:
        ConfigError: neither of the two, or not above 0, or low not below high.
    """
    key = "algorithm.rollout_correction.rollout_is_threshold"
    numbers = _numbers(threshold, key)
    if len(numbers) == 1:
        return Bounds(None, numbers[0])
    return Bounds(*numbers)


def rejections(names: str | None, threshold: Any) -> tuple[Rejection, ...]:
    """`rollout_rs` with its `rollout_rs_threshold`: one threshold for all entries, or one for each, comma-separated.

    A `k1` threshold bounds the ratio: "lo_hi", or one number h for 1/h to h. A `k2` or `k3` threshold is the largest
    value that is kept.

    Raises:
        ConfigError: an unknown entry, a missing threshold, or one that bounds nothing.
    """
    if names is None:
        return ()
    entries = [entry.strip() for entry in names.split(",")]
    if unknown := [entry for entry in entries if entry not in REJECTIONS]:
        raise ConfigError(
            f"algorithm.rollout_correction.rollout_rs: unknown {unknown[0]!r}; use {', '.join(REJECTIONS)}, "
            "several separated by commas"
        )
    key = "algorithm.rollout_correction.rollout_rs_threshold"
    if threshold is None:
        raise ConfigError(f"{key} is not set, and rollout_rs={names} needs it; 2.0 is usual for k1, 0.1 for k2 and k3")
    given = [part.strip() for part in str(threshold).split(",")]
    if len(given) not in (1, len(entries)):
        raise ConfigError(
            f"{key}={threshold} has {len(given)} values for the {len(entries)} entries of rollout_rs={names}; give one "
            "for all, or one for each"
        )
    given = given * len(entries) if len(given) == 1 else given
    return tuple(_rejection(entry, text, key) for entry, text in zip(entries, given))


def _rejection(entry: str, threshold: str, key: str) -> Rejection:
    level, _, form = entry.rpartition("_")
    numbers = _numbers(threshold, key)
    if form != "k1":
        if len(numbers) != 1:
            raise ConfigError(f"{key}={threshold}: {entry} is never negative and has one bound, the largest that stays")
        return Rejection(level, form, Bounds(None, numbers[0]))  # type: ignore[arg-type]
    if len(numbers) == 1:
        if numbers[0] <= 1:
            raise ConfigError(
                f"{key}={threshold}: one number h for {entry} keeps ratios from 1/h to h, so it must be above 1 "
                "(2.0 is usual); or give both as lo_hi"
            )
        numbers = [1 / numbers[0], numbers[0]]
    return Rejection(level, form, Bounds(*numbers))  # type: ignore[arg-type]


def _numbers(threshold: Any, key: str) -> list[float]:
    try:
        if isinstance(threshold, bool):
            raise ValueError
        numbers = [float(part) for part in (str(threshold).split("_"))]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ConfigError(f"{key}={threshold}: expected a number above 0 such as 2.0, or two as lo_hi such as 0.5_2.0")
    if len(numbers) == 2 and numbers[0] >= numbers[1]:
        raise ConfigError(f"{key}={threshold}: the lower bound {numbers[0]:g} is not below {numbers[1]:g}")
    return numbers
