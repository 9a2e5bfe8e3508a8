"""Where an engine lives: its own Ray actor, or this process. The rest of the library sees only the handle.

A call through a handle always ends: with the engine's answer, with the engine's own error, or with one that says that
the replica died or did not answer in time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ppo_lib.config import ActorRolloutRefConfig
from ppo_lib.errors import RolloutError, WorkerDiedError, WorkerTimeoutError
from ppo_lib.rollout.engine import RolloutEngine
from ppo_lib.rollout.engines import engine_class
from ppo_lib.single_controller import RayResourcePool, available_cores
from ppo_lib.single_controller.faults import add_note, why_it_ended

# All requests of a cohort must be inside the actor before the first is answered.
_CALLS_AT_ONCE = 1_000_000
_SHUTDOWN_S = 30.0
_DISCARD_S = 5.0
_SLIVER = 0.01  # of a GPU: to be shown which one a bundle has


@dataclass(frozen=True)
class EngineSpec:
    """What it takes to build an engine: its registered name and its class's arguments."""

    engine_name: str
    config: ActorRolloutRefConfig
    model_path: str
    tokenizer: Any
    device_name: str

    @property
    def span(self) -> int:
        """Over how many ranks one replica reaches."""
        return self.config.rollout.tensor_model_parallel_size if self.engine_name == "sglang" else 1

    @property
    def opens_device_buckets(self) -> bool:
        """Whether weights may stay on the GPU on their way."""
        return self.device_name == "cuda" and engine_class(self.engine_name).opens_device_buckets

    def build(self, visible_devices: str | None = None) -> RolloutEngine:
        """The engine, loaded, in this process; `visible_devices` where its own processes need more than this one's."""
        engine: Any = engine_class(self.engine_name)
        more = {} if visible_devices is None else {"visible_devices": visible_devices}
        return engine(self.config, self.model_path, self.tokenizer, self.device_name, **more)


class ReplicaHandle(ABC):
    """One engine, wherever it is. Handles of Ray replicas may be sent to other processes, which cannot restart them."""

    def __init__(self, index: int, span: int = 1, opens_device_buckets: bool = False) -> None:
        self.index = index
        self.span = span
        """Over how many ranks it reaches, from rank `index * span` on."""
        self.opens_device_buckets = opens_device_buckets
        self.restarts = 0
        """How often the engine was lost and built again."""

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
    def restart(self, timeout_s: float) -> None:
        """End what is left of the engine and build it again. It then has no weights of the trainer's.

        Raises:
            RolloutError: It could not be built.
            WorkerTimeoutError: It was not ready in time.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine and what hosts it. Safe to call twice."""

    def call_blocking(self, method: str, *args: Any, timeout_s: float) -> Any:
        """`call` for code that is not in an event loop (or blocks one on purpose, as a notebook cell does)."""
        return run_blocking(self.call(method, *args, timeout_s=timeout_s))


class LocalReplicaHandle(ReplicaHandle):
    """An engine in this process."""

    def __init__(self, index: int, spec: EngineSpec) -> None:
        super().__init__(index)
        self._spec = spec
        self._engine = spec.build()

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

    def restart(self, timeout_s: float) -> None:
        """See `ReplicaHandle.restart`."""
        self.shutdown()
        self._engine = self._spec.build()
        self.restarts += 1

    def shutdown(self) -> None:
        """See `ReplicaHandle.shutdown`."""
        self.call_blocking("shutdown", timeout_s=_SHUTDOWN_S)


class RayReplicaHandle(ReplicaHandle):
    """An engine in a Ray actor.

    Ray starts the actor's process again when it ends, empty, so that the handle stays good wherever it was sent; the
    driver's own copy then builds the engine in it.

    Args:
        index: Which replica.
        span: See `ReplicaHandle`.
        opens_device_buckets: See `ReplicaHandle`.
        actor: Handle of a `ReplicaActor`.
        arguments: What its `build` is given, in the driver; None in other processes.
    """

    def __init__(
        self,
        index: int,
        span: int,
        opens_device_buckets: bool,
        actor: Any,
        arguments: tuple[Any, ...] | None = None,
    ) -> None:
        super().__init__(index, span, opens_device_buckets)
        self._actor = actor
        self._arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.index, self.span, self.opens_device_buckets, self._actor)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """See `ReplicaHandle.call`."""
        return await call_actor(self._actor.call.remote(method, *args), self.name, method, timeout_s)

    def build(self) -> Any:
        """Have the actor load its engine; returns Ray's reference to the answer."""
        if self._arguments is None:
            raise RolloutError(f"{self.name} can only be built by the process that started it")
        return self._actor.build.remote(*self._arguments)

    def restart(self, timeout_s: float) -> None:
        """See `ReplicaHandle.restart`."""
        import ray

        deadline = time.monotonic() + timeout_s + _SHUTDOWN_S
        while True:
            try:
                run_blocking(call_actor(self._actor.discard.remote(), self.name, "restart", _SHUTDOWN_S))
                break
            except (WorkerDiedError, WorkerTimeoutError) as error:
                if time.monotonic() > deadline:  # Ray finds no place for it any more, say
                    raise
                if isinstance(error, WorkerTimeoutError):
                    ray.kill(self._actor, no_restart=False)
                else:  # Ray is starting its process again
                    time.sleep(0.2)
        run_blocking(call_actor(self.build(), self.name, "restart", timeout_s))
        self.restarts += 1

    def shutdown(self) -> None:
        """See `ReplicaHandle.shutdown`."""
        import ray

        if ray.is_initialized():
            with suppress(WorkerDiedError, WorkerTimeoutError):  # an engine with processes of its own tidies up
                run_blocking(call_actor(self._actor.discard.remote(), self.name, "shutdown", _DISCARD_S))
            ray.kill(self._actor)


class ReplicaActor:
    """Becomes an async Ray actor that hosts one engine."""

    def __init__(self, index: int) -> None:
        self._name = f"rollout[{index}]"
        self._engine: RolloutEngine | None = None

    def __repr__(self) -> str:  # Ray puts it in front of the lines this process prints
        return self._name

    async def build(
        self, spec: EngineSpec, num_threads: int | None, replicas_here: int, visible_devices: str | None
    ) -> None:
        """Load the engine. Errors come back from this call, since an actor's constructor hides them."""
        import torch

        torch.set_num_threads(num_threads or max(1, available_cores() // replicas_here))
        self._engine = spec.build(visible_devices)

    async def discard(self) -> None:
        """End the engine, if there is one."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.shutdown()

    async def call(self, method: str, *args: Any) -> Any:
        """One of the engine's methods.

        Raises:
            WorkerDiedError: There is no engine, because this process was started in place of one that ended.
        """
        if self._engine is None:
            raise WorkerDiedError(f"{self._name} has no engine: the process that had it ended")
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

    places = [pool.bundle(index * spec.span) for index in range(count)]
    holders = [_GpuHolders(pool, range(index * spec.span, (index + 1) * spec.span)) for index in range(count)]
    handles: list[RayReplicaHandle] = []
    shared = ray.put(spec)
    try:
        for index, (group, bundle) in enumerate(places):
            options = {
                "num_cpus": pool.cpu_share,
                "num_gpus": pool.gpu_share,
                "max_concurrency": _CALLS_AT_ONCE,
                "max_restarts": -1,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            }
            actor = ray.remote(ReplicaActor).options(**options).remote(index)
            here = sum(other is group for other, _ in places)
            arguments = (shared, threads_of_driver(), here, holders[index].gpus(timeout_s))
            handles.append(RayReplicaHandle(index, spec.span, spec.opens_device_buckets, actor, arguments))
        building = [handle.build() for handle in handles]
        for handle, ref in zip(handles, building, strict=True):
            run_blocking(call_actor(ref, handle.name, "start", timeout_s))
    except BaseException:
        for handle in handles:
            handle.shutdown()
        raise
    return list(handles)


class _GpuHolders:
    """Takes a share of the GPUs of all ranks that one replica spans, and knows which they are."""

    def __init__(self, pool: RayResourcePool, ranks: range) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._actors: list[Any] = []
        if not pool.use_gpu or len(ranks) == 1:
            return  # Ray shows the replica's own actor the one GPU that is its
        for rank in ranks:
            group, bundle = pool.bundle(rank)
            options = {
                "num_cpus": 0,
                "num_gpus": _SLIVER,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            }
            self._actors.append(ray.remote(_GpuHolder).options(**options).remote())

    def gpus(self, timeout_s: float) -> str | None:
        """The GPUs, as in CUDA_VISIBLE_DEVICES; None where the replica's process sees what it needs anyway."""
        import ray

        if not self._actors:
            return None
        found = ray.get([actor.gpus.remote() for actor in self._actors], timeout=timeout_s)
        for actor in self._actors:
            ray.kill(actor)
        return ",".join(gpu for gpus in found for gpu in gpus)


class _GpuHolder:
    """A Ray actor that says which GPU its bundle has."""

    def gpus(self) -> list[str]:
        import ray

        return [str(gpu) for gpu in ray.get_gpu_ids()]


async def call_actor(ref: Any, name: str, method: str, timeout_s: float) -> Any:
    """Await a Ray call; what goes wrong becomes an error that names who and where.

    Who stops waiting, for lack of time or because it is cancelled, cancels the call at the other end too.

    Raises:
        WorkerDiedError: The actor is gone.
        WorkerTimeoutError: No answer in time.
        Exception: What the method raised, as its own class.
    """
    import ray
    from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

    try:
        return await asyncio.wait_for(asyncio.wrap_future(ref.future()), timeout_s)
    except asyncio.CancelledError:
        ray.cancel(ref)
        raise
    except RayTaskError as error:  # first: it may be a TimeoutError too, if that is what the method raised
        cause = error.cause if isinstance(error.cause, Exception) else error
        add_note(cause, f"raised by {name} in {method}")
        raise cause from None
    except ActorUnavailableError as error:
        raise WorkerDiedError(f"{name} died during {method}: its process ended and Ray is starting another") from error
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
