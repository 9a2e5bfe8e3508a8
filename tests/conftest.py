"""Fixtures that start real things: one Ray for the whole run, and a watch on the processes that tests leave behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

# The models of the tests are tiny: threads would only wait for one another. Before torch is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("untimed", deadline=None)  # a busy machine is no fault
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Ray on this machine, with four CPUs to hand out whatever the machine has. Shared by every test of the run."""
    import ray

    from ppo_lib.single_controller import ensure_ray

    assert ensure_ray({"ray_init": {"address": "local", "num_cpus": 4, "object_store_memory": 1 << 30}})
    yield
    ray.shutdown()


class ProcessWatch:
    """The processes below one process, and whether they end when they should."""

    def busy_workers(self) -> set[int]:
        """Process ids of the Ray workers below this process that hold an actor or a task (idle ones are Ray's pool)."""
        found = set()
        for process in psutil.Process().children(recursive=True):
            try:
                title = " ".join(process.cmdline())
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            if title.startswith("ray::") and not title.startswith("ray::IDLE"):
                found.add(process.pid)
        return found

    def below(self, pid: int) -> dict[int, str]:
        """Process id -> command line of all descendants of a process."""
        return {process.pid: " ".join(process.cmdline()) for process in psutil.Process(pid).children(recursive=True)}

    def survivors(self, pids: set[int], timeout_s: float = 15.0) -> set[int]:
        """Which of the processes are still there (zombies do not count) once all are gone or the time is up."""
        deadline = time.monotonic() + timeout_s
        while (alive := {pid for pid in pids if self._alive(pid)}) and time.monotonic() < deadline:
            time.sleep(0.1)
        return alive

    @staticmethod
    def _alive(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@pytest.fixture
def no_leftovers() -> Iterator[ProcessWatch]:
    """Fails the test if, at its end, a Ray worker is busy that was not so before."""
    watch = ProcessWatch()
    before = watch.busy_workers()
    yield watch
    deadline = time.monotonic() + 10.0
    while (left := watch.busy_workers() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    titles = [" ".join(psutil.Process(pid).cmdline()) for pid in left if psutil.pid_exists(pid)]
    assert not left, f"left running: {titles}"
