"""The `sglang` engine, as the rest of the library sees it.

`sglang.Engine` lives in a host process; this class keeps the states, checks what goes in and what comes back, and
counts every weight update against an outline of the model. What it deliberately does not do: restart. An engine that
died says so at every call, and whoever owns the replicas builds another.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppo_lib.config import ActorRolloutRefConfig
from ppo_lib.errors import EngineAsleepError, RolloutError, StaleWeightsError
from ppo_lib.models.dtypes import computed_dtype
from ppo_lib.rollout.engine import (
    SLEEP_TAGS,
    EngineStatus,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    TokenOutput,
    check_prompt,
    known_tags,
)
from ppo_lib.rollout.hf_model import context_length, end_token_ids, model_outline
from ppo_lib.rollout.sglang.arguments import RESERVED, check_ports, engine_arguments, host_environment
from ppo_lib.rollout.sglang.process import HostProcess, make_folder
from ppo_lib.rollout.sglang.versions import require_sglang
from ppo_lib.rollout.weights import SharedBucket, WeightBucket, WeightLedger

_ONLY_THE_LIKELIEST = 1e-6  # top_p that leaves one token and, unlike SGLang's greedy mode, scales log-probs


@dataclass(eq=False)
class _Call:
    """A request on its way, and what it has so far."""

    request: GenerationRequest
    rid: str
    limit: int
    aborted: bool = False
    in_engine: bool = False
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stats: dict[str, float] = field(default_factory=dict)


class SGLangEngine(RolloutEngine):
    """The `sglang` engine. Building it blocks until the engine is ready to serve.

    Args:
        config: The section `actor_rollout_ref`.
        model_path: A local folder or Hugging Face id.
        tokenizer: Its end token ends responses; with `rollout.stop` the engine gets a copy of it.
        device: `cpu` or `cuda`.
        visible_devices: The GPUs of this replica, as in CUDA_VISIBLE_DEVICES; None keeps this process's.

    Raises:
        RolloutError: SGLang is not installed, or the engine could not be started.
        ConfigError: `engine_kwargs.sglang` has an argument that the installed version does not know.
        ModelError: The model cannot be loaded.
    """

    opens_device_buckets = True

    def __init__(
        self,
        config: ActorRolloutRefConfig,
        model_path: str,
        tokenizer: Any | None = None,
        device: str = "cpu",
        visible_devices: str | None = None,
    ) -> None:
        require_sglang()
        self._config = config.rollout
        self._on_cpu = torch.device(device).type == "cpu"
        self._outline = model_outline(config, model_path)
        text = self._outline.config.get_text_config()
        self._end_ids = sorted(end_token_ids(self._outline, model_path, tokenizer))
        self._vocab = text.vocab_size
        self._context = context_length(self._config, self._outline.config)
        most = getattr(text, "max_position_embeddings", None) or self._context + RESERVED
        folder = make_folder()
        try:
            self._process = self._start(config, model_path, tokenizer, device, folder, most, visible_devices)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[str, _Call] = {}
        self._asleep: set[str] = set()
        self._ledger: WeightLedger | None = None
        self._updated: Future[None] | None = None  # done when the update under way has ended
        self._unusable = "it has not been sent any weights yet" if self._config.load_format == "dummy" else ""
        self._version = -1
        self._parts: dict[int, SharedBucket] = {}
        self._loaded: Future[None] = Future()  # of the bucket whose parts are arriving
        self._stopped = False

    def _start(
        self,
        config: ActorRolloutRefConfig,
        model_path: str,
        tokenizer: Any,
        device: str,
        folder: str,
        most: int,
        visible_devices: str | None,
    ) -> HostProcess:
        dtype = str(computed_dtype(self._config.dtype, torch.device(device))).removeprefix("torch.")
        passed = self._config.engine_kwargs.sglang
        self._has_tokenizer = tokenizer is not None and (
            bool(self._config.stop) or passed.get("skip_tokenizer_init") is False
        )
        if self._config.stop and tokenizer is None:
            raise RolloutError(
                f"rollout.stop has stop strings {list(self._config.stop)} but the engine was given no tokenizer"
            )
        tokenizer_path = str(Path(folder) / "tokenizer") if self._has_tokenizer else None
        positions = min(self._context + RESERVED, most)
        self._fits = min(self._context, positions - 2)  # SGLang stops two short of the end
        arguments = engine_arguments(config, model_path, device, positions, dtype, tokenizer_path)
        check_ports(passed)
        if tokenizer_path and tokenizer is not None:
            tokenizer.save_pretrained(tokenizer_path)
        environment = host_environment(device, folder, visible_devices)
        process = HostProcess(arguments, environment, folder, fork=self._on_cpu, echo="log_level" in passed)
        self._facts = process.wait_until_ready()
        return process

    async def generate(self, request: GenerationRequest, min_weight_version: int = -1) -> TokenOutput:
        """See `RolloutEngine.generate`."""
        check_prompt(request, self._fits, self._vocab)
        self._check_params(request)
        room = self._fits - len(request.prompt_ids)
        limit = room if request.params.max_tokens is None else min(room, request.params.max_tokens)
        call = _Call(request, f"{next(self._numbers):020d}", limit)  # of one length: SGLang aborts by prefix
        self._hold(call)
        try:
            while True:
                while not self._enter(call):
                    await self._until_updated()
                if call.aborted:
                    return self._output(call, "abort")
                self._check_state(request, min_weight_version)
                finish = await self._ask(call)
                if finish != "abort" or call.aborted:
                    return self._output(call, finish)
                if len(call.tokens) >= call.limit:  # the update that called it off came at its last token
                    return self._output(call, "length")
        finally:
            with self._lock:
                self._calls.pop(call.rid, None)

    async def abort(self, request_ids: Sequence[str] | None = None) -> int:
        """See `RolloutEngine.abort`."""
        with self._lock:
            wanted = None if request_ids is None else set(request_ids)
            calls = [c for c in self._calls.values() if wanted is None or c.request.request_id in wanted]
            calls = [call for call in calls if not call.aborted]
            for call in calls:
                call.aborted = True
        await self._process.call("abort", [call.rid for call in calls if call.in_engine])
        return len(calls)

    async def begin_update(self) -> None:
        """See `RolloutEngine.begin_update`. What runs is called off in the engine and goes on after the update."""
        if "weights" in self._asleep:
            raise EngineAsleepError("a weight update came while the engine's weights sleep; wake the tag weights first")
        with self._lock:
            if self._updated is None:
                self._updated = Future()
            self._parts, self._loaded = {}, Future()  # of an update that broke off
        self._unusable = "a weight update was begun and not finished"
        await self._attempt(self._begin())

    async def update_bucket(self, bucket: WeightBucket | SharedBucket, part: int = 0, parts: int = 1) -> None:
        """See `RolloutEngine.update_bucket`. With several GPUs each sends its part: all return once all are loaded."""
        ledger = self._open_ledger()
        if isinstance(bucket, WeightBucket):
            return await self._attempt(self._load_from_memory(ledger, bucket))
        with self._lock:
            self._parts[part] = bucket
            loaded = self._loaded
            mine = len(self._parts) == parts
            if mine:
                handles = [self._parts[i].handle for i in range(parts)]
                self._parts, self._loaded = {}, Future()
        if mine:
            try:
                await self._attempt(self._load(ledger, bucket, [{"ipc": handle.hex()} for handle in handles]))
                loaded.set_result(None)
            except BaseException as error:
                loaded.set_exception(error)
        await asyncio.wrap_future(loaded)

    async def finish_update(self, version: int) -> None:
        """See `RolloutEngine.finish_update`."""
        ledger = self._open_ledger()
        await self._attempt(self._finish(ledger, version))
        self._ledger, self._version, self._unusable = None, version, ""
        self._resume_waiting()

    async def sleep(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """See `RolloutEngine.sleep`."""
        new = known_tags(tags) - self._asleep
        with self._lock:
            busy = len(self._calls)
        if busy:
            raise RolloutError(f"the rollout engine cannot sleep while it holds {busy} requests; abort them first")
        if new and self._config.free_cache_engine:
            await self._process.call("release", sorted(new))
            if "weights" in new and not self._on_cpu and not self._keeps_weights():
                self._unusable = "its weights were given up when it was put to sleep and have not been sent again"
        self._asleep |= new

    async def wake_up(self, tags: Sequence[str] = SLEEP_TAGS) -> None:
        """See `RolloutEngine.wake_up`."""
        waking = known_tags(tags) & self._asleep
        if waking and self._config.free_cache_engine:
            await self._process.call("resume", sorted(waking, reverse=True))  # weights before the cache
        self._asleep -= waking

    async def flush(self) -> None:
        """Drop the prefix cache. Refused by SGLang while requests run."""
        await self._process.call("flush")

    async def status(self) -> EngineStatus:
        """See `RolloutEngine.status`. Comes back through the scheduler.

        Raises:
            WorkerDiedError: The engine is gone.
        """
        if self._stopped:
            return EngineStatus("stopped", self._version, 0, 0)
        await self._process.call("ping")
        with self._lock:
            running = sum(call.in_engine for call in self._calls.values())
            waiting = len(self._calls) - running
        state = "ready"
        if self._asleep:
            state = "asleep"
        elif self._ledger is not None:
            state = "updating"
        elif self._unusable:
            state = "broken"
        detail = {"asleep": sorted(self._asleep), "why": self._unusable, **self._facts}
        return EngineStatus(state, self._version, running, waiting, detail)

    async def shutdown(self) -> None:
        """See `RolloutEngine.shutdown`."""
        self._stopped = True
        self._resume_waiting()
        await asyncio.to_thread(self._process.end)

    # ------------------------------------------------------------------ requests

    def _check_params(self, request: GenerationRequest) -> None:
        params = request.params
        if params.stop and not self._has_tokenizer:
            raise RolloutError(
                f"request {request.request_id} has stop strings {list(params.stop)}, but this sglang engine runs "
                "without a tokenizer; set rollout.stop, or rollout.engine_kwargs.sglang.skip_tokenizer_init=false"
            )
        if params.ignore_eos and (params.stop_token_ids or params.stop):
            raise RolloutError(
                f"request {request.request_id} has ignore_eos and stops of its own; with ignore_eos sglang ignores "
                "every stop, so leave one of the two out"
            )

    def _hold(self, call: _Call) -> None:
        with self._lock:
            if any(other.request.request_id == call.request.request_id for other in self._calls.values()):
                raise RolloutError(
                    f"request {call.request.request_id} is being served already; request ids must differ"
                )
            self._calls[call.rid] = call

    def _check_state(self, request: GenerationRequest, min_version: int) -> None:
        if self._stopped:
            raise RolloutError("the rollout engine was shut down")
        if self._unusable:
            raise StaleWeightsError(f"the rollout engine cannot serve: {self._unusable}")
        if self._version < min_version:
            raise StaleWeightsError(
                f"the rollout engine holds weight version {self._version}; request {request.request_id} asks for "
                f"{min_version} or newer: an update did not reach this engine"
            )
        if self._asleep:
            raise EngineAsleepError(
                f"request {request.request_id} came while the rollout engine sleeps "
                f"({', '.join(sorted(self._asleep))}); wake it first"
            )

    async def _ask(self, call: _Call) -> str:
        """Have SGLang go on with a request; returns why it stopped."""
        version, wants = self._version, call.request.params.logprobs
        prompt = [*call.request.prompt_ids, *call.tokens]
        try:
            answer = await self._process.call("generate", call.rid, prompt, self._params(call), wants)
        except asyncio.CancelledError:
            self._process.submit("abort", [call.rid])
            raise
        finally:
            call.in_engine = False
        self._check_answer(call, answer, version)
        call.tokens += answer["ids"]
        call.log_probs += answer["log_probs"] or []
        if answer["ids"]:
            call.versions.append(version)
        call.stats = answer["stats"]
        return answer["finish"]

    def _check_answer(self, call: _Call, answer: dict[str, Any], version: int) -> None:
        name = f"request {call.request.request_id}"
        if answer["matched"] == "NaN happened":
            raise RolloutError(f"{name}: the model's output was not finite; its weights are damaged")
        if call.request.params.logprobs and len(answer["log_probs"]) != len(answer["ids"]):
            raise RolloutError(
                f"{name}: sglang returned {len(answer['ids'])} tokens and {len(answer['log_probs'])} log-probs"
            )
        if version >= 0 and answer["ids"] and answer["version"] != str(version):
            raise StaleWeightsError(
                f"{name} was served with weights that sglang calls {answer['version']!r}; they should be {version}"
            )

    def _params(self, call: _Call) -> dict[str, Any]:
        params: SamplingParams = call.request.params
        seed = zlib.crc32(call.request.request_id.encode()) if params.seed is None else params.seed
        asked: dict[str, Any] = {
            "max_new_tokens": call.limit - len(call.tokens),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k if params.top_k > 0 else -1,
            "sampling_seed": seed,
            "ignore_eos": params.ignore_eos,
            "stop_token_ids": sorted({*self._end_ids, *params.stop_token_ids}),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if params.stop:
            asked["stop"] = list(params.stop)
        if params.is_greedy:
            # SGLang's greedy mode returns log-probs at temperature 1, ours are at the temperature asked for.
            if params.temperature in (0.0, 1.0):
                asked |= {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
            else:
                asked |= {"top_p": _ONLY_THE_LIKELIEST, "top_k": -1}
        return asked

    def _output(self, call: _Call, finish: str) -> TokenOutput:
        versions = call.versions or [self._version]
        return TokenOutput(
            token_ids=call.tokens,
            log_probs=call.log_probs if call.request.params.logprobs else None,
            finish_reason=finish,  # type: ignore[arg-type]
            weight_version_min=min(versions),
            weight_version_max=max(versions),
            stats=call.stats,
        )

    # ------------------------------------------------------------------ weights

    def _enter(self, call: _Call) -> bool:
        """Mark a request as one that an update has to wait for; False while an update is under way."""
        with self._lock:
            call.in_engine = self._updated is None
        return call.in_engine

    async def _until_updated(self) -> None:
        updated = self._updated
        if updated is not None:
            await asyncio.shield(asyncio.wrap_future(updated))

    async def _drain(self) -> None:
        """Call off in the engine what runs there; each request waits for the end of the update by itself."""
        while True:
            with self._lock:
                running = [call.rid for call in self._calls.values() if call.in_engine]
            if not running:
                return
            await self._process.call("abort", running)
            await asyncio.sleep(0.001)

    async def _begin(self) -> None:
        await self._drain()
        if self._ledger is not None:
            await self._process.call("end_session")
        self._ledger = WeightLedger(self._outline)
        await self._process.call("begin_update")

    def _open_ledger(self) -> WeightLedger:
        if self._ledger is None:
            raise RolloutError("weights came without a begin_update")
        return self._ledger

    async def _attempt(self, step: Any) -> None:
        """Make one step of an update; whatever goes wrong ends it and leaves the engine unusable until the next."""
        try:
            await step
        except Exception as error:
            self._unusable = f"its last weight update failed ({str(error).splitlines()[0]})"
            if self._ledger is not None:
                self._ledger = None
                await asyncio.gather(self._process.call("end_session"), return_exceptions=True)
            self._resume_waiting()
            raise

    def _resume_waiting(self) -> None:
        with self._lock:
            updated, self._updated = self._updated, None
        if updated is not None:
            updated.set_result(None)

    async def _load_from_memory(self, ledger: WeightLedger, bucket: WeightBucket) -> None:
        assert isinstance(bucket.data, np.ndarray)
        file = await asyncio.to_thread(self._write, bucket.data)
        try:
            await self._load(ledger, bucket, [{"file": str(file)}])
        finally:
            file.unlink(missing_ok=True)

    async def _load(
        self, ledger: WeightLedger, bucket: WeightBucket | SharedBucket, sources: list[dict[str, str]]
    ) -> None:
        """Count a bucket and have SGLang load it, from one source for all its ranks or one for each."""
        uncounted = [entry.name for entry in bucket.entries if not ledger.take(entry.name, entry.shape)]
        order = {
            "order": "bucket",
            "entries": [asdict(entry) for entry in bucket.entries],
            "checksum": bucket.checksum,
            "uncounted": uncounted,
        }
        await self._process.call("load_bucket", [{**order, **source} for source in sources])

    def _write(self, data: np.ndarray) -> Path:
        """Put a bucket where the schedulers can map it: shared memory if it fits."""
        folder = Path(self._process.folder)
        if shutil.disk_usage(folder).free < 2 * data.nbytes:
            folder = Path(tempfile.gettempdir())
        path = folder / f"ppo_sgl_bucket_{self._process.pid}_{next(self._numbers)}"
        data.tofile(path)
        return path

    async def _finish(self, ledger: WeightLedger, version: int) -> None:
        ledger.finish()
        reports = await self._process.call("finish_update", str(version))
        if len(reports) == 1 and reports[0]["held"] is not None and reports[0]["held"] != reports[0]["arrived"]:
            raise RolloutError(
                "the weights that sglang holds do not add up to those that were sent: it left some out or changed them"
            )

    def _keeps_weights(self) -> bool:
        return bool(self._config.engine_kwargs.sglang.get("enable_weights_cpu_backup"))
