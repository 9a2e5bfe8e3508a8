"""The replicas of a run: where a request goes, and what happens to all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ppo_lib.config import ActorRolloutRefConfig
from ppo_lib.rollout.engine import SLEEP_TAGS, EngineStatus, GenerationRequest, TokenOutput
from ppo_lib.rollout.engines import resolve_engine_name
from ppo_lib.rollout.replica import EngineSpec, LocalReplicaHandle, ReplicaHandle, run_blocking, start_ray_replicas
from ppo_lib.single_controller import RayResourcePool


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
        self, replicas: Sequence[ReplicaHandle], timeout_s: float, resource_pool: RayResourcePool | None = None
    ) -> None:
        self.replicas = list(replicas)
        self.timeout_s = timeout_s
        self.weight_version = -1
        self.client = LLMServerClient(replicas, timeout_s)
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
        if resource_pool is None:
            return cls([LocalReplicaHandle(0, spec.build())], timeout_s)
        return cls(start_ray_replicas(spec, resource_pool, num_replicas, timeout_s), timeout_s, resource_pool)

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

    def broadcast(self, method: str, *args: Any) -> list[Any]:
        """Call one method of every engine at the same time; the first error is raised once all have ended."""

        async def all_of_them() -> list[Any]:
            calls = [replica.call(method, *args, timeout_s=self.timeout_s) for replica in self.replicas]
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
