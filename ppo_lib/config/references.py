"""`${a.b}` references, and the keys that follow another key."""

from __future__ import annotations

import functools
import re
from typing import Any

from pydantic.fields import FieldInfo

from ppo_lib.config.base import ConfigModel, follows, walk_fields
from ppo_lib.config.suggest import did_you_mean
from ppo_lib.config.tree import MISSING, Path, copy, dotted, get, put
from ppo_lib.config.yaml_text import parse_value
from ppo_lib.errors import ConfigError

_SELECT = "oc.select:"
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


@functools.cache
def fields_of(root: type[ConfigModel]) -> dict[Path, FieldInfo]:
    """Every key that acts, by path."""
    return dict(walk_fields(root))


@functools.cache
def sections_of(root: type[ConfigModel]) -> tuple[Path, ...]:
    """Every section, outermost first."""
    found = {path[:end]: None for path in fields_of(root) for end in range(1, len(path))}
    return tuple(sorted(found, key=len))


class Resolver:
    """Looks values up in a tree, falling back on what a key follows and on its default.

    Raises ConfigError for a reference to a key that does not exist, or that leads back to itself.
    """

    def __init__(self, tree: dict[str, Any], root: type[ConfigModel]):
        self.tree = tree
        self.fields = fields_of(root)
        self._under_way: list[Path] = []

    def expanded(self) -> dict[str, Any]:
        """The tree with every reference replaced."""
        return {name: self.expand(value, (str(name),)) for name, value in self.tree.items()}

    def fill(self) -> set[Path]:
        """Give every following key that is absent or null its value, in place; returns those keys."""
        filled = {
            path
            for path, field in self.fields.items()
            if follows(field) is not None and get(self.tree, path) in (MISSING, None)
        }
        for path in filled:
            put(self.tree, path, self.value(path))
        return filled

    def look_up(self, reference: str) -> Any:
        """The value of a reference such as "${trainer.seed}"."""
        return self.expand(reference, ())

    def value(self, path: Path) -> Any:
        """What `path` comes to: given, followed, or default."""
        if path in self._under_way:
            circle = " -> ".join(map(dotted, [*self._under_way, path]))
            raise ConfigError(f"references go round in a circle: {circle}")
        self._under_way.append(path)
        try:
            given = get(self.tree, path)
            field = self.fields.get(path)
            reference = follows(field) if field is not None else None
            if given is not MISSING and not (given is None and reference):
                return self.expand(given, path)
            if field is None:
                raise KeyError(dotted(path))
            return self.untyped(path)
        finally:
            self._under_way.pop()

    def untyped(self, path: Path) -> Any:
        """What a key comes to where nothing is given for it: what it follows, or its default."""
        reference = follows(self.fields[path])
        default = self.fields[path].get_default(call_default_factory=True)
        return self.expand(reference, path) if reference else copy(default)

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
            return self._follow(whole[1], path)
        return _REFERENCE.sub(lambda match: str(self._follow(match[1], path)), value)

    def _follow(self, reference: str, path: Path) -> Any:
        if reference.startswith(_SELECT):  # what the field's own files say for: this key's value, or else that
            key, _, otherwise = reference.removeprefix(_SELECT).partition(",")
            try:
                return self.value(_absolute(key.strip(), path))
            except KeyError:
                return parse_value(otherwise.strip()) if otherwise.strip() else None
        target = _absolute(reference.strip(), path)
        try:
            if target not in self.fields and isinstance(get(self.tree, target), dict):
                raise KeyError
            return self.value(target)
        except KeyError:
            if any(field[: len(target)] == target for field in self.fields):
                raise ConfigError(
                    f"{dotted(path)} refers to ${{{reference}}}, a section; only the value of a single key can be taken"
                ) from None
            known = [dotted(field) for field in self.fields]
            note = "only plain references such as ${trainer.seed} work" if ":" in reference else "there is no such key"
            raise ConfigError(
                f"{dotted(path)} refers to ${{{reference}}}: {note}{did_you_mean(dotted(target), known)}"
            ) from None


def _absolute(reference: str, path: Path) -> Path:
    """`.x` is a key beside the one at `path`, `..x` one level up, `x.y` a key from the top."""
    name = reference.lstrip(".")
    level = len(reference) - len(name)
    parent = path[:-level] if level else ()
    return (*parent, *name.split("."))
