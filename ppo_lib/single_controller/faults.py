"""Words for what went wrong on a rank: why its process ended, and where it hangs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.exceptions import RayError, RayTaskError

    from ppo_lib.single_controller.host import Place

__all__ = ["RankTraceback", "add_note", "hanging_at", "traceback_on_rank", "why_it_ended"]

_STACK_TIMEOUT_S = 2.0
_FRAMES_SHOWN = 3
_DETAIL = re.compile(r"(?:Worker exit detail|exit_detail)\s*[:=]\s*(?P<detail>[^\n]+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


class RankTraceback(Exception):
    """The traceback on the rank, as text: the cause of the error that the driver raises."""


def traceback_on_rank(error: RayTaskError) -> RankTraceback:
    """What Ray recorded on the rank, without the colours."""
    return RankTraceback("\n" + _COLOUR.sub("", str(error)))


def add_note(error: BaseException, note: str) -> None:
    """`error.add_note`, which Python 3.10 does not have; there the note is kept but not printed."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]


def why_it_ended(error: RayError) -> str:
    """The one line of Ray's report that says how the process ended."""
    text = str(error)
    if "exits with a connection error" in text:
        return "its process was killed (by hand, or for want of memory), crashed, or left with os._exit"
    if "temporarily unavailable" in text:
        return "it cannot be reached: its node is gone, or the way to it"
    detail = _DETAIL.search(text)
    if detail:
        return detail["detail"].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def hanging_at(place: Place, here: str) -> str | None:
    """The innermost lines that a rank's main thread is executing, as `file:line in function`, innermost first.

    Works while the rank is stuck in a collective or in C code. None where it cannot be known: the rank is on another
    node than `here`, or the system is not Linux.
    """
    stack = Path(f"/proc/{place.pid}/fd/{place.stack_fd}")
    if place.node_id != here or not stack.exists():
        return None
    with contextlib.suppress(OSError):
        before = len(stack.read_text())
        os.kill(place.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_TIMEOUT_S
        while time.monotonic() < deadline:
            time.sleep(0.05)
            frames = _method_frames(stack.read_text()[before:])
            if frames:
                return " < ".join(frames[:_FRAMES_SHOWN])
    return None


def _method_frames(dump: str) -> list[str]:
    """The frames inside the worker's method, out of a dump of all threads."""
    for thread in dump.split("\n\n"):
        frames = [match.groupdict() for match in _FRAME.finditer(thread)]
        ours = [i for i, f in enumerate(frames) if f["file"].endswith("single_controller/host.py")]
        if ours:
            return [f"{Path(f['file']).name}:{f['line']} in {f['function']}" for f in frames[: ours[0]]]
    return []
