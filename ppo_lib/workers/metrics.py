"""How a worker's numbers become the step's metrics: each says itself how it is reduced."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ppo_lib.algorithms.metric import REDUCTIONS, Reduction

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
    """Collects values over the optimizer steps of one call; what becomes of each is declared, not read off its name."""

    def __init__(self) -> None:
        self._collected: dict[str, tuple[Reduction, list[float]]] = {}

    def add(self, reduction: Reduction, values: Mapping[str, float]) -> None:
        """Report each of `values` as this reduction over the steps. A name has one: another raises `ValueError`."""
        for name, value in values.items():
            declared, collected = self._collected.setdefault(name, (reduction, []))
            if declared != reduction:
                raise ValueError(f"metric {name!r} is a {declared} over the steps; it cannot be a {reduction} too")
            collected.append(value)

    def reduce(self, prefix: str | None = None) -> dict[str, float]:
        """The collected metrics, their names under `prefix`."""
        return {
            name if prefix is None else f"{prefix}/{name}": float(REDUCTIONS[reduction](values))
            for name, (reduction, values) in self._collected.items()
        }
