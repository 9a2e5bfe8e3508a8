"""The Ray processes of one worker group: started together, waited for with a time limit, ended together.

A rank that dies or hangs leaves the others waiting for it inside a collective, so when one is lost all are ended, and
later calls say why, also where that happened between two calls. An exception that every rank survives leaves the group
usable.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ppo_lib.errors import ConfigError, WorkerDiedError, WorkerTimeoutError
from ppo_lib.single_controller.colocate import RayClassWithInitArgs
from ppo_lib.single_controller.dispatch import RankCall
from ppo_lib.single_controller.faults import add_note, hanging_at, traceback_on_rank, why_it_ended
from ppo_lib.single_controller.host import Place, WorkerHost
from ppo_lib.single_controller.resource_pool import RayResourcePool, remove_groups
from ppo_lib.single_controller.transport import pack, unpack
from ppo_lib.single_controller.waiting import Answers, await_answers
from ppo_lib.single_controller.watch import watch_ranks

__all__ = ["RankActors"]

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
"""For the bare processes to come up, before any model is loaded."""
GRACE_S = 5.0
"""How long the other ranks may still answer once one has raised."""
EXIT_TIMEOUT_S = 10.0
"""How long ending a group waits to see the processes gone."""
NAMESPACE = "ppo_lib"
"""Of Ray, where the processes of detached groups have their names."""
_SENT_INLINE = (type(None), bool, int, float, str, ray.ObjectRef)


class RankActors:
    """One Ray actor per rank of `pool`, each hosting all of `members`.

    Args:
        pool: where the ranks run.
        members: role -> worker class with arguments.
        label: names the processes in logs and in errors that concern no single role.
        timeout_s: the time limit of every call.
        num_threads: CPU threads of a rank; None shares the cores of a node out among its ranks.
        detached: leave the processes running when this driver ends; `attach` finds them by `label`.
    """

    def __init__(
        self,
        pool: RayResourcePool,
        members: dict[str, RayClassWithInitArgs],
        label: str,
        timeout_s: float,
        num_threads: int | None,
        detached: bool = False,
    ) -> None:
        self._prepare(pool, label, timeout_s)
        self._finalizer = weakref.finalize(self, _kill, self.actors)
        self._finalizer.atexit = False  # Ray ends a driver's actors with the driver
        try:
            self.actors.extend(self._new_actor(pool, rank, detached) for rank in range(pool.world_size))
            self._start(members, num_threads)
        except BaseException:
            self.shutdown()
            raise
        if detached:
            self._finalizer.detach()
        self._stop_watch = watch_ranks(self)

    @classmethod
    def attach(cls, label: str, members: dict[str, RayClassWithInitArgs], timeout_s: float) -> RankActors:
        """The processes that a detached group left running under `label`.

        Raises:
            ConfigError: there are none, or they host other roles.
            WorkerDiedError: one of them is gone.
        """
        running: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        names = {entry["name"] for entry in running if entry["namespace"] == NAMESPACE}
        count = sum(name.rpartition(":")[0] == label for name in names)
        if not count or {f"{label}:{rank}" for rank in range(count)} - names:
            raise ConfigError(
                f"no detached worker group {label!r} runs in this cluster, or not all of it; there are "
                f"{', '.join(sorted({name.rpartition(':')[0] for name in names})) or 'none'}"
            )
        self = cls.__new__(cls)
        self._prepare(_SlotsOfOthers(), label, timeout_s)
        self.actors += [ray.get_actor(f"{label}:{rank}", namespace=NAMESPACE) for rank in range(count)]
        self._finalizer = weakref.finalize(self, list)  # they outlive this object too
        self._places = self.gather(label, "attach", [actor.place.remote() for actor in self.actors])
        self._pool.groups = list({place.slots.id: place.slots for place in self._places if place.slots}.values())
        if any(place.roles != tuple(members) for place in self._places):
            hosted = ", ".join(self._places[0].roles)
            raise ConfigError(f"the detached worker group {label!r} hosts {hosted}, not {', '.join(members)}")
        self._stop_watch = watch_ranks(self)
        return self

    def _prepare(self, pool: Any, label: str, timeout_s: float) -> None:
        self.label, self.timeout_s = label, timeout_s
        self.actors: list[Any] = []
        self._ended: str | None = None
        self._ending = threading.Lock()
        self._gathering = 0
        self._stop_watch = threading.Event()
        self._places: list[Place] = []
        self._pool = pool
        pool.acquire(self)

    def _new_actor(self, pool: RayResourcePool, rank: int, detached: bool) -> Any:
        group, bundle = pool.bundle(rank)
        kept = {"name": f"{self.label}:{rank}", "namespace": NAMESPACE, "lifetime": "detached"} if detached else {}
        actor = ray.remote(WorkerHost).options(
            num_cpus=pool.cpu_share,
            num_gpus=pool.gpu_share,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
            **kept,
        )
        return actor.remote(self.label, rank)

    def _start(self, members: dict[str, RayClassWithInitArgs], num_threads: int | None) -> None:
        limit = min(START_TIMEOUT_S, self.timeout_s)
        self._places = self.gather(self.label, "start", [actor.place.remote() for actor in self.actors], limit)
        peers = [sum(other.node_id == place.node_id for other in self._places) for place in self._places]
        threads = [num_threads or max(1, place.cores // n) for place, n in zip(self._places, peers)]
        for rank, (actor, place) in enumerate(zip(self.actors, self._places)):
            actor.prepare.remote(
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(len(self.actors)),
                    "LOCAL_RANK": str(sum(other.node_id == place.node_id for other in self._places[:rank])),
                    "LOCAL_WORLD_SIZE": str(peers[rank]),
                    "MASTER_ADDR": self._places[0].node_ip,
                    "MASTER_PORT": str(self._places[0].free_port),
                    "OMP_NUM_THREADS": str(threads[rank]),
                }
            )
        shared = ray.put(members)
        building = [actor.build.remote(shared, n) for actor, n in zip(self.actors, threads)]
        self.gather(self.label, "__init__", building)

    def submit(self, role: str, method: str, calls: list[RankCall]) -> list[Any]:
        """Start one call per rank. What several ranks share is put in the object store once."""
        if self._ended is not None:
            raise WorkerDiedError(f"{role}.{method}: the workers of this group are gone, because {self._ended}")
        put = _PutOnce()
        return [
            actor.call.remote(
                role, method, call.answers, *map(put, call.args), **{k: put(v) for k, v in call.kwargs.items()}
            )
            for actor, call in zip(self.actors, calls)
        ]

    def gather(self, role: str, method: str, refs: list[Any], timeout_s: float | None = None) -> list[Any]:
        """The results, in rank order.

        Raises:
            WorkerDiedError: a rank's process ended.
            WorkerTimeoutError: a rank did not answer in time.
            Exception: what the method raised on the rank that failed first, with a note naming role, rank and method.
        """
        limit = self.timeout_s if timeout_s is None else timeout_s
        self._gathering += 1  # whoever waits here tells of a death better than the watch
        try:
            answers = await_answers(refs, limit, GRACE_S)
            if len(answers.results) < len(refs):
                self._fail(role, method, answers, limit)
        finally:
            self._gathering -= 1
        return [unpack(answers.results[rank]) for rank in range(len(refs))]

    def _fail(self, role: str, method: str, answers: Answers, limit: float) -> None:
        """Raise the cause: a death before an exception (which may be its echo), an exception before a silence."""
        if self._ended is not None:  # a call that was in flight when an earlier failure ended the group
            raise WorkerDiedError(f"{role}.{method}: the workers of this group are gone, because {self._ended}")
        late = ", ".join(self._where_it_hangs(rank) for rank in answers.late)
        if answers.lost:
            rank, lost = next(iter(answers.lost.items()))
            error: BaseException = WorkerDiedError(
                f"{role} rank {rank}{self._address(rank)} died during {method}: {why_it_ended(lost)}"
            )
            error.__cause__ = lost.with_traceback(None)
        elif answers.raised:
            rank, raised = next(iter(answers.raised.items()))
            error = raised.cause
            error.__cause__ = traceback_on_rank(raised)
            add_note(error, f"raised by {role} rank {rank}{self._address(rank)} in {method}")
        else:
            error = WorkerTimeoutError(f"{role}.{method} did not finish within {limit:g} s: no answer from {late}")
        for other, raised in answers.raised.items():
            if raised.cause is not error:
                add_note(error, f"{role} rank {other} raised {type(raised.cause).__name__}: {raised.cause}")
        if answers.late and not isinstance(error, WorkerTimeoutError):
            add_note(error, f"no answer from {late}")
        if answers.lost or answers.late:
            self._stop(f"{role}.{method} failed earlier: {type(error).__name__}: {error}")
            add_note(error, "all ranks of the group were ended; build a new worker group to go on")
        raise error

    def lost(self, rank: int, error: RayError) -> bool:
        """End the group because a rank died between calls; False if a call is waiting, which will tell it better."""
        if self._gathering:
            return False
        if self._ended is None:
            why = f"{self.label} rank {rank}{self._address(rank)} died between calls: {why_it_ended(error)}"
            logger.error("%s; all ranks of the group are ended", why)
            self._stop(why)
        return True

    def _address(self, rank: int) -> str:
        if not self._places:
            return ""
        return f" (pid {self._places[rank].pid} on {self._places[rank].node_ip})"

    def _where_it_hangs(self, rank: int) -> str:
        at = hanging_at(self._places[rank], _this_node()) if self._places else None
        return f"rank {rank}" + (f" (at {at})" if at else "")

    def shutdown(self) -> None:
        """End every process, and give the slots back if nobody else uses the pool."""
        self._stop("they were shut down")
        self._pool.release(self)

    def _stop(self, why: str) -> None:
        """End every process and wait to see those of this node gone. The first reason given is kept."""
        with self._ending:
            if self._ended is not None:
                return
            self._ended = why
        self._stop_watch.set()
        self._finalizer.detach()
        if not ray.is_initialized():  # Ray has taken the processes with it
            return
        _kill(self.actors)
        deadline = time.monotonic() + EXIT_TIMEOUT_S
        for pid in [place.pid for place in self._places if place.node_id == _this_node()]:
            while _alive(pid) and time.monotonic() < deadline:
                time.sleep(0.02)


class _SlotsOfOthers:
    """The slots in which an attached group runs: given back when it is shut down."""

    groups: list[Any]

    def acquire(self, user: object) -> None:
        self.groups = []

    def release(self, user: object) -> None:
        remove_groups(self.groups)


class _PutOnce:
    """Puts an argument into the object store, and the same object only once."""

    def __init__(self) -> None:
        self._stored: dict[int, tuple[Any, Any]] = {}  # id -> (the object, so that its id stays its own; its reference)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, _SENT_INLINE):
            return value
        if id(value) not in self._stored:
            self._stored[id(value)] = (value, ray.put(pack(value)))
        return self._stored[id(value)][1]


def _this_node() -> str:
    return ray.get_runtime_context().get_node_id()


def _kill(actors: list[Any]) -> None:
    if ray.is_initialized():
        for actor in actors:
            with contextlib.suppress(Exception):  # already dead, or of a cluster that is gone
                ray.kill(actor, no_restart=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
