from __future__ import annotations

import pytest

from ppo_lib.trainer.performance import performance_metrics, work_metrics


def work(operations: float, seconds: float, memory: float, peak: float) -> dict[str, float]:
    return {"operations": operations, "seconds": seconds, "memory_gb": memory, "peak": peak}


def test_utilisation_is_of_what_all_ranks_could_do_while_the_slowest_worked() -> None:
    reports = [{"actor": work(30.0, 1.0, 2.0, 10.0)}, {"actor": work(10.0, 4.0, 3.0, 10.0), "ref": work(1, 1, 5.0, 10)}]
    assert work_metrics(reports) == {
        "perf/mfu/actor": pytest.approx(40 / 80),
        "perf/memory_gb/actor": 5.0,
        "perf/mfu/ref": pytest.approx(0.1),
        "perf/memory_gb/ref": 5.0,
    }


def test_without_a_known_peak_or_arithmetic_there_is_no_share() -> None:
    assert work_metrics([{"actor": work(30.0, 1.0, 2.0, 0.0)}]) == {"perf/memory_gb/actor": 2.0}
    assert work_metrics([{"actor": work(0.0, 1.0, 2.0, 9.0)}]) == {"perf/memory_gb/actor": 2.0}


def test_groups_that_cannot_tell_are_left_out() -> None:
    assert performance_metrics([object()]) == {}
