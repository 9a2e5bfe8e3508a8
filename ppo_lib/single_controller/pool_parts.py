"""Parts of a resource pool, and several pools as one: the slots stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

from ppo_lib.errors import ConfigError
from ppo_lib.single_controller.resource_pool import RayResourcePool

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

__all__ = ["PoolOfSlots", "merge_resource_pool", "split_resource_pool"]


class PoolOfSlots(RayResourcePool):
    """Slots of other pools, in an order of its own. Whoever runs in it uses those pools and keeps them reserved.

    Args:
        slots: (pool, rank in it) of each rank; the pools agree on what a slot is.
        name_prefix: names it in messages.
    """

    def __init__(self, slots: Sequence[tuple[RayResourcePool, int]], name_prefix: str) -> None:
        nodes = [pool.node_of(rank) for pool, rank in slots]
        of = [(id(pool), node) for (pool, _), node in zip(slots, nodes)]
        first = slots[0][0]
        sizes = [len(list(run)) for _, run in groupby(of)]
        super().__init__(sizes, first.use_gpu, first.max_colocate_count, name_prefix, first.detached)
        self._slots = list(slots)
        self._pools = list({id(pool): pool for pool, _ in slots}.values())
        for pool in self._pools:
            if _kind(pool) != _kind(first):
                raise ConfigError(
                    f"resource pools {first.name_prefix!r} and {pool.name_prefix!r} have slots of different kinds: "
                    f"(use_gpu, max_colocate_count, detached) is {_kind(first)} and {_kind(pool)}"
                )

    def bundle(self, rank: int) -> tuple[PlacementGroup, int]:
        """As in the pool that the slot belongs to."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"resource pool {self.name_prefix!r} has {self.world_size} ranks")
        pool, there = self._slots[rank]
        return pool.bundle(there)

    def placement_groups(self) -> list[PlacementGroup]:
        """Those of its pools."""
        return [group for pool in self._pools for group in pool.placement_groups()]

    def acquire(self, user: object) -> None:
        """Note `user` in every pool."""
        for pool in self._pools:
            pool.acquire(user)

    def release(self, user: object) -> None:
        """Note that `user` has ended; a pool without users gives its slots back."""
        for pool in self._pools:
            pool.release(user)

    def shutdown(self) -> None:
        """Nothing: the slots belong to the pools."""


def _kind(pool: RayResourcePool) -> tuple[bool, int, bool]:
    return pool.use_gpu, pool.max_colocate_count, pool.detached


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[RayResourcePool]:
    """Cut a pool into parts of consecutive ranks.

    Args:
        resource_pool: of which the parts keep the slots.
        split_size: ranks of every part, or a list with the ranks of each.

    Raises:
        ConfigError: the parts do not make up the pool.
    """
    world = resource_pool.world_size
    if isinstance(split_size, int):
        sizes = [split_size] * (world // split_size) if split_size > 0 else []
    else:
        sizes = list(split_size)
    if any(size < 1 for size in sizes) or sum(sizes) != world:
        raise ConfigError(
            f"resource pool {resource_pool.name_prefix!r} has {world} ranks and cannot be split into {split_size}; "
            f"the parts must be positive and add up to {world}"
        )
    starts = [0, *accumulate(sizes)]
    return [
        PoolOfSlots(
            [(resource_pool, rank) for rank in range(start, start + size)], f"{resource_pool.name_prefix}_part{i}"
        )
        for i, (start, size) in enumerate(zip(starts, sizes))
    ]


def merge_resource_pool(*resource_pools: RayResourcePool) -> RayResourcePool:
    """Several pools as one, the ranks of the first before those of the second and so on.

    Raises:
        ConfigError: fewer than two, or slots of different kinds.
    """
    if len(resource_pools) < 2:
        raise ConfigError("merge_resource_pool needs two resource pools or more")
    slots: list[tuple[Any, int]] = [(pool, rank) for pool in resource_pools for rank in range(pool.world_size)]
    return PoolOfSlots(slots, "_and_".join(pool.name_prefix for pool in resource_pools))
