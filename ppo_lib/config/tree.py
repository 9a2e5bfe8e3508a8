"""Nested dictionaries by dotted path: what YAML gives, before it is a configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

Path = tuple[str, ...]
MISSING: Any = object()


def dotted(path: Path) -> str:
    """`("a", "b")` as "a.b"."""
    return ".".join(path)


def get(tree: Any, path: Path) -> Any:
    """The value at `path`, or MISSING."""
    for name in path:
        if not isinstance(tree, Mapping) or name not in tree:
            return MISSING
        tree = tree[name]
    return tree


def put(tree: dict[str, Any], path: Path, value: Any) -> bool:
    """Set the value at `path`, making sections on the way; False where a plain value stands in the way."""
    for name in path[:-1]:
        if tree.get(name) is None:
            tree[name] = {}
        if not isinstance(tree[name], dict):
            return False
        tree = tree[name]
    tree[path[-1]] = value
    return True


def remove(tree: dict[str, Any], path: Path) -> None:
    """Drop the value at `path`, and sections that it leaves empty."""
    parents = [tree]
    for name in path[:-1]:
        parents.append(parents[-1][name])
    for parent, name in zip(reversed(parents), reversed(path)):
        del parent[name]
        if parent:
            return


def leaves(tree: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every plain value (and every empty section) with its path."""
    for name, value in tree.items():
        path = (*prefix, str(name))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `under`: sections merge, everything else (lists too) is replaced. Neither is changed."""
    merged = dict(under)
    for name, value in over.items():
        below = merged.get(name)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[name] = merge(below, value)
        else:
            merged[name] = copy(value)
    return merged


def copy(value: Any) -> Any:
    """A deep copy of dictionaries and lists; tuples become lists, paths texts, arrays and their numbers Python's."""
    if isinstance(value, Mapping):
        return {name: copy(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [copy(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value.tolist() if hasattr(value, "shape") and hasattr(value, "tolist") else value
