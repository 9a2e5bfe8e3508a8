"""The rollout engines by name. A name's module is imported when it is used, since an engine may be a heavy package."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from ppo_lib.algorithms.names import unknown_name
from ppo_lib.errors import RolloutError
from ppo_lib.rollout.engine import RolloutEngine

_ENGINES: dict[str, str] = {"hf": "ppo_lib.rollout.hf_engine:HFEngine"}


def register_engine(name: str, target: str) -> None:
    """Make an engine known under `name`; `target` is `package.module:Class`. A later registration wins."""
    _ENGINES[name] = target


def resolve_engine_name(name: str) -> str:
    """What `rollout.name` stands for on this machine: `auto` is the embedded engine.

    Raises:
        RolloutError: The engine is one that this release does not have.
        ConfigError: There is no engine of that name.
    """
    if name == "auto":
        return "hf"
    if name == "sglang" and name not in _ENGINES:
        raise RolloutError("the sglang engine is not in this release yet, use rollout.name=hf")
    if name not in _ENGINES:
        raise unknown_name("rollout engine", name, _ENGINES)
    return name


def engine_class(name: str) -> Callable[..., RolloutEngine]:
    """The engine's class, called as `EngineSpec.build` does; errors as `resolve_engine_name`."""
    module, attribute = _ENGINES[resolve_engine_name(name)].split(":")
    return getattr(import_module(module), attribute)
