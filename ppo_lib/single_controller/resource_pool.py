"""Slots for ranks: Ray placement groups, checked against the cluster before anything waits for them."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from ppo_lib.errors import ConfigError, WorkerTimeoutError
from ppo_lib.single_controller.role import Role

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

__all__ = ["RayResourcePool", "ResourcePoolManager"]

READY_TIMEOUT_S = 60.0
"""How long a placement group may take once the cluster is known to be large enough: others may be giving slots back."""


class RayResourcePool:
    """`sum(process_on_nodes)` slots, `process_on_nodes[i]` of them together on one node.

    A slot is a bundle of one CPU (and one GPU). It is shared by up to `max_colocate_count` processes, each of which
    takes `cpu_share` and `gpu_share`: the training rank, and for instance the rollout replica on the same device.

    Args:
        process_on_nodes: ranks per node.
        use_gpu: whether a slot holds a GPU.
        max_colocate_count: processes that share a slot.
        name_prefix: names the pool in messages and in Ray's listings.
        detached: keep the slots when this driver ends, for detached worker groups.
    """

    def __init__(
        self,
        process_on_nodes: list[int],
        use_gpu: bool = False,
        max_colocate_count: int = 2,
        name_prefix: str = "pool",
        detached: bool = False,
    ) -> None:
        if not process_on_nodes or any(not isinstance(n, int) or n < 1 for n in process_on_nodes):
            raise ConfigError(f"resource pool {name_prefix!r}: ranks per node must be positive, got {process_on_nodes}")
        if max_colocate_count < 1:
            raise ConfigError(f"resource pool {name_prefix!r}: max_colocate_count is {max_colocate_count}, not >= 1")
        self.process_on_nodes = list(process_on_nodes)
        self.use_gpu = use_gpu
        self.max_colocate_count = max_colocate_count
        self.name_prefix = name_prefix
        self.detached = detached
        self._groups: list[PlacementGroup] = []
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def world_size(self) -> int:
        """How many ranks the pool holds."""
        return sum(self.process_on_nodes)

    @property
    def cpu_share(self) -> float:
        """The `num_cpus` of each process in a slot."""
        return 1 / self.max_colocate_count

    @property
    def gpu_share(self) -> float:
        """The `num_gpus` of each process in a slot."""
        return 1 / self.max_colocate_count if self.use_gpu else 0.0

    def bundle(self, rank: int) -> tuple[PlacementGroup, int]:
        """The placement group and the bundle in it where `rank` runs. Reserves the pool on first use.

        Raises:
            ConfigError: the cluster is too small.
            WorkerTimeoutError: the cluster is large enough but its slots stay taken.
        """
        node = self.node_of(rank)
        return self.placement_groups()[node], rank - sum(self.process_on_nodes[:node])

    def node_of(self, rank: int) -> int:
        """Which entry of `process_on_nodes` a rank belongs to.

        Raises:
            ConfigError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"resource pool {self.name_prefix!r} has {self.world_size} ranks")
        return next(i for i, end in enumerate(accumulate(self.process_on_nodes)) if rank < end)

    def placement_groups(self) -> list[PlacementGroup]:
        """One placement group per node, in the order of the ranks, reserved on first use; errors as `bundle`.

        Of nodes with as many ranks, the one with the lower address comes first, so that a rank finds itself on the
        same node in every run on the same machines.
        """
        if not self._groups:
            check_cluster([self])
            self._groups = in_order_of_nodes(self._reserve(), self.process_on_nodes)
        return self._groups

    def _reserve(self) -> list[PlacementGroup]:
        from ray.util.placement_group import placement_group

        slot = {"CPU": 1.0, "GPU": 1.0} if self.use_gpu else {"CPU": 1.0}
        run = uuid4().hex[:8]  # Ray wants the names of placement groups to differ, also from one that is on its way out
        kept = "detached" if self.detached else None
        groups = [
            placement_group([dict(slot)] * size, "STRICT_PACK", f"{self.name_prefix}_{run}_{node}", kept)
            for node, size in enumerate(self.process_on_nodes)
        ]
        deadline = time.monotonic() + READY_TIMEOUT_S
        try:
            for group in groups:
                whole_seconds = math.ceil(deadline - time.monotonic())  # Ray cuts off what is behind the point
                if not group.wait(max(1, whole_seconds)):
                    raise WorkerTimeoutError(
                        f"resource pool {self.name_prefix!r}: {self._wanted()} were not free within "
                        f"{READY_TIMEOUT_S:g} s ({_free_and_total()}). Something else holds them: "
                        f"an earlier trainer that was not shut down, or another job"
                    )
        except BaseException:
            remove_groups(groups)
            raise
        if not self.detached:
            self._finalizer = weakref.finalize(self, remove_groups, list(groups))
            self._finalizer.atexit = False  # Ray gives a driver's slots back when the driver leaves
        return groups

    def _wanted(self) -> str:
        kind = "CPU and one GPU" if self.use_gpu else "CPU"
        return f"{self.process_on_nodes} slots per node, each of one {kind},"

    def acquire(self, user: object) -> None:
        """Note that `user` runs in these slots."""
        self._users.add(user)

    def release(self, user: object) -> None:
        """Note that `user` has ended; with the last one the slots are given back."""
        if user in self._users:
            self._users.remove(user)
            if not self._users:
                self.shutdown()

    def shutdown(self) -> None:
        """Give the slots back. Whatever still runs in them is ended by Ray."""
        if self._groups:
            groups, self._groups = self._groups, []
            if not self.detached:
                self._finalizer.detach()
            remove_groups(groups)


class ResourcePoolManager:
    """The pools of a run, and which role lives in which.

    Args:
        resource_pool_spec: pool name -> ranks per node, such as `{"global_pool": [8, 8]}`.
        mapping: role -> pool name. Roles of one pool share their processes.
        device_name: "cuda" gives every rank a GPU, "cpu" none; None goes by whether the Ray cluster has GPUs.

    Raises:
        ConfigError: a role mapped to a pool that the spec does not have.
    """

    def __init__(
        self, resource_pool_spec: Mapping[str, list[int]], mapping: Mapping[Role, str], device_name: str | None = None
    ) -> None:
        self.resource_pool_spec = {name: list(sizes) for name, sizes in resource_pool_spec.items()}
        self.mapping = dict(mapping)
        self.device_name = device_name
        self.resource_pool_dict: dict[str, RayResourcePool] = {}
        for role, name in self.mapping.items():
            if name not in self.resource_pool_spec:
                raise ConfigError(
                    f"role {role} is mapped to resource pool {name!r}; there are {', '.join(self.resource_pool_spec)}"
                )

    def create_resource_pool(self) -> dict[str, RayResourcePool]:
        """Make the pools, once, and check that the Ray cluster can hold all of them. Nothing is reserved yet.

        Raises:
            ConfigError: the cluster is too small; the message says what is missing and which settings to change.
        """
        if not self.resource_pool_dict:
            use_gpu = self.device_name == "cuda" if self.device_name else _total().get("GPU", 0) > 0
            pools = {
                name: RayResourcePool(sizes, use_gpu=use_gpu, name_prefix=name)
                for name, sizes in self.resource_pool_spec.items()
            }
            check_cluster(list(pools.values()))
            self.resource_pool_dict = pools
        return self.resource_pool_dict

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """The pool of a role.

        Raises:
            ConfigError: the role is mapped to none.
        """
        if role not in self.mapping:
            mapped = ", ".join(map(str, self.mapping))
            raise ConfigError(f"role {role} is mapped to no resource pool; mapped are {mapped}")
        return self.create_resource_pool()[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Ranks in all pools together, whether or not they have GPUs."""
        return sum(sum(sizes) for sizes in self.resource_pool_spec.values())

    def shutdown(self) -> None:
        """Give all slots back."""
        for pool in self.resource_pool_dict.values():
            pool.shutdown()


def in_order_of_nodes(groups: list[PlacementGroup], sizes: list[int]) -> list[PlacementGroup]:
    """Placement groups of the same size exchanged so that they follow the addresses of their nodes."""
    import ray
    from ray.util.placement_group import placement_group_table

    nodes = {node["NodeID"]: (_address_key(node["NodeManagerAddress"]), node["NodeID"]) for node in ray.nodes()}
    at = {group.id: nodes[next(iter(placement_group_table(group)["bundles_to_node_id"].values()))] for group in groups}
    ordered = {size: [g for g, s in zip(groups, sizes) if s == size] for size in set(sizes)}
    for same in ordered.values():
        same.sort(key=lambda group: at[group.id])
    return [ordered[size].pop(0) for size in sizes]


def _address_key(address: str) -> tuple[Any, ...]:
    """Numbers in an address compare as numbers: 10.0.0.9 stands before 10.0.0.10."""
    return tuple(int(part) if part.isdigit() else -1 for part in address.split(".")) + (address,)


def check_cluster(pools: list[RayResourcePool]) -> None:
    """Whether the nodes of the running Ray cluster are large enough, in total and one by one.

    Raises:
        ConfigError: they are not.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for resource in ("CPU", "GPU"):
        asking = [pool for pool in pools if resource == "CPU" or pool.use_gpu]
        ranks = sum(pool.world_size for pool in asking)
        total = sum(node.get(resource, 0) for node in nodes)
        if ranks > total:
            names = ", ".join(repr(pool.name_prefix) for pool in asking)
            raise ConfigError(
                f"resource pools {names} need {ranks} {resource}s, one for each rank; the Ray cluster has {total:g} on "
                f"{len(nodes)} node(s). {_remedy(resource)}"
            )
        largest = max((node.get(resource, 0) for node in nodes), default=0)
        for pool in asking:
            if max(pool.process_on_nodes) > largest:
                raise ConfigError(
                    f"resource pool {pool.name_prefix!r} wants {max(pool.process_on_nodes)} ranks on one node; the "
                    f"largest node of the Ray cluster has {largest:g} {resource}s. {_remedy(resource)}"
                )


def _remedy(resource: str) -> str:
    if resource == "GPU":
        return "Lower trainer.n_gpus_per_node or trainer.nnodes, or set trainer.device=cpu"
    return "Lower trainer.n_gpus_per_node or trainer.nnodes, or raise ray_kwargs.ray_init.num_cpus"


def _total() -> Mapping[str, float]:
    import ray

    return ray.cluster_resources()


def _free_and_total() -> str:
    import ray

    free, total = ray.available_resources(), _total()
    return ", ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s free" for kind in ("CPU", "GPU"))


def remove_groups(groups: list[PlacementGroup]) -> None:
    """Give the slots of placement groups back, where that is still possible."""
    import ray
    from ray.util.placement_group import remove_placement_group

    if ray.is_initialized():
        for group in groups:
            with contextlib.suppress(Exception):  # already removed, or of a cluster that is gone
                remove_placement_group(group)
