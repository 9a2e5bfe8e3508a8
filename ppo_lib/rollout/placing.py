"""Which replica serves a sample, where the engine does not care who its neighbours are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Placer:
    """Sends a sample to the replica with the fewest unfinished ones, and its siblings after it.

    Rollouts of one prompt, and the turns of one conversation, share the beginning of what the engine reads; on the same
    replica they find it in the prefix cache. All calls come from one event loop.

    Args:
        replicas: How many there are.
        in_flight: Most samples that one replica has at a time; the rest wait here, in their order.
    """

    def __init__(self, replicas: int, in_flight: int) -> None:
        self.unfinished = [0] * replicas
        self._slots = [asyncio.Semaphore(in_flight) for _ in range(replicas)]
        self._homes: dict[Hashable, int] = {}

    @asynccontextmanager
    async def place(self, conversation: Hashable) -> AsyncIterator[int]:
        """Hold a place on a replica while the body runs.

        Args:
            conversation: Samples with the same one go to the same replica, until none at all is unfinished.
        """
        replica = self._homes.setdefault(conversation, self.unfinished.index(min(self.unfinished)))
        self.unfinished[replica] += 1
        try:
            async with self._slots[replica]:
                yield replica
        finally:
            self.unfinished[replica] -= 1
            if not any(self.unfinished):
                self._homes.clear()
