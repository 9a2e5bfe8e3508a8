"""Where a scorer runs: in this process on a thread of its own, or in Ray actors. Loads no torch: actors stay small.

All of it may hang or die, and the caller goes on in time: it waits on its own clock, never on the scorer's word.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from ppo_lib.reward.function import ScoreFailure, ScoreFn, call, call_async, is_async, load_reward_fn
from ppo_lib.reward.sample import RewardResult

# Async scorers wait for something elsewhere; so many at once per process do not overrun what they wait for.
ASYNC_AT_ONCE = 64


class Clock:
    """When a scorer last began to work on a sample; None while the sample still waits for its turn."""

    started: float | None = None

    def start(self) -> None:
        """It begins now."""
        self.started = time.monotonic()


class ScoreWorkers(Protocol):
    """Something that scores. `score` runs in the reward loop's event loop and raises `ScoreFailure`."""

    async def score(self, arguments: Mapping[str, Any], clock: Clock) -> RewardResult:
        """Wait for a turn, start the clock, score."""
        ...

    def close(self) -> None:
        """Stop everything; what is still running is abandoned."""
        ...


class InProcess:
    """`reward.num_workers: 0`. Plain functions run one at a time on one daemon thread, async ones in the event loop.

    One at a time, because scorers are rarely written for threads and would gain nothing from them. The thread is a
    daemon: a scorer that never returns does not keep the process from ending.
    """

    def __init__(self, fn: ScoreFn):
        self._fn, self._async = fn, is_async(fn)
        self._turns = asyncio.Semaphore(ASYNC_AT_ONCE)
        self._jobs: queue.SimpleQueue[tuple[Mapping[str, Any], Clock, Future[RewardResult]] | None] = (
            queue.SimpleQueue()
        )
        if not self._async:
            threading.Thread(target=self._work, name="reward-scorer", daemon=True).start()

    async def score(self, arguments: Mapping[str, Any], clock: Clock) -> RewardResult:
        """See `ScoreWorkers`."""
        if self._async:
            async with self._turns:
                clock.start()
                return await call_async(self._fn, arguments)
        done: Future[RewardResult] = Future()
        self._jobs.put((arguments, clock, done))
        return await asyncio.wrap_future(done)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            arguments, clock, done = job
            if not done.set_running_or_notify_cancel():
                continue
            clock.start()
            try:
                done.set_result(call(self._fn, arguments))
            except BaseException as error:  # the waiter must hear of it, whatever it is
                done.set_exception(error if isinstance(error, ScoreFailure) else ScoreFailure(repr(error)))

    def close(self) -> None:
        """See `ScoreWorkers`."""
        self._jobs.put(None)


class _Outcome:
    """A result or a failure, as it comes back from an actor: an exception of the scorer's own might not pickle."""

    def __init__(self, result: RewardResult | None, failure: str | None):
        self.result, self.failure = result, failure

    def unwrap(self) -> RewardResult:
        if self.result is None:
            raise ScoreFailure(self.failure)
        return self.result


class RewardWorker:
    """Actor for a plain function: it runs on the process's main thread, where scorers that use alarms work."""

    def __init__(self, config: Any, fn: ScoreFn | None):
        self._fn = fn or load_reward_fn(config)

    def score(self, arguments: Mapping[str, Any]) -> _Outcome:
        """Score one sample."""
        try:
            return _Outcome(call(self._fn, arguments), None)
        except ScoreFailure as failure:
            return _Outcome(None, str(failure))

    def score_on_the_clock(self, arguments: Mapping[str, Any]) -> Iterator[_Outcome | None]:
        """The same, after a first None that says that it has begun."""
        yield None
        yield self.score(arguments)


class AsyncRewardWorker:
    """Actor for an async function: many samples at once."""

    def __init__(self, config: Any, fn: ScoreFn | None):
        self._fn = fn or load_reward_fn(config)

    async def score(self, arguments: Mapping[str, Any]) -> _Outcome:
        """Score one sample."""
        try:
            return _Outcome(await call_async(self._fn, arguments), None)
        except ScoreFailure as failure:
            return _Outcome(None, str(failure))


def start_actors(count: int, config: Any, fn: ScoreFn | None, runs_async: bool) -> list[Any]:
    """`count` Ray actors that score with `fn`, or with what `config` names. They take no CPU slots."""
    import ray

    cls = AsyncRewardWorker if runs_async else RewardWorker
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
    if runs_async:
        options["max_concurrency"] = ASYNC_AT_ONCE
    return [ray.remote(**options)(cls).remote(config, fn) for _ in range(count)]


class InActors:
    """`reward.num_workers: N`. A sample goes to the actor with the fewest samples of ours."""

    def __init__(self, actors: list[Any], runs_async: bool, timed: bool, owned: bool):
        self.actors, self._async, self._timed, self._owned = actors, runs_async, timed, owned
        self._busy = [0] * len(actors)
        # One plain sample in an actor and one waiting at its door keep it busy without a queue nobody can see
        self._turns = asyncio.Semaphore(len(actors) * (ASYNC_AT_ONCE if runs_async else 2))

    async def score(self, arguments: Mapping[str, Any], clock: Clock) -> RewardResult:
        """See `ScoreWorkers`. An actor that dies is a failure of the sample it had."""
        from ray.exceptions import RayActorError, RayError

        async with self._turns:
            index = min(range(len(self.actors)), key=self._busy.__getitem__)
            self._busy[index] += 1
            try:
                return (await self._ask(self.actors[index], arguments, clock)).unwrap()
            except RayActorError as error:
                raise ScoreFailure("its reward worker process died (see its log for why)") from error
            except RayError as error:
                raise ScoreFailure(f"its reward worker failed: {str(error).strip().splitlines()[-1]}") from error
            finally:
                self._busy[index] -= 1

    async def _ask(self, actor: Any, arguments: Mapping[str, Any], clock: Clock) -> _Outcome:
        if self._async or not self._timed:
            clock.start()
            return await actor.score.remote(arguments)
        begun, outcome = False, None
        # Another sample may be running there, of ours or of another caller: only the actor knows when this one begins
        async for reference in actor.score_on_the_clock.options(num_returns="streaming").remote(arguments):
            if not begun:
                begun = True
                clock.start()
            outcome = await reference
        if outcome is None:
            raise ScoreFailure("its reward worker gave no answer")
        return outcome

    def close(self) -> None:
        """See `ScoreWorkers`. Actors that another process shares are left to their owner."""
        import ray

        if self._owned:
            for actor in self.actors:
                with contextlib.suppress(Exception):  # Ray is gone already, and the actors with it
                    ray.kill(actor)
