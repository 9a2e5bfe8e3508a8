"""The base class of everything that runs on a rank."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["Worker"]


class Worker:
    """A worker knows its place before its own `__init__` runs; a subclass need not call `super().__init__()`.

    The place comes from the environment that the group sets (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`,
    `MASTER_ADDR`, `MASTER_PORT`). Outside a group, a worker is rank 0 of 1. Process groups are the subclass's affair:
    `torch.distributed.init_process_group` finds everything it needs in the same environment.

    A rank with a GPU sees that GPU alone, as `cuda:0`, whatever its local rank.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        """Read the place of this process."""
        self = super().__new__(cls)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return self
