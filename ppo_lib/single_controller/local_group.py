"""A worker group in this process: for notebooks, debuggers and fast tests. Needs no Ray."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ppo_lib.errors import ConfigError, WorkerDiedError
from ppo_lib.single_controller.colocate import ColocatedWorkers, RayClassWithInitArgs
from ppo_lib.single_controller.dispatch import RankCall
from ppo_lib.single_controller.faults import add_note
from ppo_lib.single_controller.host import free_port
from ppo_lib.single_controller.worker_group import WorkerGroup, members_of

__all__ = ["LocalWorkerGroup"]

logger = logging.getLogger(__name__)


class LocalWorkerGroup(WorkerGroup):
    """The interface of `RayWorkerGroup` at world size 1, every call an ordinary call in this thread.

    Arguments are not copied, but a batch that is split reaches the worker as an envelope of its own over the same
    tensors. A call registered with `blocking=False` has finished when it returns.

    Args:
        resource_pool: None, or a pool of one rank (it is not reserved).
        ray_cls_with_init: a worker class with its arguments, or several roles from `create_colocated_worker_cls`.
        device_name: "cpu" or "cuda".
        timeout_s: a call that takes longer is reported in the log, not interrupted: it may stand in a debugger.
        name_prefix: the role of a single class (default: the class name).
        num_threads: CPU threads of this process; None leaves them as they are.
    """

    def __init__(
        self,
        resource_pool: Any,
        ray_cls_with_init: RayClassWithInitArgs | ColocatedWorkers,
        device_name: str = "cpu",
        timeout_s: float = 3600.0,
        name_prefix: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        super().__init__(members_of(ray_cls_with_init, name_prefix), 1)
        ranks = 1 if resource_pool is None else resource_pool.world_size
        if ranks != 1:
            raise ConfigError(
                f"LocalWorkerGroup runs one rank in this process, the resource pool has {ranks}: set "
                f"trainer.n_gpus_per_node=1 and trainer.nnodes=1, or trainer.worker_group=ray"
            )
        if device_name == "cuda" and not torch.cuda.is_available():
            raise ConfigError("device 'cuda' was asked for and torch sees no GPU: set trainer.device=cpu")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._timeout_s = timeout_s
        self._environment = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self._built: dict[str, Any] = {}
        for role, member in self.members.items():
            with self._running(role, "__init__"):
                self._built[role] = member.build()
        for worker in self._built.values():
            worker.fused_worker_dict = self._built

    @property
    def workers(self) -> list[Any]:
        """The worker itself; of a group that holds several roles, each of them."""
        return [self._built[role] for role in self.members if role in self._built]

    def submit(self, method: str, calls: list[RankCall]) -> list[Any]:
        """Make the call. The handle is its result."""
        if self.role not in self._built:
            raise WorkerDiedError(f"{self.role}.{method}: this group was shut down")
        with self._running(self.role, method):
            return [getattr(self._built[self.role], method)(*call.args, **call.kwargs) for call in calls]

    def gather(self, method: str, handles: list[Any], timeout_s: float | None = None) -> list[Any]:
        """The results, which are here already."""
        return handles

    def all_done(self, handles: list[Any]) -> bool:
        """Always: `submit` returns when the call has finished."""
        return True

    def shutdown(self) -> None:
        """Drop the workers, of every role."""
        self._built.clear()

    def _view(self, role: str) -> LocalWorkerGroup:
        view = LocalWorkerGroup.__new__(LocalWorkerGroup)
        WorkerGroup.__init__(view, {role: self.members[role]}, 1)
        view._timeout_s, view._environment, view._built = self._timeout_s, self._environment, self._built
        return view

    @contextmanager
    def _running(self, role: str, method: str) -> Iterator[None]:
        """The environment of rank 0 while the worker runs, a note on what it raises, a line if it takes long."""
        before = {name: os.environ.get(name) for name in self._environment}
        message = "%s.%s has been running for more than %g s; it runs in this process and is not interrupted"
        watch = threading.Timer(self._timeout_s, logger.warning, (message, role, method, self._timeout_s))
        watch.daemon = True
        watch.start()
        os.environ.update(self._environment)
        try:
            yield
        except Exception as error:
            add_note(error, f"raised by {role} rank 0 in {method}")
            raise
        finally:
            watch.cancel()
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
