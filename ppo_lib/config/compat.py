"""What becomes of keys that launch scripts bring along and that no section here has. The table is compat.tsv."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path as FilePath
from typing import Any

from ppo_lib.config.sources import Sources
from ppo_lib.config.tree import MISSING, Path, dotted, get, leaves, put, remove
from ppo_lib.config.yaml_text import parse_value
from ppo_lib.errors import ConfigError


@dataclass(frozen=True)
class CompatRow:
    """One line of compat.tsv; its first lines say what the columns mean."""

    key: str
    fate: str
    detail: str
    why: str

    def fits(self, key: str) -> bool:
        """Whether the line is about `key`; an empty section fits the line about what is in it."""
        return fnmatchcase(key, self.key) or fnmatchcase(f"{key}.", self.key)

    def target(self, key: str) -> Path:
        """The newer name of `key`."""
        if self.detail.endswith("*"):
            key = self.detail[:-1] + key[len(self.key) - 1 :]
        else:
            key = self.detail
        return tuple(key.rstrip(".").split("."))


@functools.cache
def compat_rows() -> tuple[CompatRow, ...]:
    """The table, in the order that counts."""
    text = FilePath(__file__).with_name("compat.tsv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return tuple(CompatRow(*line.split("\t")) for line in lines[1:])


def compat_row(key: str) -> CompatRow | None:
    """The line about a dotted key, or None."""
    return next((row for row in compat_rows() if row.fits(key)), None)


Acts = Callable[[Path], bool]
"""Whether a section has the key at a path, or passes on whatever stands there."""


def rename(tree: dict[str, Any], sources: Sources, acts: Acts) -> list[str]:
    """Move older names to the newer, in place; one line for each.

    Raises ConfigError where the older and the newer name are both set and differ.
    """
    notices = []
    for path, value in list(leaves(tree)):
        row = None if acts(path) else compat_row(dotted(path))
        if row is None or row.fate != "renamed":
            continue
        new = row.target(dotted(path))
        remove(tree, path)
        if value is None:
            continue
        other = get(tree, new)
        if other not in (MISSING, None, value):
            raise ConfigError(
                f"{dotted(path)} is an older name of {dotted(new)}, and the two differ:"
                f" {value!r}{sources.of(path)} and {other!r}{sources.of(new)}"
            )
        put(tree, new, value)
        sources.move(path, new)
        notices.append(f"{dotted(path)} is read as {dotted(new)}: {row.why}")
    return notices


def retire(tree: dict[str, Any], sources: Sources, acts: Acts, look_up: Callable[[str], Any]) -> list[str]:
    """Take out of `tree` what no section has, in place; one line for each line of the table that was used.

    `look_up` resolves a reference. Raises ConfigError that lists every refused key.
    """
    used: dict[CompatRow, list[str]] = defaultdict(list)
    refused, notices = [], []
    for path, value in list(leaves(tree)):
        row = None if acts(path) else compat_row(dotted(path))
        if row is None or row.fate == "renamed":
            continue
        remove(tree, path)
        if row.fate == "per_rank":
            notices += _per_rank(row, path, value, tree, sources, look_up)
        elif row.fate == "ignored" or value is None or _asks_for_nothing(value, row, look_up):
            used[row].append(dotted(path))
        else:
            refused.append(f"{dotted(path)}={value}{sources.of(path)}: {row.why}")
    if refused:
        raise ConfigError("\n".join(refused))
    for row, keys in used.items():
        verb = ("is ignored", "are ignored") if row.fate == "ignored" else ("changes nothing", "change nothing")
        notices.append(f"{', '.join(keys)} {verb[len(keys) > 1]}: {row.why}")
    return notices


def _asks_for_nothing(value: Any, row: CompatRow, look_up: Callable[[str], Any]) -> bool:
    for text in row.detail.split("|"):
        accepted = look_up(text) if text.startswith("${") else parse_value(text)
        if value == accepted and isinstance(value, bool) == isinstance(accepted, bool):
            return True
    return False


def _per_rank(
    row: CompatRow, path: Path, value: Any, tree: dict[str, Any], sources: Sources, look_up: Callable[[str], Any]
) -> list[str]:
    if value is None:
        return []
    new = row.target(dotted(path))
    if get(tree, new) not in (MISSING, None):
        raise ConfigError(
            f"{dotted(path)}{sources.of(path)} and {dotted(new)}{sources.of(new)} are both set; keep the second,"
            " which counts rows per rank"
        )
    nodes, per_node = look_up("${trainer.nnodes}"), look_up("${trainer.n_gpus_per_node}")
    if isinstance(value, bool) or not all(
        isinstance(number, int) and number > 0 for number in (value, nodes, per_node)
    ):
        put(tree, new, value)  # the section's own check says what is wrong with it
        sources.move(path, new)
        return []
    ranks = nodes * per_node
    rows = math.ceil(value / ranks)
    put(tree, new, rows)
    sources.move(path, new)
    return [f"{dotted(path)}={value} over {ranks} ranks is read as {dotted(new)}={rows}"]
