"""From a YAML file and overrides to a validated configuration. Pure: no files but the YAML, no hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any

import yaml
from pydantic import ValidationError

from ppo_lib.config.explain import explain
from ppo_lib.config.ppo import PPOConfig
from ppo_lib.config.sources import Sources
from ppo_lib.config.tree import MISSING, copy, dotted, get, merge, put
from ppo_lib.config.yaml_text import describe_yaml_error, parse_value, read_yaml, scalar_text
from ppo_lib.errors import ConfigError


def load_config(path: str | FilePath | None = None, overrides: Iterable[str] = ()) -> PPOConfig:
    """The configuration of a YAML file (or none: the defaults), changed by overrides such as `trainer.seed=1`.

    The file may name others it builds on: `base: other.yaml` (or a list), relative to itself; later ones win, the file
    itself last, the overrides after it. Raises ConfigError with every problem found, where it was written, and what
    would be right. Keys that are renamed or ignored are logged, one line each, and stand in `notices`.
    """
    sources = Sources()
    tree = _read_with_bases(FilePath(path), sources, ()) if path is not None else {}
    for override in overrides:
        _apply(override, tree, sources)
    return build(tree, sources)


def as_config(config: Any) -> PPOConfig:
    """A PPOConfig from one, from a dictionary, or from an OmegaConf object."""
    if isinstance(config, PPOConfig):
        return config
    if type(config).__module__.split(".")[0] == "omegaconf":
        config = _resolved(config)
    if not isinstance(config, Mapping):
        raise ConfigError(f"expected a PPOConfig, a dictionary or an OmegaConf object, got {type(config).__name__}")
    try:
        tree = copy(config)
    except RecursionError:
        raise ConfigError("the configuration holds itself") from None
    return build(tree, Sources())


def build(tree: dict[str, Any], sources: Sources) -> PPOConfig:
    """Validate a tree of values; `sources` says where each was written."""
    try:
        return PPOConfig.model_validate(tree, context=sources)
    except ValidationError as error:
        raise ConfigError(explain(error, PPOConfig, sources)) from None


def _read_with_bases(file: FilePath, sources: Sources, above: tuple[FilePath, ...]) -> dict[str, Any]:
    if file.resolve() in [other.resolve() for other in above]:
        circle = " -> ".join(map(str, [*above, file]))
        raise ConfigError(f"configuration files build on each other in a circle: {circle}")
    own, written = read_yaml(file)
    bases = own.pop("base", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(
            f"{file}:{written[('base',)].line}: base must be a file name or a list of them, got {bases!r}"
        )
    tree: dict[str, Any] = {}
    for base in bases:
        base_file = file.parent / FilePath(base).expanduser()
        if not base_file.exists():
            raise ConfigError(f"{file}:{written[('base',)].line}: no such base file: {base_file}")
        tree = merge(tree, _read_with_bases(base_file, sources, (*above, file)))
    for path, (line, text) in written.items():
        sources.note(path, f"{file}:{line}", text)
    return merge(tree, own)


def _apply(override: str, tree: dict[str, Any], sources: Sources) -> None:
    key, equals, text = override.partition("=")
    path = tuple(key.strip().lstrip("+").split("."))
    if not equals or not all(path) or key.startswith(("-", "~")) or any(part.split() != [part] for part in path):
        hint = "; to give a key its default, leave it out" if key.startswith("~") else ""
        raise ConfigError(f"{override!r} is not an override; write section.key=value, such as trainer.seed=1{hint}")
    try:
        value = parse_value(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}{describe_yaml_error(error)}") from None
    for cut in range(1, len(path)):
        if not isinstance(found := get(tree, path[:cut]), dict) and found not in (MISSING, None):
            where = sources.of(path[:cut])
            raise ConfigError(f"override {override!r}: {dotted(path[:cut])} is the value {found!r}{where}, no section")
    put(tree, path, value)
    sources.note(path, f"override {override}", scalar_text(text))


def _resolved(config: Any) -> Any:
    """What an OmegaConf object holds, its interpolations replaced."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        said = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the OmegaConf object cannot be resolved: {error.full_key or 'at its top'}: {said}"
        ) from None
