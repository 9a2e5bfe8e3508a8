"""A metric is reduced as whoever reports it declares."""

from __future__ import annotations

import pytest

from ppo_lib.workers.metrics import StepMetrics


def test_a_metric_whose_name_contains_min_is_reduced_as_declared() -> None:
    metrics = StepMetrics()
    for step in (3.0, 1.0, 2.0):
        metrics.add("mean", {"minimum_distance": step, "domain/min": step})
        metrics.add("sum", {"max_of_nothing": step})
        metrics.add("max", {"min_ratio": step})
        metrics.add("min", {"max_ratio": step})
        metrics.add("last", {"sum": step})
    assert metrics.reduce("actor") == {
        "actor/minimum_distance": 2.0,
        "actor/domain/min": 2.0,
        "actor/max_of_nothing": 6.0,
        "actor/min_ratio": 3.0,
        "actor/max_ratio": 1.0,
        "actor/sum": 2.0,
    }


def test_a_metric_has_one_reduction() -> None:
    metrics = StepMetrics()
    metrics.add("mean", {"lr": 1.0})
    with pytest.raises(ValueError, match="'lr' is a mean over the steps; it cannot be a sum too"):
        metrics.add("sum", {"lr": 1.0})
