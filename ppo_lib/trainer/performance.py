"""What the ranks did in a step as metrics: `perf/mfu/...` and `perf/memory_gb/...`, one per kind of pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

__all__ = ["performance_metrics", "work_metrics"]


def performance_metrics(groups: Iterable[Any]) -> dict[str, float]:
    """Ask each worker group what its ranks did since it was last asked; groups that cannot tell are left out."""
    reports: list[dict[str, dict[str, float]]] = []
    for group in groups:
        ask = getattr(group, "performance", None)
        if ask is not None:
            reports += ask()
    return work_metrics(reports)


def work_metrics(reports: Iterable[dict[str, dict[str, float]]]) -> dict[str, float]:
    """`perf/mfu/{pass}`, the share of what all ranks could have computed meanwhile, and `perf/memory_gb/{pass}`, the
    memory of all ranks together at its end.

    A pass takes as long as its slowest rank. Where the arithmetic or a device's peak is not known there is no share.

    Args:
        reports: of every rank, see `ppo_lib.workers.performance.Meter.report`.
    """
    by_pass: dict[str, list[dict[str, float]]] = defaultdict(list)
    for report in reports:
        for name, work in report.items():
            by_pass[name].append(work)
    metrics = {}
    for name, works in by_pass.items():
        metrics[f"perf/memory_gb/{name}"] = sum(work["memory_gb"] for work in works)
        possible = max(work["seconds"] for work in works) * sum(work["peak"] for work in works)
        operations = sum(work["operations"] for work in works)
        if operations and all(work["peak"] for work in works):
            metrics[f"perf/mfu/{name}"] = operations / possible
    return metrics
