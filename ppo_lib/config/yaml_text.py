"""YAML as people mean it: `1e-6` is a float, only true and false are booleans, and each key knows its line."""

from __future__ import annotations

import re
from pathlib import Path as FilePath
from typing import Any

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


def read_yaml(file: FilePath) -> tuple[dict[str, Any], dict[Path, int]]:
    """The mapping in a file, and the line of each key.

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
    loader = _Loader(text)
    lines: dict[Path, int] = {}
    try:
        node = loader.get_single_node()
        if node is not None:
            _note_lines(node, (), lines, file)
        value = {} if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}{describe_yaml_error(error)}") from None
    except (ValueError, TypeError) as error:  # a tag that its value does not fit, such as `!!int foo`
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file}: an alias refers to what it stands in, or the nesting is too deep") from None
    finally:
        loader.dispose()
    if value is None:
        value = {}
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected sections such as `data:` and `trainer:` at the top, got {value!r}")
    return value, lines


def describe_yaml_error(error: yaml.YAMLError) -> str:
    """What goes after the name of a file: ":LINE:COLUMN: what is wrong"."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    problem = getattr(error, "problem", None) or str(error)
    context = getattr(error, "context", None)
    return f"{where}: not valid YAML: {problem}" + (f" ({context})" if context else "")


def _note_lines(node: yaml.Node, path: Path, lines: dict[Path, int], file: FilePath) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen:
            where = ".".join((*path, name))
            raise ConfigError(f"{file}:{line}: {where} is given twice, first in line {seen[name]}")
        seen[name] = line
        lines[(*path, name)] = line
        _note_lines(value, (*path, name), lines, file)
