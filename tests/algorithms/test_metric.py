from __future__ import annotations

from functools import reduce

import pytest
import torch

from ppo_lib.algorithms.metric import Metric
from ppo_lib.errors import ConfigError

VALUES = [3.0, 1.0, 5.0, 2.0]


@pytest.mark.parametrize(("kind", "expected"), [("mean", 11), ("sum", 11), ("max", 5), ("min", 1), ("last", 2)])
def test_each_kind_over_the_parts_of_a_mini_batch(kind, expected):
    parts = [Metric(torch.tensor(value), kind) for value in VALUES]
    whole = reduce(Metric.with_part, parts)
    assert (float(whole.value), whole.reduction) == (expected, kind)


def test_a_plain_number_is_a_contribution_and_loses_its_gradient():
    metric = Metric.of(torch.tensor(2.0, requires_grad=True))
    assert metric.reduction == "mean"
    assert not metric.value.requires_grad
    assert Metric.of(Metric(torch.tensor(2.0, requires_grad=True), "max")).reduction == "max"


@pytest.mark.parametrize("kind", ["max", "min"])
def test_a_part_without_rows_changes_nothing(kind):
    metric = Metric(0.5, kind)
    assert metric.with_part(Metric(0.0, kind).of_nothing()).value == 0.5


def test_a_kind_that_does_not_exist_and_two_kinds_of_one_metric_are_refused():
    with pytest.raises(ConfigError, match="unknown reduction 'median' of a metric: use one of sum, mean"):
        Metric(1.0, "median")
    with pytest.raises(ConfigError, match="declares mean and max"):
        Metric(1.0, "mean").with_part(Metric(1.0, "max"))
