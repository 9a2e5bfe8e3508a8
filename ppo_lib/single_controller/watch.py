"""Notices between calls that a rank has died: each rank is asked again and again whether it is there.

A rank that works answers when it has finished; until then the question waits in its queue, and fails at once if the
process ends. One question is open for each rank, whatever happens.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Any

import ray
from ray.exceptions import RayError

__all__ = ["watch_ranks"]

INTERVAL_S = 1.0

_watches: dict[threading.Thread, threading.Event] = {}  # those that run, each with what ends it


def watch_ranks(ranks: Any) -> threading.Event:
    """Call `ranks.lost(rank, error)` soon after one of `ranks.actors` has died, once. Setting the event ends the watch.

    The watch keeps neither `ranks` nor the program alive.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(weakref.ref(ranks), stop), name="rank watch", daemon=True)
    _watches[thread] = stop
    thread.start()
    return stop


@atexit.register  # after Ray registered its own end: runs before it
def _end_all() -> None:
    """A question asked while Ray shuts down can wait forever, or start a Ray of its own."""
    for stop in list(_watches.values()):
        stop.set()
    for thread in list(_watches):
        thread.join(timeout=5 * INTERVAL_S)


def _watch(reference: Any, stop: threading.Event) -> None:
    try:
        _ask(reference, stop)
    finally:
        _watches.pop(threading.current_thread(), None)


def _ask(reference: Any, stop: threading.Event) -> None:
    asked: dict[Any, int] = {}
    while not stop.wait(INTERVAL_S):
        ranks = reference()
        if ranks is None or not ray.is_initialized():
            return
        try:
            for rank in sorted(set(range(len(ranks.actors))) - set(asked.values())):
                asked[ranks.actors[rank].ping.remote()] = rank
            for ref in ray.wait(list(asked), num_returns=len(asked), timeout=0)[0]:
                ray.get(ref)
                del asked[ref]
        except RayError as error:
            if ranks.lost(asked.pop(ref), error):
                return
        except Exception:  # Ray was shut down meanwhile
            return
        del ranks
