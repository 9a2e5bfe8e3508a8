"""Functions and classes of the user's own, named by file (or `pkg://module`) and name."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from ppo_lib.errors import ConfigError

PACKAGE_PREFIX = "pkg://"


def load_object(path: str, name: str, key: str, keys: tuple[str, str] = ("path", "name")) -> Any:
    """The attribute `name` of the Python file `path`, or of an installed module written `pkg://a.b.c`.

    `key` is the section that `path` and `name` came from (`reward.custom_reward_function`) and `keys` what they are
    called in it, for the message. The file runs anew at each call, so that a notebook sees its edits.

    Raises `ConfigError` if the file is missing, fails to run, or has no such name.
    """
    where = f"{key}.{keys[0]}"
    module = _import_package(path, where) if path.startswith(PACKAGE_PREFIX) else _run_file(path, where)
    if not hasattr(module, name):
        public = sorted(n for n, value in vars(module).items() if callable(value) and not n.startswith("_"))
        near = difflib.get_close_matches(name, public, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(public) or 'nothing callable'}."
        raise ConfigError(f"{key}.{keys[1]}: {path} has no {name!r}; {hint}")
    return getattr(module, name)


def _run_file(path: str, key: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"{key}: there is no file {path!r} (looked for {file}).")
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"ppo_lib_user_{file.stem}_{digest}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path!r} is not a Python file; expected one that ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        line = next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(file)), "?"
        )
        raise ConfigError(f"{key}: {path}, line {line} failed: {type(error).__name__}: {error}") from error
    return module


def _import_package(path: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(path[len(PACKAGE_PREFIX) :])
    except ImportError as error:
        raise ConfigError(f"{key}: cannot import {path!r}: {error}") from error
