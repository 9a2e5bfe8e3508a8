from __future__ import annotations

import itertools
from dataclasses import dataclass

from ppo_lib.rollout.engine import Cohort
from ppo_lib.rollout.scheduler import Scheduler


@dataclass(frozen=True)
class Request:
    request_id: str
    order: tuple[int, int] = (0, 0)
    cohort: Cohort | None = None


def _ids(requests):
    return [request.request_id for request in requests]


def _cohort(name: str, size: int) -> list[Request]:
    return [Request(f"{name}{i}", (i // 2, i % 2), Cohort(name, size)) for i in range(size)]


def test_a_cohort_joins_complete_and_in_its_own_order_whatever_order_it_came_in():
    for arrival in itertools.permutations(_cohort("a", 4)):
        scheduler = Scheduler(max_rows=8)
        for request in arrival[:-1]:
            assert scheduler.add(request)
            assert scheduler.join([]) == []
        scheduler.add(arrival[-1])
        assert _ids(scheduler.join([])) == ["a0", "a1", "a2", "a3"]
        assert len(scheduler) == 0


def test_places_are_refilled_once_an_eighth_is_free():
    scheduler = Scheduler(max_rows=16)
    requests = _cohort("a", 24)
    for request in requests:
        scheduler.add(request)
    running = scheduler.join([])
    assert len(running) == 16
    assert scheduler.join(running[1:]) == []
    assert _ids(scheduler.join(running[2:])) == ["a16", "a17"]


def test_cohorts_run_one_after_another():
    scheduler = Scheduler(max_rows=8)
    first, second = _cohort("a", 2), _cohort("b", 2)
    for request in [*second[:1], *first, *second[1:]]:
        scheduler.add(request)
    running = scheduler.join([])
    assert _ids(running) == ["b0", "b1"]
    assert scheduler.join(running[1:]) == []
    assert _ids(scheduler.join([])) == ["a0", "a1"]


def test_an_incomplete_cohort_holds_no_other_up():
    scheduler = Scheduler(max_rows=8)
    for request in [_cohort("a", 2)[0], *_cohort("b", 2)]:
        scheduler.add(request)
    assert _ids(scheduler.join([])) == ["b0", "b1"]


def test_requests_without_a_cohort_join_beside_one_in_order_of_arrival():
    scheduler = Scheduler(max_rows=3)
    for request in [*_cohort("a", 2), Request("x"), Request("y")]:
        scheduler.add(request)
    assert _ids(scheduler.join([])) == ["x", "y", "a0"]


def test_removing_some_leaves_the_rest_of_the_cohort_to_run():
    scheduler = Scheduler(max_rows=8)
    requests = _cohort("a", 3)
    scheduler.add(requests[0])
    scheduler.add(requests[2])
    assert _ids(scheduler.remove({"a0", "nobody"})) == ["a0"]
    scheduler.add(requests[1])
    assert _ids(scheduler.join([])) == ["a1", "a2"]


def test_removing_all_turns_away_those_still_on_their_way_and_then_forgets():
    scheduler = Scheduler(max_rows=8)
    requests = _cohort("a", 3)
    scheduler.add(requests[0])
    assert _ids(scheduler.remove(None)) == ["a0"]
    assert [scheduler.add(request) for request in requests[1:]] == [False, False]
    assert [scheduler.add(request) for request in requests] == [True, True, True]
    assert len(scheduler.join([])) == 3
