"""How a number becomes a metric of the step: each declares its reduction, and no name is ever looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ppo_lib.errors import ConfigError

Reduction = Literal["sum", "mean", "max", "min", "last"]
REDUCTIONS: dict[Reduction, Callable[[Any], Any]] = {
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


@dataclass(frozen=True)
class Metric:
    """A number, and what becomes of it.

    | reduction | over the micro-batches and ranks of a mini-batch | over optimizer steps |
    |-----------|-------------------------------------------------|----------------------|
    | mean | added: each is a contribution, divided by the mini-batch's denominator | averaged |
    | sum  | added | added |
    | max, min | the largest, the smallest | the largest, the smallest |
    | last | the latest | the latest |

    A policy loss returns its metrics as plain tensors, which are reduced by `mean`, or as these.
    """

    value: Any
    reduction: Reduction

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ConfigError(f"unknown reduction {self.reduction!r} of a metric: use one of {', '.join(REDUCTIONS)}")

    @classmethod
    def of(cls, value: Metric | Tensor | float) -> Metric:
        """A metric as it is, anything else as a `mean`; without its gradient."""
        reduction = value.reduction if isinstance(value, Metric) else "mean"
        value = value.value if isinstance(value, Metric) else value
        return cls(value.detach() if isinstance(value, Tensor) else value, reduction)

    def of_nothing(self) -> Metric:
        """The same metric of a part without rows: what changes no other part."""
        nothing = {"max": -math.inf, "min": math.inf}
        return Metric(nothing[self.reduction], self.reduction) if self.reduction in nothing else self

    def with_part(self, other: Metric) -> Metric:
        """This part of a mini-batch and the next together."""
        if other.reduction != self.reduction:
            raise ConfigError(f"a metric has one reduction, this one declares {self.reduction} and {other.reduction}")
        together = REDUCTIONS["sum" if self.reduction == "mean" else self.reduction]
        return Metric(together([self.value, other.value]), self.reduction)
