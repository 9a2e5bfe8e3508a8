"""The base class of everything that runs on a rank."""

from __future__ import annotations

import os
from typing import Any

from ppo_lib.errors import ConfigError

__all__ = ["Worker"]


class Worker:
    """A worker knows its place before its own `__init__` runs; a subclass need not call `super().__init__()`.

    The place comes from the environment that the group sets (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`,
    `MASTER_ADDR`, `MASTER_PORT`). Outside a group, a worker is rank 0 of 1. Process groups are the subclass's affair:
    `torch.distributed.init_process_group` finds everything it needs in the same environment.

    A rank with a GPU sees that GPU alone, as `cuda:0`, whatever its local rank.

    Once all are built, `fused_worker_dict` holds the workers of this process by role: a worker may call the others
    where it stands.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    fused_worker_dict: dict[str, Any]
    _meshes: dict[str, tuple[int, bool]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        """Read the place of this process."""
        self = super().__new__(cls)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._meshes = {}
        return self

    def _register_dispatch_collect_info(self, mesh_name: str, dp_rank: int, is_collect: bool) -> None:
        """Tell which share of the rows this rank works on in methods dispatched over `mesh_name`.

        Args:
            mesh_name: as given to `make_nd_compute_dataproto_dispatch_fn`.
            dp_rank: this rank's data-parallel rank; ranks that share one get the same rows.
            is_collect: whether this rank's answer is the one of its data-parallel rank.
        """
        self._meshes[mesh_name] = (dp_rank, is_collect)

    def _query_dispatch_info(self, mesh_name: str) -> tuple[int, bool]:
        """What this rank has told; asked by the group at the first call."""
        if mesh_name not in self._meshes:
            raise ConfigError(
                f"{type(self).__name__} has not told its place in mesh {mesh_name!r}: call "
                f"_register_dispatch_collect_info({mesh_name!r}, dp_rank, is_collect) before the first call"
            )
        return self._meshes[mesh_name]
