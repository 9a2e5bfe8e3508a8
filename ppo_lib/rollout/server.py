"""The replicas of a run: where a request goes, and what happens to all of them at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from ppo_lib.config import ActorRolloutRefConfig
from ppo_lib.errors import WorkerDiedError, WorkerTimeoutError
from ppo_lib.rollout.engine import SLEEP_TAGS, EngineStatus, GenerationRequest, TokenOutput
from ppo_lib.rollout.engines import engine_class, resolve_engine_name
from ppo_lib.rollout.replica import EngineSpec, LocalReplicaHandle, ReplicaHandle, run_blocking, start_ray_replicas
from ppo_lib.single_controller import RayResourcePool

_PROBE_S = 20.0  # a replica that does not say how it is within this hangs

logger = logging.getLogger(__name__)


class LLMServerClient:
    """Sends requests to replicas. May be sent to other processes where the replicas are Ray actors."""

    def __init__(self, replicas: Sequence[ReplicaHandle], timeout_s: float) -> None:
        self.replicas = list(replicas)
        self._timeout_s = timeout_s

    async def generate(self, request: GenerationRequest, replica: int, min_weight_version: int) -> TokenOutput:
        """Have one replica continue a prompt.

        Args:
            request: What to generate.
            replica: Which replica.
            min_weight_version: Refuse weights older than this.

        Raises:
            StaleWeightsError, EngineAsleepError, RolloutError: As `RolloutEngine.generate`.
            WorkerDiedError: The replica is gone.
            WorkerTimeoutError: It did not answer in time; the request is called off, as it is when this is cancelled.
        """
        return await self.replicas[replica].call("generate", request, min_weight_version, timeout_s=self._timeout_s)


class LLMServerManager:
    """Owns the replicas. All methods that are not `async` block for at most the time limit.

    `weight_version` is the version every request asks for at least; the `CheckpointEngineManager` raises it after each
    synchronisation, so that a replica which missed one refuses to serve.
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaHandle],
        timeout_s: float,
        resource_pool: RayResourcePool | None = None,
        *,
        request_timeout_s: float | None = None,
        max_restarts: int = 0,
        decodes_cohorts: bool = True,
    ) -> None:
        self.replicas = list(replicas)
        self.timeout_s = timeout_s
        self.weight_version = -1
        self.decodes_cohorts = decodes_cohorts
        self.client = LLMServerClient(replicas, request_timeout_s or timeout_s)
        self.give_weights: Callable[[ReplicaHandle], None] | None = None
        """Sends one replica the current weights; set by the `CheckpointEngineManager`."""
        self._max_restarts = max_restarts
        self._restarting: dict[int, asyncio.Task[None]] = {}
        self._pool = resource_pool
        if resource_pool is not None:
            resource_pool.acquire(self)

    @classmethod
    def create(
        cls,
        config: ActorRolloutRefConfig,
        model_path: str,
        tokenizer: Any,
        engine_name: str,
        device_name: str,
        resource_pool: RayResourcePool | None,
        num_replicas: int,
        timeout_s: float,
    ) -> LLMServerManager:
        """Start the replicas and wait until their engines are loaded.

        Args:
            config: The section `actor_rollout_ref`.
            model_path: A local folder or Hugging Face id.
            tokenizer: Goes to every engine.
            engine_name: `hf`, `sglang`, or `auto`.
            device_name: `cpu` or `cuda`.
            resource_pool: The pool of the training ranks; None puts a single replica into this process.
            num_replicas: How many; replica i lives in the slot of rank i.
            timeout_s: Limit of every wait.
        """
        spec = EngineSpec(resolve_engine_name(engine_name, device_name), config, model_path, tokenizer, device_name)
        replicas = (
            [LocalReplicaHandle(0, spec)]
            if resource_pool is None
            else start_ray_replicas(spec, resource_pool, num_replicas, timeout_s)
        )
        return cls(
            replicas,
            timeout_s,
            resource_pool,
            request_timeout_s=config.rollout.request_timeout_s,
            max_restarts=config.rollout.max_restarts,
            decodes_cohorts=engine_class(spec.engine_name).decodes_cohorts,
        )

    @property
    def is_local(self) -> bool:
        """Whether the replicas are in this process, out of reach of other ones."""
        return any(isinstance(replica, LocalReplicaHandle) for replica in self.replicas)

    def replica_of(self, position: int, count: int) -> int:
        """The replica for row `position` of `count`: neighbours go together, so that a group shares its prompt."""
        return position * len(self.replicas) // count

    async def generate(self, request: GenerationRequest) -> TokenOutput:
        """One request with the current weights, on the replica of its prompt row; see `LLMServerClient.generate`."""
        return await self.client.generate(request, request.order[0] % len(self.replicas), self.weight_version)

    async def recover(self, replica: int, restarts: int, error: Exception) -> None:
        """Make a replica good again that failed a request; returns when it serves with the current weights.

        Args:
            replica: Which one.
            restarts: Its `restarts` when the request was sent: it may have been restarted since.
            error: How the request failed; raised where the replica is well, or was restarted too often. Whatever a
                replica answers while it is being restarted says nothing about the request.
        """
        task = self._restarting.get(replica)
        if task is None:
            if self.replicas[replica].restarts != restarts:
                return
            if not isinstance(error, (WorkerDiedError, WorkerTimeoutError)):
                raise error
            task = asyncio.create_task(asyncio.to_thread(self._recover, replica, error))
            task.add_done_callback(lambda _: self._restarting.pop(replica))
            self._restarting[replica] = task
        await asyncio.shield(task)

    def _recover(self, replica: int, error: Exception) -> None:
        handle = self.replicas[replica]
        if self._answers(handle):
            raise error
        self._restart(handle, error)
        if self.give_weights is not None:
            self.give_weights(handle)

    def restart_lost(self, error: Exception) -> None:
        """Restart the replicas that are dead or hang. They have no weights of the trainer's then.

        Raises:
            The given error: All replicas are well, so that it has another cause, or one was restarted too often.
        """
        lost = [handle for handle in self.replicas if not self._answers(handle)]
        if not lost:
            raise error
        for handle in lost:
            self._restart(handle, error)

    def _answers(self, handle: ReplicaHandle) -> bool:
        try:
            handle.call_blocking("status", timeout_s=min(self.timeout_s, _PROBE_S))
        except (WorkerDiedError, WorkerTimeoutError):
            return False
        return True

    def _restart(self, handle: ReplicaHandle, error: Exception) -> None:
        if handle.restarts >= self._max_restarts:
            raise error
        logger.warning(
            "%s is lost (%s); starting it again, %d of at most %d times",
            handle.name,
            str(error).splitlines()[0],
            handle.restarts + 1,
            self._max_restarts,
        )
        handle.restart(self.timeout_s)

    def broadcast(self, method: str, *args: Any, replicas: Sequence[ReplicaHandle] | None = None) -> list[Any]:
        """Call one method of these engines (None: all) at the same time; the first error is raised once all ended."""

        async def all_of_them() -> list[Any]:
            calls = [replica.call(method, *args, timeout_s=self.timeout_s) for replica in replicas or self.replicas]
            return await asyncio.gather(*calls, return_exceptions=True)

        results = run_blocking(all_of_them())
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def sleep(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """Put every engine to sleep."""
        self.broadcast("sleep", tags)

    def wake_up(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """Wake every engine."""
        self.broadcast("wake_up", tags)

    def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """Call off requests on every engine (None: all). Returns how many there were."""
        return sum(self.broadcast("abort", request_ids))

    def status(self) -> list[EngineStatus]:
        """One entry per replica."""
        return self.broadcast("status")

    def shutdown(self) -> None:
        """End the replicas. Safe to call twice."""
        for replica in self.replicas:
            replica.shutdown()
        if self._pool is not None:
            self._pool.release(self)
