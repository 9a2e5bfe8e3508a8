"""The process of one rank. It hosts one worker per role, and runs the methods that the driver names.

This module must stay free of torch, and so must everything it imports: `prepare` sets the thread count before the first
import of torch, which happens when the worker classes arrive in `build`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from ppo_lib.single_controller.transport import pack, unpack

__all__ = ["Place", "WorkerHost", "free_port"]


@dataclass(frozen=True)
class Place:
    """Where a rank's process turned out to run."""

    pid: int
    node_id: str
    node_ip: str
    cores: int
    free_port: int
    stack_fd: int
    """The process's descriptor of the file into which it writes its stacks when it is sent SIGUSR1."""
    slots: Any
    """The placement group that it runs in, or None."""
    roles: tuple[str, ...]
    """The workers in it, once they are built."""


def free_port() -> int:
    """A TCP port nobody on this machine listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


class WorkerHost:
    """Becomes a Ray actor. Its constructor cannot fail: every error of a worker comes back from a method call."""

    def __init__(self, label: str, rank: int) -> None:
        self._name = f"{label}[{rank}]"
        self._workers: dict[str, Any] = {}
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115  (open for the life of the process)
        faulthandler.register(signal.SIGUSR1, file=self._stack, all_threads=True)

    def __repr__(self) -> str:  # Ray puts it in front of the lines this process prints
        return self._name

    def place(self) -> Place:
        """Where this process runs, and a port that is free there."""
        import ray

        from ppo_lib.single_controller.ray_runtime import available_cores

        node_id = ray.get_runtime_context().get_node_id()
        ip = ray.util.get_node_ip_address()
        slots, roles = ray.util.get_current_placement_group(), tuple(self._workers)
        return Place(os.getpid(), node_id, ip, available_cores(), free_port(), self._stack.fileno(), slots, roles)

    def ping(self) -> None:
        """Nothing; that it returns shows that the process is there."""

    def prepare(self, environment: dict[str, str]) -> None:
        """Set the environment of the rank. It comes before the worker classes do: they import torch."""
        os.environ.update(environment)

    def build(self, members: dict[str, Any], num_threads: int) -> None:
        """Construct the workers, in order. OMP_NUM_THREADS came too late if this process had imported torch before."""
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(num_threads)
        for role, member in members.items():
            self._workers[role] = member.build()
        for worker in self._workers.values():
            worker.fused_worker_dict = self._workers

    def call(self, role: str, method: str, answers: bool, *args: Any, **kwargs: Any) -> Any:
        """Run a worker's method; TensorDicts are decoded on the way in and encoded on the way out.

        Without `answers` the result stays here: another rank's is the one that counts.
        """
        args, kwargs = unpack(args), unpack(kwargs)
        result = getattr(self._workers[role], method)(*args, **kwargs)
        return pack(result) if answers else None
