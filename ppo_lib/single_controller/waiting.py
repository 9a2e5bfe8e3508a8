"""Waiting for one answer per rank, such that a lost, failing or silent rank never keeps the driver."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

__all__ = ["Answers", "await_answers"]


@dataclass
class Answers:
    """What came of one call, rank by rank; each rank stands in exactly one of the four."""

    results: dict[int, Any] = field(default_factory=dict)
    raised: dict[int, RayTaskError] = field(default_factory=dict)
    """The method raised: first failure first."""
    lost: dict[int, RayError] = field(default_factory=dict)
    """The process or its node is gone."""
    late: list[int] = field(default_factory=list)
    """No answer yet."""


def await_answers(refs: list[Any], limit_s: float, grace_s: float) -> Answers:
    """Wait until every rank has answered, one is lost, or the time is up.

    Args:
        refs: one object reference per rank.
        limit_s: how long to wait for all.
        grace_s: how long to wait on after the first exception. The others may be stuck in a collective that
            the failing rank left; or its exception is the echo of another rank's death, which Ray reports a bit later.
    """
    answers = Answers()
    pending = {ref: rank for rank, ref in enumerate(refs)}
    deadline = time.monotonic() + limit_s
    while pending and not answers.lost:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            break
        rank = pending.pop(done[0])
        try:
            answers.results[rank] = ray.get(done[0])
        except RayTaskError as err:
            if not answers.raised:
                deadline = min(deadline, time.monotonic() + grace_s)
            answers.raised[rank] = err
        except RayError as err:
            answers.lost[rank] = err
    answers.late = sorted(pending.values())
    return answers
