"""Where an envelope's fields and row order come from.

Every envelope carries `lineage`, a tuple of entries, oldest first. Operations that write, move or drop fields or rows
add one; who runs a stage opens `stage(name)`, so that entries say under which stage they were made. It costs a tuple
per operation and travels with the envelope.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

_current: ContextVar[str] = ContextVar("protocol_stage", default="")


class LineageEntry(NamedTuple):
    """One thing that happened to an envelope."""

    stage: str  # "" outside any stage
    op: str  # "write", "repeat", "reorder", "union", ...
    fields: tuple[str, ...] = ()  # which fields; empty where it concerns all rows


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Attribute what happens inside to the stage `name`."""
    token = _current.set(name)
    try:
        yield
    finally:
        _current.reset(token)


def current_stage() -> str:
    """Name of the innermost open stage, "" outside any."""
    return _current.get()
