"""Work on the tensors of an envelope in a few threads: numpy and torch let go of the interpreter while they copy."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_HELPERS = max(1, min(4, os.cpu_count() or 1) - 1)  # beside the thread that calls
_WORTH_IT = 1 << 17  # entries

V = TypeVar("V")
R = TypeVar("R")


def side_by_side(work: Callable[[str, V], R], items: Mapping[str, V], entries: Callable[[V], int]) -> dict[str, R]:
    """`work(key, value)` on each item, in the calling thread and in others where that pays.

    `entries`: how many numbers there are to work on in a value.
    """
    sizes = {key: entries(value) for key, value in items.items()}
    if sum(sizes.values()) < _WORTH_IT:
        return {key: work(key, value) for key, value in items.items()}
    waiting = iter(sorted(sizes, key=sizes.__getitem__, reverse=True))  # the large first: all end at about one time
    done: dict[str, R] = {}

    def until_none_waits() -> None:
        for key in waiting:
            done[key] = work(key, items[key])

    helpers = []
    with contextlib.suppress(RuntimeError):  # no new threads while the interpreter shuts down
        helpers = [_pool().submit(until_none_waits) for _ in range(_HELPERS)]
    until_none_waits()
    for helper in helpers:
        if not helper.cancel():
            helper.result()
    return {key: done[key] for key in items}


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_HELPERS, thread_name_prefix="envelope")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
