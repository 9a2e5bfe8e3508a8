"""Weights through host memory: each rank packs buckets and hands them to its replicas, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ppo_lib.rollout.checkpoint_engine.base import CheckpointEngine, TrainerGroup, WeightSender
from ppo_lib.rollout.replica import ReplicaHandle
from ppo_lib.rollout.weights import NamedTensor, buckets


@dataclass(frozen=True)
class BucketSender(WeightSender):
    """Each replica is fed by the rank in whose slot it lives.

    On a GPU that both share, the bucket stays there and only a handle of its memory is sent; a replica over several
    ranks gets one from each. The next bucket is packed when the one before it is in place, so a rank never holds two.
    """

    replicas: Sequence[ReplicaHandle]
    bucket_bytes: int
    timeout_s: float

    def send(self, rank: int, world_size: int, named_tensors: Iterable[NamedTensor]) -> None:
        """See `WeightSender.send`."""
        tensors = iter(named_tensors)
        try:
            fed = [
                (replica, part) for replica in self.replicas if (part := _part(replica, rank, world_size)) is not None
            ]
            first = next(tensors, None) if fed else None
            if first is not None:
                on_gpu = first[1].is_cuda and all(replica.opens_device_buckets for replica, _ in fed)
                device = first[1].device if on_gpu else None
                for bucket in buckets(chain([first], tensors), self.bucket_bytes, device):
                    message = bucket.share() if on_gpu else bucket
                    for replica, part in fed:
                        if on_gpu:
                            self._call(replica, message, part, replica.span)
                        elif part == 0:
                            self._call(replica, message)
        finally:
            for _ in tensors:  # the other ranks wait for this one in every gather
                pass

    def _call(self, replica: ReplicaHandle, *arguments: Any) -> None:
        replica.call_blocking("update_bucket", *arguments, timeout_s=self.timeout_s)


def _part(replica: ReplicaHandle, rank: int, world_size: int) -> int | None:
    """Which of the replica's GPUs is this rank's; None if none is."""
    part = rank - replica.index * replica.span % world_size
    return part if 0 <= part < replica.span else None


class NaiveCheckpointEngine(CheckpointEngine):
    """The backend `naive`.

    Args:
        bucket_megabytes: `checkpoint_engine.update_weights_bucket_megabytes`.
    """

    def __init__(self, bucket_megabytes: int) -> None:
        self._bucket_bytes = bucket_megabytes << 20

    def transfer(self, group: TrainerGroup, replicas: Sequence[ReplicaHandle], timeout_s: float) -> None:
        """See `CheckpointEngine.transfer`."""
        group.send_weights(BucketSender(tuple(replicas), self._bucket_bytes, timeout_s))
