"""pydantic's errors as sentences that name the key, the place, and the nearest right thing."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ppo_lib.config.base import ConfigModel, walk_fields
from ppo_lib.config.sources import Sources
from ppo_lib.config.suggest import did_you_mean, nearest_key
from ppo_lib.config.tree import Path, dotted

_EXPECTED = {
    "int_type": "expected an integer",
    "int_parsing": "expected an integer",
    "int_from_float": "expected an integer",
    "float_type": "expected a number",
    "float_parsing": "expected a number",
    "bool_type": "expected true or false",
    "bool_parsing": "expected true or false",
    "string_type": "expected text",
    "tuple_type": "expected a list",
    "dict_type": "expected a mapping",
    "model_type": "expected a section",
    "model_attributes_type": "expected a section",
}


def explain(error: ValidationError, root: type[ConfigModel], sources: Sources) -> str:
    """All problems, one a line; a key that follows a wrong one is not mentioned again."""
    problems = error.errors()
    written = [problem for problem in problems if tuple(map(str, problem["loc"])) not in sources.following]
    return "\n".join(_sentence(problem, root, sources) for problem in written or problems)


def _sentence(problem: Any, root: type[ConfigModel], sources: Sources) -> str:
    path: Path = tuple(str(part) for part in problem["loc"])
    kind, given, context = problem["type"], problem["input"], problem.get("ctx", {})
    where = sources.of(path)
    if kind == "extra_forbidden" and "." in path[-1]:
        return f"unknown key {path[-1]!r}{where}: in a file each key stands under its section, not behind dots"
    if kind == "extra_forbidden":
        return f"unknown key {dotted(path)}{where}{_near_key(path, root)}"
    if kind == "value_error" and not path:
        return str(context["error"])
    if kind == "value_error":
        return f"{dotted(path)}: {context['error']}{where}"
    if kind == "literal_error":
        choices = [choice.strip("'\"") for choice in context["expected"].replace(" or ", ", ").split(", ")]
        hint = did_you_mean(str(given), choices)
        return f"{dotted(path)}: {given!r} is not one of {', '.join(choices)}{where}{hint}"
    if kind in _EXPECTED:
        return f"{dotted(path)}: {_EXPECTED[kind]}, got {_short(given)}{where}"
    if kind in ("too_short", "too_long"):
        limit = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return f"{dotted(path)}: expected {limit} values, got {_short(given)}{where}"
    message = problem["msg"][0].lower() + problem["msg"][1:]
    return f"{dotted(path)}: {message}, got {_short(given)}{where}"


def _near_key(path: Path, root: type[ConfigModel]) -> str:
    sections, keys = set(), []
    for known, _ in walk_fields(root):
        keys.append(dotted(known))
        sections.update(dotted(known[:end]) for end in range(1, len(known)))
    around = {dotted(path[:end]) for end in range(1, len(path))}
    near = nearest_key(dotted(path), [*keys, *sorted(sections - around)])
    return f"; did you mean {near}?" if near else ""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
