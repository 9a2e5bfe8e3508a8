"""How weights get from training ranks into rollout replicas, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ppo_lib.rollout.replica import ReplicaHandle
from ppo_lib.rollout.weights import NamedTensor


class WeightSender(ABC):
    """Goes to every training rank, where it is handed that rank's iterator of full tensors.

    Gathering a full tensor is a collective of all ranks, so every rank must exhaust its iterator, whatever happens to
    its own replicas.
    """

    @abstractmethod
    def send(self, rank: int, world_size: int, named_tensors: Iterable[NamedTensor]) -> None:
        """Feed this rank's share of the replicas.

        Args:
            rank: This rank.
            world_size: How many ranks send.
            named_tensors: Pairs of name and full tensor in the rollout's dtype, in the same order on every rank.
        """


class TrainerGroup(Protocol):
    """What a checkpoint engine needs of the worker group that trains."""

    world_size: int

    def send_weights(self, sender: WeightSender) -> Any:
        """Call `sender.send(rank, world_size, named_tensors)` on every rank."""
        ...


class CheckpointEngine(ABC):
    """One way to move weights."""

    @abstractmethod
    def transfer(self, group: TrainerGroup, replicas: Sequence[ReplicaHandle], timeout_s: float) -> None:
        """Move the group's current weights into all replicas, which are between `begin_update` and `finish_update`."""
