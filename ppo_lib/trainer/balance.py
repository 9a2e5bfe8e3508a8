"""Split rows over data-parallel ranks so that all get about the same number of tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.errors import BatchMismatchError

_TRIED = 8  # fullest and emptiest parts among which an exchange is looked for


def balanced_partitions(lengths: Sequence[float], parts: int, equal_size: bool) -> list[list[int]]:
    """Indices of `lengths` in `parts` lists whose total lengths are as equal as can be had quickly.

    Longest first, each index goes to the part with the least so far (of those not yet served in this round, if sizes
    must be equal). Then, while it helps, the fullest and the emptiest part exchange the pair that levels them best, or
    one index moves. Random lengths end within one token of each other. The result depends on the arguments alone.

    Args:
        lengths: tokens, or any measure of work, per row; at least 0.
        parts: how many lists.
        equal_size: whether all lists must have the same number of indices.

    Returns:
        `parts` ascending lists, none empty, that hold every index once.

    Raises:
        BatchMismatchError: fewer rows than parts, or a number that does not divide where sizes must be equal.
    """
    if not 1 <= parts <= len(lengths):
        raise BatchMismatchError(f"cannot split {len(lengths)} rows into {parts} parts that are not empty")
    if equal_size and len(lengths) % parts:
        raise BatchMismatchError(f"cannot split {len(lengths)} rows into {parts} parts of equal size")
    work = np.asarray(lengths)
    order = np.argsort(-work, kind="stable")
    members = _deal_rounds(work, order, parts) if equal_size else _deal_longest_first(work, order, parts)
    _level(work, members, may_move=not equal_size)
    return [sorted(part.tolist()) for part in members]


def log_seqlen_unbalance(
    lengths: Sequence[float], partitions: Sequence[Sequence[int]], prefix: str = "global_seqlen"
) -> dict[str, float]:
    """The tokens of a part, as rows stood before balancing and as they stand after.

    Args:
        lengths: tokens per row, in the order before balancing.
        partitions: the indices of `lengths` that each part got.
        prefix: of the metric names.

    Returns:
        `min`, `max`, `minmax_diff` of equal contiguous parts, `balanced_min`, `balanced_max` of `partitions`, `mean`.
    """
    work = np.asarray(lengths)
    before = [float(part.sum()) for part in np.array_split(work, len(partitions))]
    after = [float(work[list(part)].sum()) for part in partitions]
    return {
        f"{prefix}/min": min(before),
        f"{prefix}/max": max(before),
        f"{prefix}/minmax_diff": max(before) - min(before),
        f"{prefix}/balanced_min": min(after),
        f"{prefix}/balanced_max": max(after),
        f"{prefix}/mean": sum(after) / len(after),
    }


def _deal_rounds(work: np.ndarray, order: np.ndarray, parts: int) -> list[np.ndarray]:
    """One index to each part a round: the longest of the round to the part with the least."""
    totals = np.zeros(parts, dtype=work.dtype)
    rounds = order.reshape(-1, parts).copy()
    for row in rounds:
        row[np.argsort(totals, kind="stable")] = row.copy()  # row[p] is now what part p gets
        totals += work[row]
    return list(rounds.T.copy())


def _deal_longest_first(work: np.ndarray, order: np.ndarray, parts: int) -> list[np.ndarray]:
    """Every index to the part with the least so far; of equal ones to the one with fewest, so that none stays empty."""
    members: list[list[int]] = [[] for _ in range(parts)]
    least = [(0, 0, part) for part in range(parts)]  # total, size, part: a heap
    for index, length in zip(order.tolist(), work[order].tolist()):
        total, size, part = least[0]
        members[part].append(index)
        heapq.heapreplace(least, (total + length, size + 1, part))
    return [np.array(part) for part in members]


def _level(work: np.ndarray, members: list[np.ndarray], may_move: bool) -> None:
    """Exchange indices between the fullest and the emptiest parts until they are level or no exchange helps."""
    totals = np.array([work[part].sum() for part in members])
    for _ in range(32 * len(members)):  # each exchange helps; the bound only caps the time on fractional lengths
        found = _next_exchange(work, members, totals, may_move)
        if found is None:
            return
        high, low, given, taken, moved = found
        if taken is None:
            members[low] = np.append(members[low], members[high][given])
            members[high] = np.delete(members[high], given)
        else:
            members[high][given], members[low][taken] = members[low][taken], members[high][given]
        totals[high] -= moved
        totals[low] += moved


def _next_exchange(work: np.ndarray, members: list[np.ndarray], totals: np.ndarray, may_move: bool) -> Any:
    """(high, low, given, taken, moved) for the first of the widest apart pairs of parts that an exchange levels."""
    ascending = np.argsort(totals, kind="stable").tolist()
    for high in reversed(ascending[-_TRIED:]):
        for low in ascending[:_TRIED]:
            gap = totals[high] - totals[low]
            exchange = _best_exchange(work[members[high]], work[members[low]], gap, may_move) if gap > 1 else None
            if exchange is not None:
                return high, low, *exchange
    return None


def _best_exchange(high: np.ndarray, low: np.ndarray, gap: Any, may_move: bool) -> tuple[int, int | None, Any] | None:
    """What the fuller part gives, what it takes for it (None: nothing), and the work that moves, nearest to gap / 2.

    None if no exchange moves more than 0 and less than the gap, which is what brings the two closer.
    """
    by_length = np.argsort(low, kind="stable")
    sorted_low = low[by_length]
    at = np.searchsorted(sorted_low, high - gap / 2)
    candidates = []
    for neighbour in (at - 1, at):
        inside = (neighbour >= 0) & (neighbour < len(low))
        taken = neighbour.clip(0, len(low) - 1)
        candidates.append((np.where(inside, high - sorted_low[taken], 0), by_length[taken]))
    if may_move:
        candidates.append((high, None))
    best = None
    for moved, taken in candidates:
        error = np.where((moved > 0) & (moved < gap), np.abs(moved - gap / 2), np.inf)
        given = int(error.argmin())
        if error[given] < np.inf and (best is None or error[given] < best[0]):
            best = error[given], given, None if taken is None else int(taken[given]), moved[given]
    return None if best is None else best[1:]
