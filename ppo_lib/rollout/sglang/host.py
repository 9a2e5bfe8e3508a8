"""Runs in a process of its own and owns `sglang.Engine`. Called as `python -m ppo_lib.rollout.sglang.host SOCKET_FD`.

Why a process: SGLang sets the process's event loop policy, signal handlers and start method, and ends by killing every
child of the process it lives in. None of that may happen to a driver or a Ray worker.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing.context
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ppo_lib.errors import PPOLibError, RolloutError
from ppo_lib.rollout.sglang import versions
from ppo_lib.rollout.sglang.arguments import LOADER
from ppo_lib.rollout.sglang.process import receive, send

_ABORT_AGAIN_S = 0.05
_IDLE_LIMIT_S = 10.0


class Host:
    """What the replica can call; each method's name is a message.

    Args:
        engine: The `sglang.Engine`.
        folder: For reports of the weight loader.
    """

    def __init__(self, engine: Any, folder: str) -> None:
        from sglang.srt.managers import io_struct

        self._io = io_struct
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._report = Path(folder) / "report"
        self._active: set[str] = set()

    def facts(self) -> dict[str, Any]:
        """What the replica wants to know of the engine."""
        info = self._engine._scheduler_init_result.scheduler_infos[0]
        return {
            "max_total_num_tokens": info.get("max_total_num_tokens"),
            "has_session": versions.has_update_session(self._manager),
            "pid": os.getpid(),
        }

    async def generate(self, rid: str, prompt_ids: list[int], params: dict[str, Any], logprobs: bool) -> dict[str, Any]:
        """Continue one prompt; returns the parts of the answer that cross to the replica."""
        request = self._io.GenerateReqInput(
            input_ids=prompt_ids, sampling_params=params, return_logprob=logprobs, rid=rid, stream=False
        )
        self._active.add(rid)
        try:
            answer = await anext(self._manager.generate_request(request, None))
        finally:
            self._active.discard(rid)
        meta = answer["meta_info"]
        finish = meta["finish_reason"]
        return {
            "ids": list(answer["output_ids"]),
            "log_probs": [value for value, *_ in meta.get("output_token_logprobs", [])] if logprobs else None,
            "finish": finish["type"],
            "matched": finish.get("matched"),
            "message": finish.get("message"),
            "version": meta.get("weight_version"),
            "stats": {name: float(meta[name]) for name in ("spec_accept_rate", "spec_accept_length") if name in meta},
        }

    async def abort(self, rids: list[str]) -> None:
        """Call requests off, and see it done; their `generate` answers with what they have."""
        while rids := [rid for rid in rids if rid in self._active]:
            for rid in rids:
                state = self._manager.rid_to_state.get(rid)
                if state is not None and hasattr(state, "abort_sent"):
                    state.abort_sent = False  # an abort that overtook its request on the way was lost
                self._manager.abort_request(rid)
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def ping(self) -> None:
        """Come back through the scheduler, so that an answer means that it runs."""
        await self._manager.get_internal_state()

    async def flush(self) -> None:
        """Drop the prefix cache. SGLang does so only when idle, which it is a moment after its last answer."""
        deadline = time.monotonic() + _IDLE_LIMIT_S
        while not (answer := await self._manager.flush_cache()).success:
            if time.monotonic() > deadline:
                raise RolloutError(f"sglang did not flush its cache: {getattr(answer, 'message', 'it is not idle')}")
            await asyncio.sleep(0.01)

    async def release(self, tags: list[str]) -> None:
        """Give memory up. Asked when it is not idle, SGLang would end."""
        await self.flush()
        await self._manager.release_memory_occupation(self._io.ReleaseMemoryOccupationReqInput(tags=tags), None)

    async def resume(self, tags: list[str]) -> None:
        """Take memory back."""
        await self._manager.resume_memory_occupation(self._io.ResumeMemoryOccupationReqInput(tags=tags), None)

    async def begin_update(self) -> None:
        """Open an update of the weights."""
        if versions.has_update_session(self._manager):
            _checked(await self._manager.begin_weight_update(self._io.BeginWeightUpdateReqInput(), None))
        await self._order({"order": "begin"})

    async def load_bucket(self, orders: list[dict[str, Any]]) -> None:
        """Load one bucket; one order for all ranks, or one for each."""
        await self._order(*orders)

    async def finish_update(self, version: str) -> list[dict[str, Any]]:
        """Close the update, drop what was cached under the old weights; returns each rank's sums."""
        reports = await self._order({"order": "check"}, version=version)
        await self.end_session()
        await self.flush()
        return reports

    async def end_session(self) -> None:
        """Close an update."""
        if versions.has_update_session(self._manager):
            _checked(await self._manager.end_weight_update(self._io.EndWeightUpdateReqInput(), None))

    async def _order(self, *orders: dict[str, Any], version: str | None = None) -> list[dict[str, Any]]:
        """Have every rank's weight loader do something, and read what it reports."""
        import torch
        from sglang.srt.utils import MultiprocessingSerializer

        ranks = self._engine.server_args.tp_size
        payloads = [
            MultiprocessingSerializer.serialize([(json.dumps({**order, "report": str(self._report)}), torch.empty(0))])
            for order in (orders if len(orders) > 1 else orders * ranks)
        ]
        kind: Any = self._io.UpdateWeightsFromTensorReqInput
        target = {"selector": "target"} if versions.selects_runners(kind) else {"disable_draft_model": True}
        request = kind(
            serialized_named_tensors=payloads, load_format=LOADER, flush_cache=False, weight_version=version, **target
        )
        _checked(await self._manager.update_weights_from_tensor(request, None))
        reports = [self._read_report(rank) for rank in range(ranks)]
        for rank, report in enumerate(reports):
            if "error" in report:
                where = f" (rank {rank})" if ranks > 1 else ""
                raise RolloutError(f"sglang could not take over the weights{where}: {report['error']}")
        return reports

    def _read_report(self, rank: int) -> dict[str, Any]:
        path = Path(f"{self._report}.{rank}")
        if not path.exists():
            raise RolloutError(f"sglang reported success and rank {rank} loaded nothing")
        report = json.loads(path.read_text())
        path.unlink()
        return report


def _checked(answer: Any) -> None:
    """Refuse an answer that is not a success: sglang reports failures by a flag."""
    success, message = (answer[0], answer[1]) if isinstance(answer, tuple) else (answer.success, answer.message)
    if not success:
        raise RolloutError(f"sglang refused the weight update: {message}")


class _Forking(multiprocessing.context.ForkContext):
    """Stands for the module `multiprocessing` where SGLang starts its processes."""

    def set_start_method(self, method: str | None, force: bool = False) -> None:
        """SGLang asks for spawn."""


def start_engine(arguments: dict[str, Any], fork: bool) -> Any:
    """Build the engine. With `fork` its processes are copies of this one, which has SGLang imported already."""
    importlib.import_module("sglang.srt.managers.scheduler")
    module: Any = importlib.import_module("sglang.srt.entrypoints.engine")
    if fork:
        module.mp = _Forking()
        _leave_out_batch_invariant_kernels()
    return module.Engine(**arguments)


def _leave_out_batch_invariant_kernels() -> None:
    """Deterministic mode swaps in CUDA kernels; without a GPU only its way of drawing tokens is left."""
    operations: Any = importlib.import_module("sglang.srt.batch_invariant_ops")
    operations.enable_batch_invariant_mode = lambda *_, **__: None


def main(descriptor: int) -> None:
    """Serve the replica at the other end of the socket until it goes."""
    connection = socket.socket(fileno=descriptor)
    # A forked scheduler that held this end would hide from the replica that the host is gone.
    os.register_at_fork(after_in_child=connection.close)
    inbox: queue.SimpleQueue[tuple[int, str, tuple[Any, ...]]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, inbox), daemon=True).start()
    lock = threading.Lock()
    number, _, (arguments, fork) = inbox.get()
    try:
        engine = start_engine(arguments, fork)
        host = Host(engine, os.environ["TMPDIR"])
        send(connection, (number, True, host.facts()), lock)
    except BaseException as error:
        send(connection, (number, False, RolloutError(f"{type(error).__name__}: {error}")), lock)
        os.killpg(0, signal.SIGKILL)
    engine.loop.run_until_complete(_serve(host, connection, inbox, lock))


def _read(connection: socket.socket, inbox: queue.SimpleQueue[Any]) -> None:
    try:
        while True:
            inbox.put(receive(connection))
    except BaseException:  # the replica is gone, and with it the use of this whole group
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
        os.killpg(0, signal.SIGKILL)


async def _serve(host: Host, connection: socket.socket, inbox: queue.SimpleQueue[Any], lock: threading.Lock) -> None:
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            value, succeeded = await getattr(host, method)(*arguments), True
        except PPOLibError as error:
            value, succeeded = error, False
        except Exception as error:
            value, succeeded = RolloutError(f"sglang: {type(error).__name__}: {error}"), False
        send(connection, (number, succeeded, value), lock)

    def begin(message: tuple[int, str, tuple[Any, ...]]) -> None:
        task = loop.create_task(answer(*message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def pump() -> None:
        while True:
            loop.call_soon_threadsafe(begin, inbox.get())

    threading.Thread(target=pump, daemon=True).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
