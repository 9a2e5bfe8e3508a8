"""The process group of the training ranks and the mesh they form."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ppo_lib.errors import ConfigError, PPOLibError

__all__ = ["all_agree", "build_mesh", "ensure_process_group"]


def ensure_process_group(device_name: str, timeout_s: float = 600.0) -> torch.device:
    """Join the group that `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` describe; a process's roles share it.

    At world size 1 no port is opened: the group lives in this process.

    Args:
        device_name: "cpu" (gloo) or "cuda" (NCCL, with gloo for what lives on the CPU).
        timeout_s: limit of one collective.

    Returns:
        The device of this rank; a rank with a GPU sees that one alone.
    """
    device = torch.device("cuda", 0) if device_name == "cuda" else torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, timeout=timeout)
    return device


def build_mesh(device: torch.device, fsdp_size: int = -1) -> DeviceMesh:
    """All ranks as one shard group ("shard"), or as replicas of shard groups of `fsdp_size` ("replicate", "shard").

    Raises:
        ConfigError: the ranks do not divide into groups of that size.
    """
    world = dist.get_world_size()
    if fsdp_size in (-1, 0) or fsdp_size == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    if world % fsdp_size:
        fitting = [n for n in range(1, world + 1) if world % n == 0]
        raise ConfigError(f"fsdp_size {fsdp_size} does not divide {world} ranks; use one of {fitting}, or -1 for all")
    shape = (world // fsdp_size, fsdp_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def all_agree(error: Exception | None) -> None:
    """Raise on every rank what rank 0 met, so that no rank waits for one that has given up."""
    shared: list[Exception | None] = [error]
    if dist.get_world_size() > 1:
        if error is not None and not isinstance(error, PPOLibError):
            shared = [PPOLibError(f"rank 0: {type(error).__name__}: {error}")]
        dist.broadcast_object_list(shared, src=0)
    if error is not None:
        raise error
    if shared[0] is not None:
        raise shared[0]
