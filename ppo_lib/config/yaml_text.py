"""YAML as people mean it: `1e-6` is a float, only true and false are booleans, and each key knows its line."""

from __future__ import annotations

import re
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import yaml

from ppo_lib.config.tree import Path
from ppo_lib.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with the resolvers below instead of YAML 1.1's (where `no` is false and `1e-6` is a string)."""


_TAG = "tag:yaml.org,2002:"
_DROPPED = {f"{_TAG}bool", f"{_TAG}timestamp", f"{_TAG}float", f"{_TAG}int"}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _DROPPED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _resolve(kind: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(_TAG + kind, re.compile(pattern), list(first))


_resolve("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
# an underscore groups thousands (1_000) and nothing else: "0.5_2" is a pair of bounds, not 0.52
_resolve("int", r"^[-+]?(?:0|[1-9][0-9]*|[1-9][0-9]{0,2}(?:_[0-9]{3})+|0x[0-9a-fA-F]+)$", "-+0123456789")
_resolve(
    "float",
    r"^[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$",
    "-+.0123456789",
)


def parse_value(text: str) -> Any:
    """The value of an override: YAML, except that nothing at all is an empty string.

    `{a:1}`, which YAML reads as a key "a:1" without value, is the mapping that launch scripts mean by it.
    """
    return _split_tight_pairs(yaml.load(text, Loader=_Loader)) if text.strip() else ""


def scalar_text(text: str) -> str | None:
    """The text of an override's value where that is a plain one."""
    node = yaml.compose(text, Loader=_Loader) if text.strip() else None
    return node.value if isinstance(node, yaml.ScalarNode) else None


def _split_tight_pairs(value: Any) -> Any:
    if isinstance(value, list):
        return [_split_tight_pairs(item) for item in value]
    if not isinstance(value, dict):
        return value
    pairs = {}
    for key, item in value.items():
        if item is None and isinstance(key, str) and ":" in key:
            key, _, text = key.partition(":")
            item = parse_value(text)
        pairs[key] = _split_tight_pairs(item)
    return pairs


MOST_VALUES = 100_000


class Written(NamedTuple):
    """Where a key stands in a file, and the text of a plain value: `010` is another name than the number 10."""

    line: int
    text: str | None


def read_yaml(file: FilePath) -> tuple[dict[str, Any], dict[Path, Written]]:
    """The mapping in a file, and how each key was written.

    Raises ConfigError: no such file, not text, broken YAML (with its line), a key given twice, no mapping at the top.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no such configuration file: {file}") from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder; name a YAML file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error}") from None
    written: dict[Path, Written] = {}
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is not None:
            if _values_in(node, {}) > MOST_VALUES:
                raise ConfigError(f"{file}: its aliases stand for more than {MOST_VALUES} values")
            _note(node, (), written, file)
        value = yaml.load(text, Loader=_Loader)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}{describe_yaml_error(error)}") from None
    except (ValueError, TypeError) as error:  # a tag that its value does not fit, such as `!!int foo`
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file}: an alias refers to what it stands in, or the nesting is too deep") from None
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected sections such as `data:` and `trainer:` at the top, got {value!r}")
    return value, written


def _values_in(node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for, its aliases counted each time. RecursionError if it stands in itself."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = -1
        below = [part for each in node.value for part in (each if isinstance(each, tuple) else (each,))]
        known[id(node)] = 1 + sum(_values_in(each, known) for each in below)
    if known[id(node)] < 0:
        raise RecursionError
    return known[id(node)]


def describe_yaml_error(error: yaml.YAMLError) -> str:
    """What goes after the name of a file: ":LINE:COLUMN: what is wrong"."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    context = getattr(error, "context", None)
    return f"{where}: not valid YAML: {problem}" + (f" ({context})" if context else "")


def _note(node: yaml.Node, path: Path, written: dict[Path, Written], file: FilePath) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen:
            where = ".".join((*path, name))
            raise ConfigError(f"{file}:{line}: {where} is given twice, first in line {seen[name]}")
        seen[name] = line
        written[(*path, name)] = Written(line, value.value if isinstance(value, yaml.ScalarNode) else None)
        _note(value, (*path, name), written, file)
