"""Runs a batch of agent loops at the same time, scores each response as it finishes, and joins them to the envelope."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ppo_lib.config import PPOConfig, worker_count
from ppo_lib.errors import RolloutError, WorkerDiedError, WorkerTimeoutError
from ppo_lib.reward import RewardLoopManager, RewardSample
from ppo_lib.rollout.agent_loop.base import AgentLoopOutput, AgentSample
from ppo_lib.rollout.agent_loop.collate import collate
from ppo_lib.rollout.agent_loop.runners import ActorRunner, InProcessRunner, LoopRunner
from ppo_lib.rollout.agent_loop.samples import samples_of
from ppo_lib.rollout.placing import Placer
from ppo_lib.rollout.server import LLMServerManager
from protocol import DataProto

_CALL_OFF_S = 10.0
_QUEUED_AHEAD = 2  # samples sent to a replica for each that it runs, so that it never waits for the next

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class SampleHandle:
    """A sample on its way. The future is done when nothing of it runs any more, also after a cancellation."""

    sample: AgentSample
    task: asyncio.Task[AgentLoopOutput]
    future: Future[AgentLoopOutput]


class AgentLoopManager:
    """The driver's side of generation.

    Its event loop runs on a thread of its own, so it may be used from plain code and from a notebook alike.

    Args:
        config: The configuration; the section `actor_rollout_ref` is read.
        tokenizer: The policy's tokenizer, with a pad token.
        server_manager: The replicas.
        reward_loop: Scores responses as they finish; None leaves them unscored.

    Raises:
        ConfigError: There is no agent loop of the configured name.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: Any,
        server_manager: LLMServerManager,
        reward_loop: RewardLoopManager | None = None,
    ) -> None:
        self._section = config.actor_rollout_ref
        self._tokenizer = tokenizer
        self._servers = server_manager
        self._reward_loop = reward_loop
        self._submitted = 0
        self._runner = self._make_runner()
        self._placer: Placer | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ppo_lib-agent-loops", daemon=True)
        self._thread.start()

    def submit(self, gen_batch: DataProto) -> list[SampleHandle]:
        """Start one agent loop per row; does not wait.

        Args:
            gen_batch: B rows, repeated for their rollouts already: `input_ids`, `attention_mask`, `position_ids`
                (B, L) left-padded, optionally `prompt_row` (B); the dataset's object columns with `uid`, optionally
                `agent_name`; meta_info `temperature`, `epoch`, `validate`, and `unscored` to leave the reward loop out.
        """
        self._submitted += 1
        samples = samples_of(gen_batch, self._section.rollout, self._servers, f"batch{self._submitted}")
        scored = self._reward_loop is not None and not gen_batch.meta_info.get("unscored", False)
        starting = asyncio.run_coroutine_threadsafe(self._start(samples, scored), self._loop)
        return starting.result(self._servers.timeout_s)

    def collect(self, handles: Sequence[SampleHandle]) -> Iterator[AgentLoopOutput]:
        """Samples as they finish.

        Raises:
            RolloutError: A sample could not be generated.
            RewardError: A response could not be scored.
            WorkerDiedError, WorkerTimeoutError: A replica or worker is gone or hangs.
                After any of these the other samples of `handles` are called off and none of them runs any more.
        """
        pending = {handle.future for handle in handles}
        deadline = time.monotonic() + self._servers.timeout_s
        try:
            while pending:
                done, pending = wait(pending, max(0.0, deadline - time.monotonic()), FIRST_COMPLETED)
                if not done:
                    raise self._too_late(handles)
                for future in done:
                    yield future.result()
        except GeneratorExit:
            raise  # the caller wants no more of them now, and may collect the rest later
        except BaseException:
            self._call_off(handles)
            raise

    def collate(self, samples: Sequence[AgentLoopOutput], gen_batch: DataProto) -> DataProto:
        """The envelope of one batch's samples; see `ppo_lib.rollout.agent_loop.collate.collate`."""
        return collate(samples, gen_batch, self._section.rollout.response_length, self._tokenizer.pad_token_id)

    def generate_sequences(self, gen_batch: DataProto) -> DataProto:
        """`submit`, `collect` and `collate` in one."""
        return self.collate(list(self.collect(self.submit(gen_batch))), gen_batch)

    def shutdown(self) -> None:
        """Call off what runs, end the workers and the thread. Safe to call twice."""
        if self._thread.is_alive():
            # in the loop's own thread: a notebook's thread has a running loop already and can drive no other
            with suppress(TimeoutError):  # a loop of the user's own may swallow its cancellation, or block the thread
                asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(_CALL_OFF_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CALL_OFF_S)
            if not self._thread.is_alive():
                self._loop.close()
        self._runner.shutdown()

    def _make_runner(self) -> LoopRunner:
        asked = self._section.rollout.agent.num_workers
        arguments = (self._section, self._tokenizer, self._servers.client)
        if self._servers.is_local:
            if asked:
                logger.warning(
                    "rollout.agent.num_workers=%d: the replica lives in this process, where workers could not reach "
                    "it; agent loops run here too",
                    asked,
                )
            return InProcessRunner(*arguments)
        count = worker_count(asked)
        return ActorRunner(count, *arguments, self._servers.timeout_s) if count else InProcessRunner(*arguments)

    async def _start(self, samples: Sequence[AgentSample], scored: bool) -> list[SampleHandle]:
        handles = []
        for sample in samples:
            handle = SampleHandle(sample, asyncio.create_task(self._finish(sample, scored)), Future())
            handle.task.add_done_callback(partial(_pass_on, handle.future))
            handles.append(handle)
        return handles

    async def _finish(self, sample: AgentSample, scored: bool) -> AgentLoopOutput:
        """Generate and, where it is to be scored here, score one sample."""
        output = await self._generate(sample)
        if self._reward_loop is None or not scored:
            return output
        begin = time.monotonic()
        reward = await self._reward_loop.score(RewardSample.from_columns(sample.columns, output.response_ids))
        return replace(output, reward=reward, timing={**output.timing, "reward": time.monotonic() - begin})

    async def _generate(self, sample: AgentSample) -> AgentLoopOutput:
        """Run a sample's loop on its replica, or on the one with the least to do where that is free to choose."""
        if self._servers.decodes_cohorts:
            return await self._steadily(sample)
        if self._placer is None:
            in_flight = _QUEUED_AHEAD * self._section.rollout.max_num_seqs
            self._placer = Placer(len(self._servers.replicas), in_flight)
        async with self._placer.place((sample.batch, sample.uid)) as replica:
            return await self._steadily(replace(sample, replica=replica))

    async def _steadily(self, sample: AgentSample) -> AgentLoopOutput:
        """Run it, and again from the start if its replica was lost over it."""
        while True:
            restarts = self._servers.replicas[sample.replica].restarts
            try:
                return await self._runner.run(sample)
            except (WorkerDiedError, WorkerTimeoutError, RolloutError) as error:
                await self._servers.recover(sample.replica, restarts, error)
                sample = replace(sample, cohort=None)  # those of its cohort that are through do not come again

    def _call_off(self, handles: Sequence[SampleHandle]) -> None:
        """Cancel what is unfinished, which the engines notice, and see it ended."""
        for handle in handles:
            self._loop.call_soon_threadsafe(handle.task.cancel)
        wait([handle.future for handle in handles], _CALL_OFF_S)

    def _too_late(self, handles: Sequence[SampleHandle]) -> WorkerTimeoutError:
        late = [handle.sample for handle in handles if not handle.future.done()]
        return WorkerTimeoutError(
            f"{len(late)} of {len(handles)} samples were not finished within {self._servers.timeout_s:g} s; "
            f"the first is {late[0]}"
        )


async def _cancel_others() -> None:
    """Cancel every other task of the running loop and let them end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _pass_on(future: Future[AgentLoopOutput], task: asyncio.Task[AgentLoopOutput]) -> None:
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is None:
        future.set_result(task.result())
    else:
        future.set_exception(error)
