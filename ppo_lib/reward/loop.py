"""The reward loop: scores samples as they finish, here or in Ray actors, without ever holding the caller up."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from ppo_lib.errors import ConfigError, PPOLibError, RewardError
from ppo_lib.reward.batch import columns_of, place_scores, samples_of, tensors_of
from ppo_lib.reward.function import ScoreFailure, ScoreFn, check_signature, describe, is_async, load_reward_fn
from ppo_lib.reward.managers import create_manager
from ppo_lib.reward.sample import RewardResult, RewardSample, failed
from ppo_lib.reward.workers import Clock, InActors, InProcess, ScoreWorkers, start_actors
from protocol import DataProto
from protocol.schema import FIELDS

Result = TypeVar("Result")

MAX_WORKERS = 8
# How often a waiting caller looks at the clock of its sample.
LOOK_EVERY_S = 0.2
# The clock of the sample that the running task scores: a manager need not pass it on.
CLOCK: ContextVar[Clock] = ContextVar("clock")


class RewardLoopManager:
    """Scores responses with the manager and the scorer that the section `reward` names.

    Scoring runs in an event loop on a thread of its own, so `score` may be awaited in any event loop and `score_batch`
    called without one, and a scorer that blocks holds neither up beyond `reward.timeout_s`. The limit counts from the
    moment a scorer begins on a sample. There is no score for a sample that failed: the first failure is raised.

    `reward.num_workers` Ray actors score (null: min(8, cores), or this process where Ray is not running); 0 scores
    here, plain functions one at a time on a thread. A scorer that sets alarms (`signal.alarm`) needs actors: there it
    runs on a main thread.

    Pickling gives a handle for another process, with the same actors or, for 0, a scorer in that process.

    Args:
        config: the section `reward`.
        tokenizer: decodes responses.
        compute_score: a scorer to use instead of the configured one, plain or async.

    Raises:
        ConfigError: no such scorer or manager, or Ray actors asked for where Ray is not running.
    """

    def __init__(self, config: Any, tokenizer: Any, compute_score: ScoreFn | None = None):
        if compute_score is not None:
            check_signature(compute_score, {}, "compute_score")
        self._state = {"config": config, "tokenizer": tokenizer, "compute_score": compute_score, "actors": None}
        self._set_up()

    def _set_up(self) -> None:
        self.config = self._state["config"]
        given: ScoreFn | None = self._state["compute_score"]
        fn = given or load_reward_fn(self.config)
        self._timeout_s: float | None = self.config.timeout_s
        actors, owned = self._state["actors"], False
        if actors is None and (count := self._count()):
            actors, owned = start_actors(count, self.config, given, is_async(fn)), True
            self._state["actors"] = actors
        self._workers: ScoreWorkers = (
            InActors(actors, is_async(fn), self._timeout_s is not None, owned) if actors else InProcess(fn)
        )
        self._manager = create_manager(self.config, self._state["tokenizer"], self._ask)
        self._stuck: RewardError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        return self._state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._state = state
        self._set_up()

    async def score(self, sample: RewardSample) -> RewardResult:
        """The score of one sample. Raises `RewardError` naming sample, source and cause."""
        future, clock = self._submit(sample)
        return await self._wait(future, clock, sample)

    def score_batch(self, data: DataProto) -> tuple[Tensor, dict[str, np.ndarray]]:
        """Score every row that is not padding.

        Reads `responses`, `response_mask`, `attention_mask` and the object columns; returns `rm_scores` (B, R) float32,
        the score on each row's last policy token, and what scorers reported beside it as object columns (B,), None
        where a row has none.
        """
        samples = samples_of(data)

        async def score_all() -> list[RewardResult | None]:
            tasks = [asyncio.ensure_future(self.score(sample) if sample else _nothing()) for sample in samples]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

        results = _run(score_all())
        scores = [result.score if result is not None else 0.0 for result in results]
        return (
            place_scores(scores, tensors_of(data, "response_mask")["response_mask"]),
            columns_of([result.extra if result is not None else {} for result in results]),
        )

    def close(self) -> None:
        """Stop the workers and the loop; whoever still waits is cancelled. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._workers.close()
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(_end(self._loop), self._loop)

    def _count(self) -> int:
        asked = self.config.num_workers
        ray = sys.modules.get("ray")  # importing it takes a second, and one that is not imported does not run
        if ray is not None and ray.is_initialized():
            return min(MAX_WORKERS, os.cpu_count() or 1) if asked is None else asked
        if asked:
            raise ConfigError(f"reward.num_workers={asked} needs Ray, which is not running; set it to 0 to score here.")
        return 0

    def _submit(self, sample: RewardSample) -> tuple[Future[RewardResult], Clock]:
        loop, clock = self._running_loop(), Clock()
        if self._stuck is not None:
            raise self._stuck

        async def work() -> RewardResult:
            CLOCK.set(clock)
            try:
                return self._checked(await self._manager.run_single(sample), sample)
            except ScoreFailure as failure:
                raise failed(sample, str(failure)) from failure.__cause__
            except PPOLibError:
                raise
            except Exception as error:
                raise failed(sample, f"the reward manager raised {describe(error)}") from error

        return asyncio.run_coroutine_threadsafe(work(), loop), clock

    async def _ask(self, sample: RewardSample, solution_str: str) -> RewardResult:
        arguments = {
            "data_source": sample.data_source,
            "solution_str": solution_str,
            "ground_truth": sample.ground_truth,
            "extra_info": sample.extra_info,
        }
        try:
            return await self._workers.score(arguments, CLOCK.get())
        except ScoreFailure as failure:
            raise failed(sample, str(failure), solution_str) from failure.__cause__

    def _checked(self, result: Any, sample: RewardSample) -> RewardResult:
        if not isinstance(result, RewardResult):
            raise failed(sample, f"the reward manager returned a {type(result).__name__}; expected a RewardResult")
        taken = sorted((FIELDS.keys() | sample.columns.keys()) & result.extra.keys())
        if taken:
            raise failed(
                sample, f"the scorer returned {taken[0]!r}, which the batch holds under that name already; rename it"
            )
        return result

    async def _wait(self, future: Future[RewardResult], clock: Clock, sample: RewardSample) -> RewardResult:
        """Wait here and not in the reward loop: an async scorer that blocks would stop every timer of that loop."""
        waiting = asyncio.wrap_future(future)
        if self._timeout_s is None:
            return await waiting
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=min(LOOK_EVERY_S, self._timeout_s))
            if done:
                return waiting.result()
            if clock.started is not None and time.monotonic() - clock.started > self._timeout_s:
                limit = f"reward.timeout_s={self._timeout_s:g} seconds"
                self._stuck = failed(sample, f"the scorer took longer than {limit}", sample.solution_str)
            if self._stuck is not None:  # nobody's turn comes any more behind a scorer that does not return
                waiting.cancel()
                raise self._stuck

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._closed:
                raise RuntimeError("the reward loop is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="reward-loop", daemon=True).start()
            return self._loop


async def _end(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)  # so that each tells who waits for it before the loop stops
    loop.stop()


async def _nothing() -> None:
    return None


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` to its end from ordinary code, also where this thread's event loop is running already (notebooks)."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(asyncio.run(work))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="score-batch", daemon=True).start()
    return result.result()
