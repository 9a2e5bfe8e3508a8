"""The rollout engines by name. A name's module is imported when it is used, since an engine may be a heavy package."""

from __future__ import annotations

from importlib import import_module

from ppo_lib.algorithms.names import unknown_name
from ppo_lib.rollout.engine import RolloutEngine
from ppo_lib.rollout.sglang.versions import is_installed, require_sglang

_ENGINES: dict[str, str] = {
    "hf": "ppo_lib.rollout.hf_engine:HFEngine",
    "sglang": "ppo_lib.rollout.sglang.engine:SGLangEngine",
}


def register_engine(name: str, target: str) -> None:
    """Make an engine known under `name`; `target` is `package.module:Class`. A later registration wins."""
    _ENGINES[name] = target


def resolve_engine_name(name: str, device_name: str | None = None) -> str:
    """What `rollout.name` stands for on this machine: `auto` is sglang where it and a GPU are there, and hf elsewhere.

    Args:
        name: `rollout.name`.
        device_name: `cpu` or `cuda`; None looks for a GPU.

    Raises:
        RolloutError: sglang is asked for and not installed.
        ConfigError: There is no engine of that name.
    """
    if name == "auto":
        return "sglang" if is_installed() and (device_name or _device()) == "cuda" else "hf"
    if name not in _ENGINES:
        raise unknown_name("rollout engine", name, _ENGINES)
    if name == "sglang":
        require_sglang()
    return name


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def engine_class(name: str) -> type[RolloutEngine]:
    """The engine's class, called as `EngineSpec.build` does; errors as `resolve_engine_name`."""
    module, attribute = _ENGINES[resolve_engine_name(name)].split(":")
    return getattr(import_module(module), attribute)
