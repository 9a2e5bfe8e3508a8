"""A worker group whose ranks are Ray processes."""

from __future__ import annotations

import os
from typing import Any

import ray

from ppo_lib.errors import ConfigError
from ppo_lib.single_controller.colocate import ColocatedWorkers, RayClassWithInitArgs
from ppo_lib.single_controller.dispatch import RankCall
from ppo_lib.single_controller.ranks import RankActors
from ppo_lib.single_controller.resource_pool import RayResourcePool
from ppo_lib.single_controller.worker_group import WorkerGroup, members_of

__all__ = ["RayWorkerGroup"]


class RayWorkerGroup(WorkerGroup):
    """One process per rank of a resource pool.

    When a rank dies or does not answer in time, the call raises `WorkerDiedError` or `WorkerTimeoutError` naming role,
    rank and method, and all ranks are ended: the others would wait for it in a collective. When a method raises, the
    call raises the same exception; the group stays usable if every rank has come back.

    Args:
        resource_pool: where the ranks run; the group holds its slots until `shutdown`.
        ray_cls_with_init: a worker class with its arguments, or several roles from `create_colocated_worker_cls`.
        device_name: "cpu" or "cuda"; must fit the pool.
        timeout_s: the time limit of every call, construction included.
        name_prefix: the role of a single class (default: the class name); a label in front of the roles otherwise.
        num_threads: CPU threads of a rank. None takes OMP_NUM_THREADS where the driver's environment has it, and
            otherwise shares the cores of a node out among its ranks.
        detached: leave the processes (and the slots of the pool, which must be detached too) as they are when this
            driver ends; another one finds them with `from_detached`. Needs a `name_prefix`.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs | ColocatedWorkers,
        device_name: str = "cpu",
        timeout_s: float = 3600.0,
        name_prefix: str | None = None,
        num_threads: int | None = None,
        detached: bool = False,
    ) -> None:
        super().__init__(members_of(ray_cls_with_init, name_prefix), resource_pool.world_size)
        if (device_name == "cuda") != resource_pool.use_gpu:
            has = "has" if resource_pool.use_gpu else "has no"
            raise ConfigError(f"device {device_name!r} on pool {resource_pool.name_prefix!r}, which {has} GPUs")
        if detached and not (resource_pool.detached and name_prefix):
            raise ConfigError("a detached worker group needs a name_prefix, and a RayResourcePool(..., detached=True)")
        label = f"{name_prefix}:{self.role}" if name_prefix and len(self.members) > 1 else self.role
        label = name_prefix if detached and name_prefix else label  # under which another driver looks for it
        threads = num_threads or threads_of_driver()
        self._ranks = RankActors(resource_pool, self.members, label, timeout_s, threads, detached)

    @classmethod
    def from_detached(
        cls, name_prefix: str, ray_cls_with_init: RayClassWithInitArgs | ColocatedWorkers, timeout_s: float = 3600.0
    ) -> RayWorkerGroup:
        """The group that another driver built with `detached=True` and this `name_prefix`, workers as they were left.

        Args:
            name_prefix: as given there.
            ray_cls_with_init: the same worker classes; their arguments are not used.
            timeout_s: the time limit of every call from here.

        Raises:
            ConfigError: no such group runs in this Ray cluster, or it hosts other roles.
        """
        self = cls.__new__(cls)
        members = members_of(ray_cls_with_init, name_prefix)
        WorkerGroup.__init__(self, members, 0)
        self._ranks = RankActors.attach(name_prefix, members, timeout_s)
        self.world_size = len(self._ranks.actors)
        return self

    @property
    def workers(self) -> list[Any]:
        """The Ray actors, in rank order."""
        return self._ranks.actors

    def submit(self, method: str, calls: list[RankCall]) -> list[Any]:
        """Start a call per rank; one object reference each."""
        return self._ranks.submit(self.role, method, calls)

    def gather(self, method: str, handles: list[Any], timeout_s: float | None = None) -> list[Any]:
        """Wait for the ranks' answers; errors as the class says."""
        return self._ranks.gather(self.role, method, handles, timeout_s)

    def all_done(self, handles: list[Any]) -> bool:
        """Whether every rank has answered, or failed."""
        return len(ray.wait(handles, num_returns=len(handles), timeout=0)[0]) == len(handles)

    def shutdown(self) -> None:
        """End the processes, of every role in them; give the slots back if nobody else uses the pool."""
        self._ranks.shutdown()

    def _view(self, role: str) -> RayWorkerGroup:
        view = RayWorkerGroup.__new__(RayWorkerGroup)
        WorkerGroup.__init__(view, {role: self.members[role]}, self.world_size)
        view._ranks = self._ranks
        return view


def threads_of_driver() -> int | None:
    """OMP_NUM_THREADS as the user set it. Inside a Ray task it is Ray's own, which follows the task's `num_cpus`."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    in_ray_task = ray.get_runtime_context().worker.mode != ray.SCRIPT_MODE
    return int(given) if given.isdigit() and not in_ray_task else None
