"""How one driver runs many ranks: registered methods, worker groups over Ray or in this process, resource pools.

Importing this package loads neither Ray nor torch; each name loads what it needs on first use. The worker process
depends on that: it sets its thread counts before anything imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lib.single_controller.colocate import ColocatedWorkers, RayClassWithInitArgs, create_colocated_worker_cls
    from ppo_lib.single_controller.decorator import Dispatch, Execute, register
    from ppo_lib.single_controller.dispatch import (
        DispatchContext,
        DispatchMode,
        make_nd_compute_dataproto_dispatch_fn,
        register_dispatch_mode,
    )
    from ppo_lib.single_controller.future import DataProtoFuture
    from ppo_lib.single_controller.local_group import LocalWorkerGroup
    from ppo_lib.single_controller.pool_parts import merge_resource_pool, split_resource_pool
    from ppo_lib.single_controller.ray_group import RayWorkerGroup
    from ppo_lib.single_controller.ray_runtime import available_cores, ensure_ray
    from ppo_lib.single_controller.resource_pool import RayResourcePool, ResourcePoolManager
    from ppo_lib.single_controller.role import Role
    from ppo_lib.single_controller.worker import Worker
    from ppo_lib.single_controller.worker_group import WorkerGroup

_HOME = {
    "ColocatedWorkers": "colocate",
    "DataProtoFuture": "future",
    "Dispatch": "decorator",
    "DispatchContext": "dispatch",
    "DispatchMode": "dispatch",
    "Execute": "decorator",
    "LocalWorkerGroup": "local_group",
    "RayClassWithInitArgs": "colocate",
    "RayResourcePool": "resource_pool",
    "RayWorkerGroup": "ray_group",
    "ResourcePoolManager": "resource_pool",
    "Role": "role",
    "Worker": "worker",
    "WorkerGroup": "worker_group",
    "available_cores": "ray_runtime",
    "create_colocated_worker_cls": "colocate",
    "ensure_ray": "ray_runtime",
    "make_nd_compute_dataproto_dispatch_fn": "dispatch",
    "merge_resource_pool": "pool_parts",
    "register": "decorator",
    "register_dispatch_mode": "dispatch",
    "split_resource_pool": "pool_parts",
}

__all__ = [
    "ColocatedWorkers",
    "DataProtoFuture",
    "Dispatch",
    "DispatchContext",
    "DispatchMode",
    "Execute",
    "LocalWorkerGroup",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "Role",
    "Worker",
    "WorkerGroup",
    "available_cores",
    "create_colocated_worker_cls",
    "ensure_ray",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
