"""Memory that was used before, for what arrives and for what is about to leave.

A batch is received, worked on and dropped at every step, and the next is of about the same size. Memory fresh from the
operating system costs several times what filling it costs, so the large blocks of dropped batches are kept here and
handed out again; what is kept is bounded. Nothing ever waits: while one thread looks, another does without.
"""

from __future__ import annotations

import threading
import weakref

import numpy as np

SMALLEST = 1 << 20  # bytes; what is smaller, the allocator keeps by itself
KEPT = 1 << 28  # bytes, in each process

_free: list[np.ndarray] = []  # oldest first
_lock = threading.Lock()  # only ever tried: a finalizer may come in the middle of anything, a fork too


def empty(size: int, dtype: np.dtype) -> np.ndarray:
    """`size` entries of a flat writable array with undefined content, which belongs to the caller alone.

    Its memory is handed out again only when the array, and every view, tensor and buffer made from it, is gone.
    """
    nbytes = size * dtype.itemsize
    if nbytes < SMALLEST:
        return np.empty(size, dtype)
    block = _taken(nbytes)
    if block is None:
        block = np.empty(nbytes, np.uint8)  # numpy asks for huge pages
    owner = np.frombuffer(block.data, np.uint8)  # what every view refers to, and the block does not
    weakref.finalize(owner, _give_back, block).atexit = False
    return owner[:nbytes].view(dtype)


def kept() -> int:
    """Bytes that wait to be handed out."""
    return sum(block.nbytes for block in list(_free))


def _taken(nbytes: int) -> np.ndarray | None:
    """The smallest block that holds `nbytes` without wasting a quarter of itself."""
    if not _lock.acquire(blocking=False):
        return None
    try:
        fitting = [at for at, block in enumerate(_free) if nbytes <= block.nbytes <= nbytes * 4 // 3]
        return _free.pop(min(fitting, key=lambda at: _free[at].nbytes)) if fitting else None
    finally:
        _lock.release()


def _give_back(block: np.ndarray) -> None:
    if block.nbytes > KEPT or not _lock.acquire(blocking=False):
        return
    try:
        _free.append(block)
        while kept() > KEPT:
            _free.pop(0)
    finally:
        _lock.release()
