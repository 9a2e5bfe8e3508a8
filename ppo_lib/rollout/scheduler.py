"""Which waiting request joins the running rows, decided from the requests alone and never from the clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from ppo_lib.rollout.engine import Cohort


class Waiting(Protocol):
    """What the scheduler needs to know of a request."""

    @property
    def request_id(self) -> str: ...  # noqa: D102
    @property
    def order(self) -> tuple[int, int]: ...  # noqa: D102
    @property
    def cohort(self) -> Cohort | None: ...  # noqa: D102


T = TypeVar("T", bound=Waiting)


@dataclass
class _Gathering(Generic[T]):
    """The requests of one cohort that have arrived and not joined."""

    size: int
    arrived: int = 0
    members: list[T] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.arrived >= self.size


class Scheduler(Generic[T]):
    """Holds requests until they may run.

    Requests of a cohort wait until all of it has arrived and then join in their stated order; cohorts run one after
    another. Requests without one join in order of arrival.

    Rows join in batches: once an eighth of the places is free (or nothing runs), so that a prefill is not paid for
    every single row that leaves.

    Args:
        max_rows: Most rows that run at a time.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self._least_free = max(1, max_rows // 8)
        self._free: deque[T] = deque()
        self._cohorts: dict[str, _Gathering[T]] = {}
        self._active: str | None = None
        self._called_off: dict[str, int] = {}  # cohort -> how many of its requests are still on their way

    def __len__(self) -> int:
        return len(self._free) + sum(len(gathering.members) for gathering in self._cohorts.values())

    def add(self, request: T) -> bool:
        """Take in a request; False if its cohort was called off before it came."""
        if request.cohort is None:
            self._free.append(request)
            return True
        if request.cohort.id in self._called_off:
            self._called_off[request.cohort.id] -= 1
            if self._called_off[request.cohort.id] == 0:
                del self._called_off[request.cohort.id]
            return False
        gathering = self._cohorts.setdefault(request.cohort.id, _Gathering(request.cohort.size))
        gathering.members.append(request)
        gathering.arrived += 1
        return True

    def remove(self, request_ids: Collection[str] | None) -> list[T]:
        """Take out waiting requests (None: all of them, and those of their cohorts that are still to come)."""
        taken = [request for request in self._iter() if request_ids is None or request.request_id in request_ids]
        gone = {id(request) for request in taken}
        self._free = deque(request for request in self._free if id(request) not in gone)
        for gathering in self._cohorts.values():
            gathering.members = [request for request in gathering.members if id(request) not in gone]
        if request_ids is None:
            for name, gathering in self._cohorts.items():
                if not gathering.complete:
                    self._called_off[name] = gathering.size - gathering.arrived
            self._cohorts.clear()
            self._active = None
        return taken

    def join(self, running: Collection[T]) -> list[T]:
        """The requests that join now, in order; they leave the scheduler.

        Args:
            running: The requests that run already.
        """
        places = self.max_rows - len(running)
        if running and places < self._least_free:
            return []
        joining: list[T] = []
        while self._free and len(joining) < places:
            joining.append(self._free.popleft())
        queue = self._next_cohort(running)
        if queue is not None:
            count = places - len(joining)
            queue.members.sort(key=lambda request: request.order)
            joining += queue.members[:count]
            del queue.members[:count]
        return joining

    def _next_cohort(self, running: Collection[T]) -> _Gathering[T] | None:
        """The cohort whose turn it is, once it is complete and the one before it has left."""
        if self._active is not None:
            active = self._cohorts[self._active]
            if active.members or any(request.cohort and request.cohort.id == self._active for request in running):
                return active
            del self._cohorts[self._active]
            self._active = None
        self._active = next((name for name, gathering in self._cohorts.items() if gathering.complete), None)
        return None if self._active is None else self._cohorts[self._active]

    def _iter(self) -> Iterator[T]:
        yield from self._free
        for gathering in self._cohorts.values():
            yield from gathering.members
