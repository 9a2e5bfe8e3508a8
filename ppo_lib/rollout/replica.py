"""Where an engine lives: its own Ray actor, or this process. The rest of the library sees only the handle.

A call through a handle always ends: with the engine's answer, with the engine's own error, or with one that says that
the replica died or did not answer in time.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ppo_lib.config import ActorRolloutRefConfig
from ppo_lib.errors import WorkerDiedError, WorkerTimeoutError
from ppo_lib.rollout.engine import RolloutEngine
from ppo_lib.rollout.engines import engine_class
from ppo_lib.single_controller import RayResourcePool, available_cores
from ppo_lib.single_controller.faults import add_note, why_it_ended

# All requests of a cohort must be inside the actor before the first is answered.
_CALLS_AT_ONCE = 1_000_000
_SHUTDOWN_S = 30.0


@dataclass(frozen=True)
class EngineSpec:
    """What it takes to build an engine: its registered name and its class's arguments."""

    engine_name: str
    config: ActorRolloutRefConfig
    model_path: str
    tokenizer: Any
    device_name: str

    def build(self) -> RolloutEngine:
        """The engine, loaded, in this process."""
        return engine_class(self.engine_name)(self.config, self.model_path, self.tokenizer, self.device_name)


class ReplicaHandle(ABC):
    """One engine, wherever it is. Handles of Ray replicas may be sent to other processes."""

    def __init__(self, index: int) -> None:
        self.index = index

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"rollout replica {self.index}"

    @abstractmethod
    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Await one of the engine's methods.

        Raises:
            WorkerDiedError: The replica is gone.
            WorkerTimeoutError: It did not answer in time.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine and what hosts it. Safe to call twice."""

    def call_blocking(self, method: str, *args: Any, timeout_s: float) -> Any:
        """`call` for code that is not in an event loop (or blocks one on purpose, as a notebook cell does)."""
        return run_blocking(self.call(method, *args, timeout_s=timeout_s))


class LocalReplicaHandle(ReplicaHandle):
    """An engine in this process."""

    def __init__(self, index: int, engine: RolloutEngine) -> None:
        super().__init__(index)
        self._engine = engine

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See `ReplicaHandle.call`."""
        answer = asyncio.ensure_future(getattr(self._engine, method)(*args))
        try:
            await asyncio.wait([answer], timeout=timeout_s)
            if not answer.done():
                raise _too_late(self.name, method, timeout_s)
            return answer.result()
        finally:
            answer.cancel()  # nothing where it is done

    def shutdown(self) -> None:
        """See `ReplicaHandle.shutdown`."""
        self.call_blocking("shutdown", timeout_s=_SHUTDOWN_S)


class RayReplicaHandle(ReplicaHandle):
    """An engine in a Ray actor."""

    def __init__(self, index: int, actor: Any) -> None:
        super().__init__(index)
        self._actor = actor

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See `ReplicaHandle.call`."""
        return await call_actor(self._actor.call.remote(method, *args), self.name, method, timeout_s)

    def shutdown(self) -> None:
        """See `ReplicaHandle.shutdown`."""
        import ray

        if ray.is_initialized():
            ray.kill(self._actor)


class ReplicaActor:
    """Becomes an async Ray actor that hosts one engine."""

    def __init__(self, index: int) -> None:
        self._name = f"rollout[{index}]"
        self._engine: RolloutEngine | None = None

    def __repr__(self) -> str:  # Ray puts it in front of the lines this process prints
        return self._name

    async def build(self, spec: EngineSpec, num_threads: int | None, replicas_here: int) -> None:
        """Load the engine. Errors come back from this call, since an actor's constructor hides them."""
        import torch

        torch.set_num_threads(num_threads or max(1, available_cores() // replicas_here))
        self._engine = spec.build()

    async def call(self, method: str, *args: Any) -> Any:
        """One of the engine's methods."""
        return await getattr(self._engine, method)(*args)


def start_ray_replicas(spec: EngineSpec, pool: RayResourcePool, count: int, timeout_s: float) -> list[ReplicaHandle]:
    """Start replicas in the slots of the pool's first `count` ranks, each beside the training rank there.

    The driver's OMP_NUM_THREADS holds for them; without it a node's cores are shared out among its replicas.

    Args:
        spec: The engine of each.
        pool: Where the training ranks are.
        count: How many replicas.
        timeout_s: How long loading may take.
    """
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from ppo_lib.single_controller.ray_group import threads_of_driver  # imports Ray, which a local run does without

    places = [pool.bundle(rank) for rank in range(count)]
    handles: list[ReplicaHandle] = []
    shared = ray.put(spec)
    try:
        building = []
        for index, (group, bundle) in enumerate(places):
            options = {
                "num_cpus": pool.cpu_share,
                "num_gpus": pool.gpu_share,
                "max_concurrency": _CALLS_AT_ONCE,
                "max_restarts": 0,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            }
            actor = ray.remote(ReplicaActor).options(**options).remote(index)
            handles.append(RayReplicaHandle(index, actor))
            here = sum(other is group for other, _ in places)
            building.append(actor.build.remote(shared, threads_of_driver(), here))
        for handle, ref in zip(handles, building, strict=True):
            run_blocking(call_actor(ref, handle.name, "start", timeout_s))
    except BaseException:
        for handle in handles:
            handle.shutdown()
        raise
    return handles


async def call_actor(ref: Any, name: str, method: str, timeout_s: float) -> Any:
    """Await a Ray call; what goes wrong becomes an error that names who and where.

    Who stops waiting, for lack of time or because it is cancelled, cancels the call at the other end too.

    Raises:
        WorkerDiedError: The actor is gone.
        WorkerTimeoutError: No answer in time.
        Exception: What the method raised, as its own class.
    """
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout_s)
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except RayTaskError as error:  # first: it may be a TimeoutError too, if that is what the method raised
        cause = error.cause if isinstance(error.cause, Exception) else error
        add_note(cause, f"raised by {name} in {method}")
        raise cause from None
    except RayError as error:
        raise WorkerDiedError(f"{name} died during {method}: {why_it_ended(error)}") from error
    except TimeoutError:
        ray.cancel(ref)
        raise _too_late(name, method, timeout_s) from None


def run_blocking(coroutine: Any) -> Any:
    """Run a coroutine to its end on a thread of its own, so that it works beside a running event loop as well."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(asyncio.run(coroutine))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="ppo_lib-rollout-call", daemon=True)
    thread.start()
    thread.join()
    return result.result()


def _too_late(name: str, method: str, timeout_s: float) -> WorkerTimeoutError:
    return WorkerTimeoutError(f"{name} did not answer {method} within {timeout_s:g} s")
