"""The embedded engine: a transformers model, decoded on a thread of its own.

What it deliberately does not do: page its cache, share prefixes across prompts or calls, or use CUDA graphs. It is
the engine that runs anywhere, whose results can be repeated bit for bit, and that needs no service beside it.

One thread owns the model, the cache and the queue. Everything else, from any event loop, only posts to its inbox and
awaits a future, so no state is ever seen half changed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from ppo_lib.config import ActorRolloutRefConfig
from ppo_lib.errors import EngineAsleepError, RolloutError, StaleWeightsError
from ppo_lib.rollout.decode import Decoder, Finished, Row
from ppo_lib.rollout.engine import (
    SLEEP_TAGS,
    Cohort,
    EngineStatus,
    GenerationRequest,
    RolloutEngine,
    TokenOutput,
    check_prompt,
    known_tags,
)
from ppo_lib.rollout.hf_model import context_length, end_token_ids, load_model
from ppo_lib.rollout.scheduler import Scheduler
from ppo_lib.rollout.stopping import StopStrings, require_tokenizer
from ppo_lib.rollout.weights import WeightBucket, WeightReceiver

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(eq=False)
class _Entry:
    """A request the engine holds, and the future its caller awaits."""

    request: GenerationRequest
    min_version: int
    future: Future[TokenOutput]

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def order(self) -> tuple[int, int]:
        return self.request.order

    @property
    def cohort(self) -> Cohort | None:
        return self.request.cohort


class HFEngine(RolloutEngine):
    """The `hf` engine.

    Args:
        config: The section `actor_rollout_ref`.
        model_path: A local folder or Hugging Face id.
        tokenizer: Needed for stop strings; its end token ends responses too.
        device: Where the weights lie.
    """

    decodes_cohorts = True

    def __init__(
        self, config: ActorRolloutRefConfig, model_path: str, tokenizer: Any | None = None, device: str = "cpu"
    ) -> None:
        self._config = config.rollout
        self._device = torch.device(device)
        self._tokenizer = tokenizer
        self._model = load_model(config, model_path, self._device)
        self._end_ids = end_token_ids(self._model, model_path, tokenizer)
        self._vocab = self._model.config.get_text_config().vocab_size
        self._context = context_length(self._config, self._model.config)
        self._scheduler: Scheduler[_Entry] = Scheduler(self._config.max_num_seqs)
        self._decoder = Decoder(
            self._model,
            self._config.max_num_batched_tokens,
            self._config.enable_chunked_prefill,
            None if tokenizer is None else StopStrings(tokenizer),
        )
        self._running: dict[Row, _Entry] = {}
        self._names: set[str] = set()  # of the requests that are held in any way
        self._held: list[_Entry] = []  # came during a weight update; taken in when it is through
        self._asleep: set[str] = set()
        self._receiver: WeightReceiver | None = None
        self._unusable = "it has not been sent any weights yet" if self._config.load_format == "dummy" else ""
        self._version = -1
        self._stopped = False
        self._inbox: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._arrival = threading.Condition()
        self._threads = torch.get_num_threads()  # a new thread would start with the machine's default
        self._thread = threading.Thread(target=self._loop, name="ppo_lib-hf-engine", daemon=True)
        self._thread.start()

    async def generate(self, request: GenerationRequest, min_weight_version: int = -1) -> TokenOutput:
        """See `RolloutEngine.generate`."""
        entry = _Entry(request, min_weight_version, Future())
        entry.future.add_done_callback(lambda future: self._forget(request) if future.cancelled() else None)
        self._post(lambda: self._take_in(entry), entry.future)
        return await asyncio.wrap_future(entry.future)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """See `RolloutEngine.abort`."""
        return await self._call(lambda: self._abort(None if request_ids is None else set(request_ids)))

    async def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`."""
        await self._call(self._begin_update)

    async def update_bucket(self, bucket: WeightBucket) -> None:
        """See `RolloutEngine.update_bucket`."""
        await self._call(lambda: self._receive(lambda receiver: receiver.take(bucket)))

    async def finish_update(self, version: int) -> None:
        """See `RolloutEngine.finish_update`."""
        await self._call(lambda: self._finish_update(version))

    async def sleep(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """See `RolloutEngine.sleep`."""
        await self._call(lambda: self._sleep(known_tags(tags)))

    async def wake_up(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """See `RolloutEngine.wake_up`."""
        await self._call(lambda: self._wake_up(known_tags(tags)))

    async def status(self) -> EngineStatus:
        """See `RolloutEngine.status`."""
        if self._stopped:
            return EngineStatus("stopped", self._version, 0, 0)
        return await self._call(self._status)

    async def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`."""
        if not self._stopped:
            await self._call(self._stop)
        await asyncio.to_thread(self._thread.join)

    # What follows runs on the engine's thread, except `_post`, `_call` and `_forget`, which only leave it a message.

    def _post(self, action: Callable[[], None], future: Future[Any]) -> None:
        """Have the thread do something; what it raises goes to `future`."""
        with self._arrival:
            if not self._stopped:
                self._inbox.append((action, future))
                self._arrival.notify()
                return
        _fail(future, RolloutError("the rollout engine was shut down"))

    async def _call(self, action: Callable[[], T]) -> T:
        future: Future[T] = Future()
        self._post(lambda: _succeed(future, action()), future)
        return await asyncio.wrap_future(future)

    def _forget(self, request: GenerationRequest) -> None:
        """The caller does not want the answer any more."""
        self._post(lambda: _ignore(self._abort({request.request_id})), Future())

    def _loop(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            idle = True
            while not self._stopped:
                with self._arrival:
                    while idle and not self._inbox:
                        self._arrival.wait()
                    messages, self._inbox = self._inbox, deque()
                for action, future in messages:
                    _attempt(action, future)
                idle = not self._advance()
        except BaseException:
            logger.exception("the rollout engine's thread broke")
            self._stop()

    def _advance(self) -> bool:
        """Let rows join and make one step. False if there is nothing to do until a message comes."""
        if self._stopped or self._asleep or self._receiver is not None or self._unusable:
            return False
        joining = {self._row(entry): entry for entry in self._scheduler.join(self._running.values())}
        self._running.update(joining)
        if not self._running:
            return False
        try:
            finished = self._decoder.join(list(joining)) if joining else []
            if self._decoder.rows:
                finished += self._decoder.step()
        except Exception as error:
            logger.exception("decoding failed")
            self._decoder.release()
            finished = [
                Finished(row, RolloutError(f"decoding failed on {entry.request_id}: {type(error).__name__}: {error}"))
                for row, entry in self._running.items()
            ]
        self._deliver(finished)
        return True

    def _deliver(self, finished: Sequence[Finished]) -> None:
        for one in finished:
            entry = self._running.pop(one.row)
            if isinstance(one.result, RolloutError):
                _fail(entry.future, one.result)
            else:
                _succeed(entry.future, one.result)

    def _take_in(self, entry: _Entry) -> None:
        if self._receiver is not None:
            self._held.append(entry)
            return
        self._check_state(entry)
        self._check_request(entry.request)
        self._names.add(entry.request_id)
        entry.future.add_done_callback(lambda _: self._names.discard(entry.request_id))
        if not self._scheduler.add(entry):
            _succeed(entry.future, TokenOutput([], [], "abort", self._version, self._version))

    def _check_state(self, entry: _Entry) -> None:
        if self._unusable:
            raise StaleWeightsError(f"the rollout engine cannot serve: {self._unusable}")
        if self._version < entry.min_version:
            raise StaleWeightsError(
                f"the rollout engine holds weight version {self._version}; request {entry.request_id} asks for "
                f"{entry.min_version} or newer: an update did not reach this engine"
            )
        if self._asleep:
            raise EngineAsleepError(
                f"request {entry.request_id} came while the rollout engine sleeps ({', '.join(sorted(self._asleep))}); "
                "wake it first"
            )

    def _check_request(self, request: GenerationRequest) -> None:
        check_prompt(request, self._context, self._vocab)
        if request.request_id in self._names:
            raise RolloutError(f"request {request.request_id} is being served already; request ids must differ")
        require_tokenizer(self._tokenizer, request.params.stop)

    def _row(self, entry: _Entry) -> Row:
        request, params = entry.request, entry.request.params
        room = self._context - len(request.prompt_ids)
        return Row(
            request,
            seed=zlib.crc32(request.request_id.encode()) if params.seed is None else params.seed,
            limit=room if params.max_tokens is None else min(room, params.max_tokens),
            end_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._end_ids),
        )

    def _abort(self, request_ids: set[str] | None) -> int:
        waiting = self._scheduler.remove(request_ids)
        waiting += [e for e in self._held if request_ids is None or e.request_id in request_ids]
        self._held = [entry for entry in self._held if entry not in waiting]
        for entry in waiting:
            _succeed(entry.future, TokenOutput([], [], "abort", self._version, self._version))
        rows = self._decoder.evict(request_ids)
        self._deliver([Finished(row, row.output("abort")) for row in rows])
        return len(waiting) + len(rows)

    def _begin_update(self) -> None:
        if "weights" in self._asleep:
            raise EngineAsleepError("a weight update came while the engine's weights sleep; wake the tag weights first")
        self._receiver = WeightReceiver(self._model)
        self._unusable = "a weight update was begun and not finished"

    def _receive(self, action: Callable[[WeightReceiver], None]) -> None:
        """Use the open update; whatever goes wrong ends it and leaves the engine unusable until the next one."""
        if self._receiver is None:
            raise RolloutError("weights came without a begin_update")
        try:
            action(self._receiver)
        except Exception as error:
            self._receiver = None
            self._unusable = f"its last weight update failed ({error})"
            self._take_in_held()
            raise

    def _finish_update(self, version: int) -> None:
        self._receive(lambda receiver: receiver.finish())
        self._receiver = None
        self._unusable = ""
        self._version = self._decoder.version = version
        self._take_in_held()

    def _take_in_held(self) -> None:
        held, self._held = self._held, []
        for entry in held:
            _attempt(partial(self._take_in, entry), entry.future)

    def _sleep(self, tags: set[str]) -> None:
        busy = len(self._running) + len(self._scheduler) + len(self._held)
        if busy:
            raise RolloutError(f"the rollout engine cannot sleep while it holds {busy} requests; abort them first")
        if self._config.free_cache_engine:
            if "kv_cache" in tags:
                self._decoder.release()
            if "weights" in tags and self._device.type != "cpu":
                self._model.to("cpu")  # type: ignore[arg-type]
                torch.cuda.empty_cache()
        self._asleep |= tags

    def _wake_up(self, tags: set[str]) -> None:
        if "weights" in tags & self._asleep:
            self._model.to(self._device)  # type: ignore[arg-type]
        self._asleep -= tags

    def _status(self) -> EngineStatus:
        state = "ready"
        if self._asleep:
            state = "asleep"
        elif self._receiver is not None:
            state = "updating"
        elif self._unusable:
            state = "broken"
        return EngineStatus(
            state,
            self._version,
            running=len(self._running),
            waiting=len(self._scheduler) + len(self._held),
            detail={
                "asleep": sorted(self._asleep),
                "cache_bytes": self._decoder.cache_bytes,
                "pid": os.getpid(),
                "why": self._unusable,
            },
        )

    def _stop(self) -> None:
        with self._arrival:
            self._stopped = True
            late, self._inbox = self._inbox, deque()
        for action, future in late:  # whoever got in before the door closed is answered here or below
            _attempt(action, future)
        entries = [*self._running.values(), *self._scheduler.remove(None), *self._held]
        self._running, self._held = {}, []
        for entry in entries:
            _fail(entry.future, RolloutError(f"the rollout engine was shut down before it finished {entry.request_id}"))
        self._decoder.release()


def _attempt(action: Callable[[], None], future: Future[Any]) -> None:
    try:
        action()
    except Exception as error:
        _fail(future, error)


def _succeed(future: Future[T], value: T) -> None:
    if future.set_running_or_notify_cancel():  # a caller that is gone has cancelled it
        future.set_result(value)


def _fail(future: Future[Any], error: BaseException) -> None:
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)


def _ignore(_: object) -> None:
    return None
