"""Starting Ray once, quietly, with limits that suit the machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppo_lib.errors import ConfigError

__all__ = ["available_cores", "ensure_ray"]

_CPU_OBJECT_STORE_BYTES = 1 << 30
"""Batches of a CPU run are small, and Ray's own default (30% of the memory) is taken from the model."""


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
        ConfigError: no cluster answers at the address.
    """
    import ray
    import torch

    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options = {"include_dashboard": False, "logging_level": logging.WARNING, **_ray_init_options(ray_kwargs_config)}
    address = options.setdefault("address", os.environ.get("RAY_ADDRESS", "local"))
    logging.getLogger("ray._private.authentication.authentication_token_setup").addFilter(_worth_saying)
    if address == "local":
        options.setdefault("num_cpus", available_cores())
        if not torch.cuda.is_available():
            options.setdefault("object_store_memory", _CPU_OBJECT_STORE_BYTES)
        ray.init(**options)
        return True
    given = [name for name in ("num_cpus", "num_gpus", "object_store_memory") if name in options]
    if given:
        raise ConfigError(
            f"ray_kwargs.ray_init: {' and '.join(given)} cannot be set for the running cluster at {address!r}; remove "
            f"{'it' if len(given) == 1 else 'them'}, or use address=local to start Ray here"
        )
    del options["include_dashboard"]
    try:
        ray.init(**options)
    except ConnectionError as err:
        raise ConfigError(f"ray_kwargs.ray_init.address: no Ray cluster answers at {address!r} ({err})") from err
    return True


def _worth_saying(record: logging.LogRecord) -> bool:
    """Ray warns that its token authentication is on; that it is off would be news."""
    return not str(record.msg).startswith("Token authentication is enabled")


def _ray_init_options(config: Any) -> dict[str, Any]:
    section = config.get("ray_init") if isinstance(config, Mapping) else getattr(config, "ray_init", None)
    if section is None:
        return {}
    return _without_none(section if isinstance(section, Mapping) else section.model_dump())


def _without_none(section: Mapping[str, Any]) -> dict[str, Any]:
    """Nothing that was left null, and no section that is empty then."""
    kept = {k: _without_none(v) if isinstance(v, Mapping) else v for k, v in section.items()}
    return {k: v for k, v in kept.items() if v is not None and v != {}}
