"""`${a.b}` references, and the keys that follow another key."""

from __future__ import annotations

import re
from typing import Any

from ppo_lib.config.base import ConfigModel, follows, walk_fields
from ppo_lib.config.suggest import did_you_mean
from ppo_lib.config.tree import MISSING, Path, copy, dotted, get, put
from ppo_lib.errors import ConfigError

_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def resolve(tree: dict[str, Any], root: type[ConfigModel]) -> dict[str, Any]:
    """A copy of `tree` with every reference replaced, and every following key that is absent or null filled in.

    Raises ConfigError for a reference to a key that does not exist, or that leads back to itself.
    """
    resolver = _Resolver(tree, root)
    resolved = {name: resolver.expand(value, (str(name),)) for name, value in tree.items()}
    for path, field in resolver.fields.items():
        if follows(field) is not None and get(resolved, path) in (MISSING, None):
            put(resolved, path, resolver.value(path))
    return resolved


class _Resolver:
    def __init__(self, tree: dict[str, Any], root: type[ConfigModel]):
        self.tree = tree
        self.fields = dict(walk_fields(root))
        self._under_way: list[Path] = []

    def value(self, path: Path) -> Any:
        """What `path` comes to: given, followed, or default."""
        if path in self._under_way:
            circle = " -> ".join(map(dotted, [*self._under_way, path]))
            raise ConfigError(f"references go round in a circle: {circle}")
        self._under_way.append(path)
        try:
            given = get(self.tree, path)
            field = self.fields.get(path)
            if given is not MISSING and not (given is None and field is not None and follows(field)):
                return self.expand(given, path)
            if field is None:
                raise KeyError(dotted(path))
            reference = follows(field)
            return self.expand(reference, path) if reference else copy(field.get_default(call_default_factory=True))
        finally:
            self._under_way.pop()

    def expand(self, value: Any, path: Path) -> Any:
        """`value`, which stands at `path`, with its references replaced."""
        if isinstance(value, dict):
            return {name: self.expand(item, (*path, str(name))) for name, item in value.items()}
        if isinstance(value, list):
            return [self.expand(item, path) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        whole = _REFERENCE.fullmatch(value)
        if whole:
            return self._look_up(whole[1], path)
        return _REFERENCE.sub(lambda match: str(self._look_up(match[1], path)), value)

    def _look_up(self, reference: str, path: Path) -> Any:
        target = _absolute(reference.strip(), path)
        try:
            return self.value(target)
        except KeyError:
            hint = did_you_mean(dotted(target), [dotted(known) for known in self.fields])
            note = "only plain references such as ${trainer.seed} work" if ":" in reference else "there is no such key"
            raise ConfigError(f"{dotted(path)} refers to ${{{reference}}}: {note}{hint}") from None


def _absolute(reference: str, path: Path) -> Path:
    """`.x` is a key beside the one at `path`, `..x` one level up, `x.y` a key from the top."""
    name = reference.lstrip(".")
    level = len(reference) - len(name)
    parent = path[:-level] if level else ()
    return (*parent, *name.split("."))
