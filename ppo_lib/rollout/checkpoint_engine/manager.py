"""Keeps replicas and trainer in step: who is asleep, which version of the weights is current, who may serve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ppo_lib.algorithms.names import unknown_name
from ppo_lib.errors import WorkerDiedError, WorkerTimeoutError
from ppo_lib.rollout.checkpoint_engine.base import CheckpointEngine, TrainerGroup
from ppo_lib.rollout.checkpoint_engine.naive import NaiveCheckpointEngine
from ppo_lib.rollout.replica import ReplicaHandle
from ppo_lib.rollout.server import LLMServerManager

# Each is given the section `rollout.checkpoint_engine`.
_BACKENDS: dict[str, Callable[[Any], CheckpointEngine]] = {
    "naive": lambda config: NaiveCheckpointEngine(config.update_weights_bucket_megabytes),
}


def register_checkpoint_engine(name: str, factory: Callable[[Any], CheckpointEngine]) -> None:
    """Make a backend known; `factory` is given the section `rollout.checkpoint_engine`. A later one wins."""
    _BACKENDS[name] = factory


def checkpoint_engine_factory(name: str) -> Callable[[Any], CheckpointEngine]:
    """What makes the backend of this name. Raises `ConfigError` with the nearest name if there is none."""
    if name not in _BACKENDS:
        raise unknown_name("checkpoint engine", name, _BACKENDS)
    return _BACKENDS[name]


class CheckpointEngineManager:
    """Moves weights from the training group into the replicas.

    Args:
        config: The section `rollout.checkpoint_engine`.
        trainer_group: The worker group of the actor.
        server_manager: The replicas.

    Raises:
        ConfigError: There is no backend of the configured name.
    """

    def __init__(self, config: Any, trainer_group: TrainerGroup, server_manager: LLMServerManager) -> None:
        self._backend = checkpoint_engine_factory(config.backend)(config)
        self._group = trainer_group
        self._servers = server_manager
        server_manager.give_weights = self._give_weights
        self.version = -1
        """Synchronisations so far, counted from 0; -1 before the first."""
        self.global_steps: int | None = None
        """The trainer's step at the last synchronisation."""

    def update_weights(self, global_steps: int) -> int:
        """Put the trainer's current weights into every replica and wake them; requests then ask for nothing older.

        Weights are woken first and the cache last, so that on one device the weights in transit and the cache are never
        there together.

        Returns:
            The new version.

        Raises:
            RolloutError: A replica refused: a tensor unknown, missing, misshapen or damaged. No replica serves until an
                update succeeds.
            WorkerDiedError, WorkerTimeoutError: A rank is gone or hangs, or a replica more often than
                `rollout.max_restarts`.
        """
        version = self.version + 1
        self._steadily(lambda: self._update(self._servers.replicas, version))
        self.version = self._servers.weight_version = version
        self.global_steps = global_steps
        return version

    def sleep_replicas(self) -> None:
        """Give the replicas' memory back to training. Nothing changes where they sleep already."""
        self._steadily(self._servers.sleep)

    def wake_replicas(self) -> None:
        """Make the replicas serve again with the weights they hold. Nothing changes where they are awake."""
        self._servers.wake_up()

    def _update(self, replicas: Sequence[ReplicaHandle], version: int) -> None:
        self._servers.broadcast("wake_up", ["weights"], replicas=replicas)
        self._servers.broadcast("begin_update", replicas=replicas)
        self._backend.transfer(self._group, replicas, self._servers.timeout_s)
        self._servers.broadcast("finish_update", version, replicas=replicas)
        self._servers.broadcast("wake_up", ["kv_cache"], replicas=replicas)

    def _give_weights(self, replica: ReplicaHandle) -> None:
        """Bring a replica that was restarted to the version of the others."""
        if self.version >= 0:
            self._update([replica], self.version)

    def _steadily(self, action: Callable[[], None]) -> None:
        """Do it, and again after restarting the replicas that were lost over it, as often as they may be."""
        while True:
            try:
                return action()
            except (WorkerDiedError, WorkerTimeoutError) as error:
                self._servers.restart_lost(error)
