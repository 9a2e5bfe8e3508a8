"""The engine's host process, seen from the replica: started, called, and ended with everything below it.

Host and children form a process group of their own, so one signal ends them all. They end without one too: the host
kills its group when the socket to this process closes, which happens however this process ends.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from ppo_lib.errors import RolloutError, WorkerDiedError, WorkerTimeoutError

START_LIMIT_S = 1200.0
SEND_LIMIT_S = 20
_END_LIMIT_S = 10.0
_LINES_KEPT = 60
_LENGTH = struct.Struct("<Q")


class HostProcess:
    """Starts `ppo_lib.rollout.sglang.host` and calls its methods. Usable from any thread and event loop.

    Args:
        arguments: What `sglang.Engine` is called with.
        environment: Of the host; `TMPDIR` is where it leaves files.
        folder: That directory; removed at the end.
        fork: Start SGLang's processes by forking, which is quick but not for CUDA.
        echo: Repeat what they print.
    """

    def __init__(
        self, arguments: dict[str, Any], environment: dict[str, str], folder: str, fork: bool, echo: bool
    ) -> None:
        self.folder = folder
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._sending = threading.Lock()  # one of its own: whoever holds it may have to wait for the host
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._echo = echo
        self._gone: BaseException | None = None
        self._ended = False
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT_S, 0))
        self._socket = ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ppo_lib.rollout.sglang.host", str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._printer = threading.Thread(target=self._read_lines, name="ppo_lib-sglang-output", daemon=True)
        self._printer.start()
        threading.Thread(target=self._read_answers, name="ppo_lib-sglang-answers", daemon=True).start()
        self.started = self.submit("start", arguments, fork)

    @property
    def pid(self) -> int:
        """Of the host, which is also the id of its process group."""
        return self._process.pid

    def wait_until_ready(self, limit_s: float = START_LIMIT_S) -> dict[str, Any]:
        """What the host says of the started engine.

        Raises:
            RolloutError: It could not be started; the message ends with what it printed.
            WorkerTimeoutError: It was not ready in time. It is ended.
        """
        try:
            return self.started.result(limit_s)
        except TimeoutError:
            self.end()
            raise WorkerTimeoutError(
                f"the sglang engine was not ready within {limit_s:g} s{self._last_lines()}"
            ) from None
        except WorkerDiedError as error:
            raise RolloutError(f"the sglang engine could not be started: {error}") from None
        except RolloutError as error:
            self.end()
            raise RolloutError(f"the sglang engine could not be started: {error}{self._last_lines()}") from None

    async def call(self, method: str, *arguments: Any) -> Any:
        """Await one of the host's methods.

        Raises:
            WorkerDiedError: The engine is gone.
            RolloutError: What the host reports.
        """
        return await asyncio.wrap_future(self.submit(method, *arguments))

    def submit(self, method: str, *arguments: Any) -> Future[Any]:
        """Send a call; the future has the answer or the error. Cancelling it only forgets it."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._gone is not None:
                future.set_exception(self._gone)
                return future
            self._calls[number] = future
        try:
            send(self._socket, (number, method, arguments), self._sending)
        except BlockingIOError:  # a part of the message may be on its way, so that no other can follow
            self._lose(WorkerDiedError(f"the sglang engine hangs: it read nothing for {SEND_LIMIT_S} s"))
            self.end()
        except OSError:
            pass  # the reader meets the closed socket too, and answers every call
        return future

    def end(self, why: str = "it was shut down") -> None:
        """Kill the host and all below it, answer what waits, remove its files. Safe to call twice."""
        with self._lock:
            ended, self._ended = self._ended, True
        if ended:
            return  # the group's number may be another's by now
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT_S)
        self._lose(RolloutError(f"the sglang engine is gone: {why}"))
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read_answers(self) -> None:
        try:
            while True:
                number, succeeded, value = receive(self._socket)
                with self._lock:
                    future = self._calls.pop(number, None)
                if future is not None and future.set_running_or_notify_cancel():
                    future.set_result(value) if succeeded else future.set_exception(value)
        except (EOFError, OSError):
            pass
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_LIMIT_S)
        self._printer.join(1.0)
        self._lose(WorkerDiedError(f"the sglang engine died ({self._exit()}){self._last_lines()}"))
        self.end()

    def _lose(self, error: BaseException) -> None:
        with self._lock:
            self._gone = self._gone or error
            calls, self._calls = list(self._calls.values()), {}
        for future in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._gone)

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if line:
                self._lines.append(line)
                if self._echo:
                    print(line, file=sys.stderr, flush=True)

    def _last_lines(self) -> str:
        return "".join(f"\n  | {line}" for line in list(self._lines)[-15:])

    def _exit(self) -> str:
        code = self._process.poll()
        if code is not None and code < 0:
            return f"its process ended by {signal.Signals(-code).name}"
        return "its process hangs" if code is None else f"its process left with code {code}"


def make_folder() -> str:
    """A directory for an engine's files: in shared memory where there is one. Socket paths must be short."""
    for parent in ("/dev/shm", None):
        with suppress(OSError):
            return tempfile.mkdtemp(prefix="ppo_sgl_", dir=parent)
    raise RolloutError("there is no directory to write to for temporary files: set TMPDIR")


def send(to: socket.socket, value: Any, lock: threading.Lock) -> None:
    """Write one message."""
    data = pickle.dumps(value, protocol=5)
    with lock:
        to.sendall(_LENGTH.pack(len(data)) + data)


def receive(source: socket.socket) -> Any:
    """Read one message. Raises `EOFError` where the other end is closed."""
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    return pickle.loads(_exactly(source, length))


def _exactly(source: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = source.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
