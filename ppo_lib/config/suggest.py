"""The nearest right word for a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word closest to `word`, if any is close."""
    known = list(known)
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[near[0]] if near else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a sentence: "; did you mean X?", or "" where nothing is close."""
    near = nearest(word, known)
    return f"; did you mean {near}?" if near else ""


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The known dotted key closest to `key`: the same last word elsewhere counts as close."""
    known = list(known)
    section, _, last = key.rpartition(".")
    beside = [name for name in known if name.rpartition(".")[0] == section]
    near = nearest(last, [name.rpartition(".")[2] for name in beside])
    if near:
        return f"{section}.{near}" if section else near
    same_word = [name for name in known if name.rpartition(".")[2] == last]
    if same_word:
        return nearest(key, same_word) or same_word[0]
    return nearest(key, known, cutoff=0.8)
