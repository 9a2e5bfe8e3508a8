"""Weights through host memory: each rank packs buckets and hands them to its replicas, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ppo_lib.rollout.checkpoint_engine.base import CheckpointEngine, TrainerGroup, WeightSender
from ppo_lib.rollout.replica import ReplicaHandle
from ppo_lib.rollout.weights import NamedTensor, buckets


@dataclass(frozen=True)
class BucketSender(WeightSender):
    """Rank i feeds replicas i, i + world size, and so on.

    The next bucket is packed when the one before it is in place, so a rank never holds two.
    """

    replicas: Sequence[ReplicaHandle]
    bucket_bytes: int
    timeout_s: float

    def send(self, rank: int, world_size: int, named_tensors: Iterable[NamedTensor]) -> None:
        """See `WeightSender.send`."""
        mine = self.replicas[rank::world_size]
        tensors = iter(named_tensors)
        try:
            if mine:
                for bucket in buckets(tensors, self.bucket_bytes):
                    for replica in mine:
                        replica.call_blocking("update_bucket", bucket, timeout_s=self.timeout_s)
        finally:
            for _ in tensors:  # the other ranks wait for this one in every gather
                pass


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
