"""What depends on the version of SGLang, in one place. Importing this loads neither SGLang nor torch."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from ppo_lib.config.suggest import did_you_mean
from ppo_lib.errors import ConfigError, RolloutError

OLDEST, NEWEST = "0.5.18", "0.5.23"
INSTALL = (
    "on a GPU machine install it with: pip install 'ppo_lib[sglang]'; on a CPU with: make setup-sglang-cpu "
    "(or use rollout.name=hf)"
)


def is_installed() -> bool:
    """Whether SGLang is installed (a folder of that name on the path would pass for a package, but has no version)."""
    try:
        importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def require_sglang() -> str:
    """The installed version.

    Raises:
        RolloutError: SGLang is not installed, or is older than the oldest version known to work.
    """
    if not is_installed():
        raise RolloutError(f"rollout.name=sglang needs the package sglang, which is not installed here; {INSTALL}")
    version = importlib.metadata.version("sglang")
    if _numbers(version) < _numbers(OLDEST):
        raise RolloutError(f"sglang {version} is installed; ppo_lib works with {OLDEST} to {NEWEST}. {INSTALL}")
    return version


@cache
def known_arguments() -> frozenset[str]:
    """Every argument that the installed `sglang.Engine` takes, read from its sources: importing them takes 10 s."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        require_sglang()
        return frozenset()
    folder = Path(spec.submodule_search_locations[0]) / "srt"
    trees = [ast.parse((folder / "server_args.py").read_text(encoding="utf-8"))]
    trees[0].body = [n for n in trees[0].body if isinstance(n, ast.ClassDef) and n.name == "ServerArgs"]
    for file in (folder / "arg_groups" / "fields").glob("*.py"):  # where later versions keep them
        trees.append(ast.parse(file.read_text(encoding="utf-8")))
    return frozenset(name for tree in trees for name in _fields(tree))


def check_arguments(names: Iterable[str], taken: Iterable[str] = ()) -> None:
    """Refuse arguments that the installed version does not know.

    Args:
        names: Keys of `rollout.engine_kwargs.sglang`.
        taken: Arguments that are set by ppo_lib itself and may not be replaced.

    Raises:
        ConfigError: One is unknown (the message has the near names), or is not the user's to set.
    """
    key = "actor_rollout_ref.rollout.engine_kwargs.sglang"
    for name in names:
        if name not in known_arguments():
            version = importlib.metadata.version("sglang")
            hint = did_you_mean(name, known_arguments())
            raise ConfigError(f"{key}.{name}: sglang {version} has no engine argument {name!r}{hint}")
        if name in taken:
            raise ConfigError(f"{key}.{name} cannot be set: ppo_lib sets it itself; remove it")


def has_update_session(tokenizer_manager: Any) -> bool:
    """Whether weight updates stand between a begin and an end, which 0.5.21 introduced and requires."""
    return hasattr(tokenizer_manager, "begin_weight_update")


def selects_runners(request_class: Any) -> bool:
    """Whether an update names the models it is for (0.5.21); before, a flag left the draft model out."""
    return "selector" in request_class.__struct_fields__


def _fields(tree: ast.Module) -> Iterable[str]:
    for node in tree.body:
        for item in node.body if isinstance(node, ast.ClassDef) else ():
            name = item.target.id if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) else "_"
            if not name.startswith("_"):
                yield name


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
