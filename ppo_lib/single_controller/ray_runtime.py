"""Starting Ray once, quietly, with limits that suit the machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from ppo_lib.errors import ConfigError, WorkerTimeoutError

__all__ = ["available_cores", "ensure_ray"]

_CPU_OBJECT_STORE_BYTES = 1 << 30
"""Batches of a CPU run are small, and Ray's own default (30% of the memory) is taken from the model."""
START_ATTEMPTS = 3
"""Of starting Ray here, each of which Ray gives up after 30 s."""
_CONNECT_TIMEOUT_S = 10.0


_QUIET_AND_FAIR = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""Environment of what Ray starts. Its workers would run at niceness 15, and OpenMP's threads spin where they wait: with
anything else busy on the machine a step then takes ten times as long, waiting for a thread that has no core."""


def available_cores() -> int:
    """Cores this process may use: under taskset or in a container they can be fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def ensure_ray(ray_kwargs_config: Any = None) -> bool:
    """Start Ray, or connect to the cluster at `ray_init.address`, unless this process has done so already.

    Args:
        ray_kwargs_config: the `ray_kwargs` section of a config (or a mapping, or None): `ray_init.address`,
            `ray_init.num_cpus` (None: the cores), `ray_init.object_store_memory` in bytes (None: 1 GiB where there is
            no GPU, Ray's default otherwise), and any further argument of `ray.init`.

    Returns:
        Whether this call started or joined Ray, so that the caller knows whether to leave it.

    Raises:
        ConfigError: no cluster answers at the address, or sizes were given for a cluster that is running already.
        WorkerTimeoutError: Ray did not start on this machine in the time it allows itself.
    """
    import ray
    import torch

    if ray.is_initialized():
        return False
    options = ray_init_options(ray_kwargs_config, torch.cuda.is_available())
    for name, value in _QUIET_AND_FAIR.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(_worth_saying)
    address = options["address"]
    try:
        _knock(address)
        for _ in range(START_ATTEMPTS):
            if _start(options):
                return True
    except OSError as err:
        if address == "local":
            raise
        raise ConfigError(f"ray_kwargs.ray_init.address: no Ray cluster answers at {address!r} ({err})") from err
    raise WorkerTimeoutError(
        f"Ray did not come up within its 30 s, {START_ATTEMPTS} times in a row. It needs about 5 s of CPU time: the "
        f"machine is overloaded, or Ray's logs in /tmp/ray/session_latest/logs say what is wrong"
    )


def _knock(address: str) -> None:
    """Fail at once where nothing listens at `host:port`: Ray itself goes on trying for minutes."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _start(options: dict[str, Any]) -> bool:
    """`ray.init`; False if this machine did not start Ray's processes in the time that Ray allows, which is fixed.

    What a failed attempt has started would compete with the next one, and Ray would end it only with this process.
    """
    import ray

    before = {child.pid for child in psutil.Process().children()}
    try:
        ray.init(**options)
    except Exception as err:
        if "timed out during startup" not in str(err):
            raise
        left = [child for child in psutil.Process().children() if child.pid not in before]
        for child in left:
            child.kill()
        psutil.wait_procs(left, timeout=10)
        return False
    return True


def ray_init_options(config: Any, has_gpu: bool) -> dict[str, Any]:
    """The arguments of `ray.init` for a `ray_kwargs` section: what is null there is left out or decided here.

    Raises:
        ConfigError: sizes given for a cluster that is running already.
    """
    section = config.get("ray_init") if isinstance(config, Mapping) else getattr(config, "ray_init", None)
    given = {} if section is None else _without_none(section if isinstance(section, Mapping) else section.model_dump())
    address = given.get("address") or os.environ.get("RAY_ADDRESS") or "local"
    common = {"logging_level": logging.WARNING, **given, "address": address}
    if address == "local":
        sizes = {} if has_gpu else {"object_store_memory": _CPU_OBJECT_STORE_BYTES}
        return {"include_dashboard": False, "num_cpus": available_cores(), **sizes, **common}
    misplaced = [name for name in ("num_cpus", "num_gpus", "object_store_memory") if name in given]
    if misplaced:
        raise ConfigError(
            f"ray_kwargs.ray_init: {' and '.join(misplaced)} cannot be set for the running cluster at {address!r}; "
            f"remove {'it' if len(misplaced) == 1 else 'them'}, or use address=local to start Ray here"
        )
    return common


def _worth_saying(record: logging.LogRecord) -> bool:
    """Ray warns that its token authentication is on; that it is off would be news."""
    return not str(record.msg).startswith("Token authentication is enabled")


def _without_none(section: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing that was left null, and no section that is empty then."""
    kept = {k: _without_none(v) if isinstance(v, Mapping) else v for k, v in section.items()}
    return {k: v for k, v in kept.items() if v is not None and v != {}}
