"""Do a few long jobs in a few threads: numpy and torch let go of the interpreter while they copy."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

_HELPERS = max(1, min(4, os.cpu_count() or 1) - 1)  # beside the thread that calls
_WORTH_IT = 1 << 20  # bytes
_MOMENT = 0.001  # seconds that a helper may take to begin
_helpers: list[threading.Thread] = []

J = TypeVar("J")
R = TypeVar("R")


def side_by_side(
    work: Callable[[J], R], jobs: Sequence[J], sizes: Sequence[int], meanwhile: Callable[[], Any] | None = None
) -> list[R]:
    """`work(job)` for each job, in the calling thread and in others where that pays.

    `sizes`: how many bytes there are to work on in each job. `meanwhile` is called once, by the calling thread, when
    others have begun: it may hold on to the interpreter. What little there is to do beside numpy's and torch's
    work is better done before: it costs many times as much among copies, which leave no cache to the interpreter.
    """
    if sum(sizes) < _WORTH_IT:
        if meanwhile:
            meanwhile()
        return list(map(work, jobs))
    waiting = iter(sorted(range(len(jobs)), key=sizes.__getitem__, reverse=True))  # the large first: all end as one
    done: dict[int, R] = {}
    begun = threading.Event()

    def until_none_waits() -> None:
        begun.set()
        for at in waiting:
            done[at] = work(jobs[at])

    here, allowed = _set_apart()
    helpers = []
    with contextlib.suppress(RuntimeError):  # no new threads while the interpreter shuts down
        helpers = [_pool().submit(until_none_waits) for _ in range(_HELPERS)]
    if meanwhile:
        begun.wait(_MOMENT)
        meanwhile()
    try:  # from here to the end no code that may start threads: they would have to stay on this CPU too
        if here:
            os.sched_setaffinity(0, here)
        until_none_waits()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
    finally:
        if allowed:
            os.sched_setaffinity(0, allowed)  # itself, and not a function of ours: no signal comes between
    return [done[at] for at in range(len(jobs))]


def _set_apart() -> tuple[set[int], set[int]]:
    """Keep the helpers off each other's CPUs and the one of the calling thread: that, and all that it may use.

    Linux wakes a thread on the CPU of the one that woke it, or where it last ran, and looks for a free CPU some
    milliseconds later: when all is done.
    """
    with contextlib.suppress(AttributeError, OSError):  # no such calls on this system, or a CPU that has gone
        allowed = os.sched_getaffinity(0)
        here = {_libc().sched_getcpu()}
        others = sorted(allowed - here)
        for at, helper in enumerate([helper for helper in _helpers if helper.is_alive()]):
            if (own := others[at::_HELPERS]) and helper.native_id:
                os.sched_setaffinity(helper.native_id, own)
        if here <= allowed:
            return here, allowed
    return set(), set()


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HELPERS, "envelope", initializer=lambda: _helpers.append(threading.current_thread()))


def _forget() -> None:
    _pool.cache_clear()
    _helpers.clear()


os.register_at_fork(after_in_child=_forget)  # threads do not survive a fork
