"""How a worker's numbers become the step's metrics: each says itself how it is reduced."""

from __future__ import annotations

from collections import defaultdict

import torch

__all__ = ["StepMetrics", "gpu_memory_metrics"]


def gpu_memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak GPU memory of this rank since its start, in GiB; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / 2**30,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / 2**30,
    }


class StepMetrics:
    """Collects values over the optimizer steps of one call."""

    def __init__(self) -> None:
        self._means: dict[str, list[float]] = defaultdict(list)
        self._sums: dict[str, float] = defaultdict(float)
        self._last: dict[str, float] = {}

    def mean(self, values: dict[str, float]) -> None:
        """Report the mean over optimizer steps."""
        for name, value in values.items():
            self._means[name].append(value)

    def sum(self, values: dict[str, float]) -> None:
        """Report the sum over optimizer steps."""
        for name, value in values.items():
            self._sums[name] += value

    def last(self, values: dict[str, float]) -> None:
        """Report the latest."""
        self._last |= values

    def reduce(self, prefix: str) -> dict[str, float]:
        """The collected metrics, their names under `prefix`."""
        means = {name: sum(values) / len(values) for name, values in self._means.items()}
        return {f"{prefix}/{name}": value for name, value in (means | self._sums | self._last).items()}
