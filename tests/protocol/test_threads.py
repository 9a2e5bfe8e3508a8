"""Jobs are done once each, in threads that keep out of each other's way, and nothing of that is left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from protocol import threads
from protocol.threads import side_by_side

LARGE = 1 << 22  # bytes: enough for threads
ON_LINUX = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no choice of CPUs on this system")


def summed(array: np.ndarray) -> int:
    return int(array.sum())


@pytest.mark.parametrize("size", [1, LARGE])
def test_every_job_is_done_and_results_stand_in_the_order_of_the_jobs(size):
    jobs = [np.full(1000, number) for number in range(20)]
    sizes = [size * (1 + number % 3) for number in range(20)]
    assert side_by_side(summed, jobs, sizes) == [1000 * number for number in range(20)]


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("size", [1, LARGE])
def test_what_is_to_be_done_meanwhile_is_done_once_by_the_calling_thread(size, count):
    seen = []
    found = side_by_side(lambda job: job, range(count), [size] * count, lambda: seen.append(threading.get_ident()))
    assert found == list(range(count))
    assert seen == [threading.get_ident()]


@ON_LINUX
def test_threads_at_work_have_cpus_of_their_own_and_the_calling_one_gets_its_back():
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one CPU")
    met = threading.Barrier(2, timeout=30)

    def where(_: int) -> tuple[int, set[int]]:
        met.wait()  # so that two threads have one each
        return threading.get_ident(), os.sched_getaffinity(0)

    for _ in range(3):
        side_by_side(summed, [np.ones(10)] * 2, [LARGE] * 2)  # the helpers are there
        (one, ours), (other, theirs) = side_by_side(where, range(2), [LARGE] * 2)
        assert one != other
        assert not ours & theirs
        assert os.sched_getaffinity(0) == before


@ON_LINUX
@pytest.mark.parametrize("fails", [lambda: "the calling thread", lambda: "a helper"])
def test_an_error_of_any_thread_comes_out_and_the_cpus_are_given_back(fails):
    before = os.sched_getaffinity(0)
    caller, met = threading.get_ident(), threading.Barrier(2, timeout=30)

    def work(_: int) -> None:
        met.wait()
        if (threading.get_ident() == caller) == (fails() == "the calling thread"):
            raise IndexError(fails())

    with pytest.raises(IndexError, match=fails()):
        side_by_side(work, range(2), [LARGE] * 2)
    assert os.sched_getaffinity(0) == before


@ON_LINUX
def test_an_interrupt_while_the_cpus_are_set_leaves_them_as_they_were(monkeypatch):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    before, set_them = os.sched_getaffinity(0), os.sched_setaffinity

    def interrupted(thread: int, cpus: set[int]) -> None:
        set_them(thread, cpus)
        if thread == 0 and len(cpus) == 1:
            raise KeyboardInterrupt  # as a signal that came in the call does when it returns

    monkeypatch.setattr(os, "sched_setaffinity", interrupted)
    with pytest.raises(KeyboardInterrupt):
        side_by_side(summed, [np.ones(9)] * 2, [LARGE] * 2)
    assert os.sched_getaffinity(0) == before


@ON_LINUX
def test_two_that_call_first_at_once_still_have_helpers_on_cpus_of_their_own(monkeypatch):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")

    def slow(*arguments, **options):
        time.sleep(0.05)
        return ThreadPoolExecutor(*arguments, **options)

    threads._forget()
    monkeypatch.setattr(threads, "ThreadPoolExecutor", slow)
    callers = [threading.Thread(target=side_by_side, args=(summed, [np.ones(9)] * 2, [LARGE] * 2)) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    gc.collect()  # the pool that came second, and its threads
    side_by_side(summed, [np.ones(9)] * 2, [LARGE] * 2)
    here, allowed = threads._set_apart()
    assert len(here) == 1
    alive = [helper for helper in threads._helpers if helper.is_alive()]
    assert alive
    assert all(not os.sched_getaffinity(helper.native_id) & here for helper in alive)
    assert os.sched_getaffinity(0) == allowed


@ON_LINUX
def test_one_cpu_is_enough():
    code = """
        import os, pickle, torch
        from protocol import DataProto
        cpu = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpu})
        data = DataProto.from_dict({"ids": torch.arange(1 << 20).view(4, -1), "mask": torch.ones(4, 1 << 18).long()})
        for _ in range(3):
            assert torch.equal(pickle.loads(pickle.dumps(data)).batch["ids"], data.batch["ids"])
        assert os.sched_getaffinity(0) == {cpu}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
