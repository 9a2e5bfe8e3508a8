"""Ranks that die, hang or raise, in real processes: each becomes a named error soon, and leaves nothing running."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from ray import cloudpickle

from ppo_lib.errors import WorkerDiedError, WorkerTimeoutError
from ppo_lib.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


class Fragile(Worker):
    def __init__(self, how: str = "") -> None:
        if how == "raise":
            raise FileNotFoundError("no model there")
        if how == "exit":
            os._exit(1)

    @register()
    def pid(self) -> int:
        return os.getpid()

    @register(blocking=False)
    def wait_later(self) -> None:
        threading.Event().wait()

    @register(Dispatch.RANK_ZERO)
    def raise_unpicklable(self) -> None:
        raise Unpicklable("odd")


class Collective(Fragile):
    def __init__(self) -> None:
        dist.init_process_group("gloo")

    @register()
    def reduce_except_on(self, rank: int, how: str) -> None:
        if self.rank == rank and how == "raise":
            raise ValueError(f"rank {rank} does not like this")
        if self.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))


@pytest.fixture
def build(ray_cluster, no_leftovers):
    groups = []

    def new(worker_cls: type[Worker], ranks: int, **kwargs) -> RayWorkerGroup:
        pool = RayResourcePool([ranks], name_prefix="fragile")
        groups.append(RayWorkerGroup(pool, RayClassWithInitArgs(worker_cls, **kwargs), "cpu", 60.0, "actor"))
        return groups[-1]

    yield new
    for group in groups:
        group.shutdown()


def test_a_rank_killed_while_another_waits_for_it_in_a_collective(build, no_leftovers):
    group = build(Collective, 2)
    pids = set(group.pid())
    started = time.monotonic()
    with pytest.raises(WorkerDiedError, match=r"actor rank 1 \(pid \d+ on .*\) died during reduce_except_on: its pro"):
        group.reduce_except_on(1, "die")
    assert time.monotonic() - started < 15
    assert no_leftovers.survivors(pids) == set()
    with pytest.raises(WorkerDiedError, match=r"actor.pid: .* because actor.reduce_except_on failed earlier: Work"):
        group.pid()


def test_a_rank_that_raises_while_another_waits_for_it_in_a_collective(build, no_leftovers):
    group = build(Collective, 2)
    pids = set(group.pid())
    started = time.monotonic()
    with pytest.raises(ValueError, match="rank 0 does not like this") as caught:
        group.reduce_except_on(0, "raise")
    assert time.monotonic() - started < 15
    notes = "\n".join(caught.value.__notes__)
    assert "raised by actor rank 0" in notes
    assert "no answer from rank 1 (at " in notes
    assert "in reduce_except_on" in notes  # where rank 1 was stuck
    assert no_leftovers.survivors(pids) == set()
    with pytest.raises(WorkerDiedError, match="rank 0 does not like this"):
        group.pid()


def test_a_rank_that_hangs(build, no_leftovers):
    group = build(Fragile, 1)
    pids = set(group.pid())
    future = group.wait_later()
    assert not future.done()
    started = time.monotonic()
    with pytest.raises(
        WorkerTimeoutError,
        match=r"actor.wait_later did not finish within 0.5 s: no answer from rank 0 \(at threading.py:.* in wait <",
    ):
        future.get(timeout_s=0.5)
    assert time.monotonic() - started < 10
    assert no_leftovers.survivors(pids) == set()
    with pytest.raises(WorkerDiedError, match="did not finish within"):
        future.get()


def test_an_exception_that_cannot_be_pickled_arrives_and_a_rank_killed_while_idle_is_noticed(build, no_leftovers):
    group = build(Fragile, 1)
    with pytest.raises(Exception, match="odd") as caught:
        group.raise_unpicklable()
    assert any("raised by actor rank 0" in note for note in caught.value.__notes__)
    pid = group.pid()[0]
    os.kill(pid, signal.SIGKILL)
    assert no_leftovers.survivors({pid}) == set()
    with pytest.raises(WorkerDiedError, match=r"actor rank 0 .* died (during pid|between calls)"):
        group.pid()


def test_a_rank_that_dies_between_calls_ends_the_group_within_seconds(build, no_leftovers, caplog):
    group = build(Fragile, 2)
    pids = group.pid()
    os.kill(pids[0], signal.SIGKILL)
    assert no_leftovers.survivors(set(pids)) == set()  # nobody called, and rank 1 has gone too
    (line,) = [record.getMessage() for record in caplog.records if "between calls" in record.getMessage()]
    assert line.startswith(f"actor rank 0 (pid {pids[0]} on ")
    with pytest.raises(WorkerDiedError, match=r"actor.pid: .* because actor rank 0 .* died between calls: its process"):
        group.pid()


def test_a_rank_that_dies_during_a_call_is_told_by_that_call(build):
    group = build(Fragile, 1)
    (pid,) = group.pid()
    threading.Timer(2.5, os.kill, (pid, signal.SIGKILL)).start()  # the watch has looked twice by then
    with pytest.raises(WorkerDiedError, match=r"actor rank 0 .* died during wait_later"):
        group.wait_later().get()


def test_a_constructor_that_raises_is_the_error_itself_and_leaves_nothing(build):
    with pytest.raises(FileNotFoundError, match="no model there") as caught:
        build(Fragile, 1, how="raise")
    assert caught.value.__notes__[0].startswith("raised by actor rank 0")
    assert caught.value.__notes__[0].endswith("in __init__")


def test_a_constructor_that_ends_its_process(build):
    with pytest.raises(WorkerDiedError, match=r"actor rank 0 .* died during __init__"):
        build(Fragile, 1, how="exit")
