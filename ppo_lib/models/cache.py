"""A folder of models made on this machine: built aside, renamed into place, once, however many processes ask."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ppo_lib.errors import ModelError

REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def cache_dir() -> Path:
    """`$PPO_LIB_CACHE`, or `~/.cache/ppo_lib`."""
    return Path(os.environ.get("PPO_LIB_CACHE") or "~/.cache/ppo_lib").expanduser()


def is_whole(folder: Path) -> bool:
    """Whether `folder` holds every file that a built-in model consists of."""
    return all((folder / name).is_file() for name in REQUIRED_FILES)


def build_once(name: str, build: Callable[[Path], None], progress: str) -> Path:
    """The folder `models/{name}` of the cache, built by `build(empty_folder)` if it is not there yet.

    The build runs in a folder beside the final one, which takes its name by one rename: a folder with the final name
    is always whole. Processes that ask at the same time wait for the first; where the file system has no locks each
    builds its own and the first to finish wins. `progress` is printed to stderr when a build starts.

    Raises `ModelError` if the cache cannot be written or the build leaves a file out.
    """
    root = cache_dir() / "models"
    final = root / name
    if is_whole(final):
        return final
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _lock(root / f".{name}.lock") as locked:
            if is_whole(final):
                return final
            if locked:  # nobody else builds now: whatever lies here was left by a process that died
                _remove_leftovers(root, name)
            _build(root, final, build, progress)
    except ModelError:
        raise
    except OSError as error:
        raise ModelError(
            f"cannot build {name} in the model cache {root}: {error}. Set PPO_LIB_CACHE to a writable folder."
        ) from error
    return final


def _build(root: Path, final: Path, build: Callable[[Path], None], progress: str) -> None:
    started = time.monotonic()
    print(f"{progress} -> {final} ...", file=sys.stderr, flush=True)
    aside = Path(tempfile.mkdtemp(prefix=f".building-{final.name}-", dir=root))
    try:
        with _one_line_is_enough():
            build(aside)
        missing = [name for name in REQUIRED_FILES if not (aside / name).is_file()]
        if missing:
            raise ModelError(f"building {final.name} left out {', '.join(missing)}")
        aside.chmod(0o755)  # what mkdtemp and safetensors write is for its owner only; a cache may be shared
        for file in aside.iterdir():
            file.chmod(0o644)
        try:
            aside.rename(final)
        except OSError:
            if not is_whole(final):
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    print(f"{final.name} ready after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _remove_leftovers(root: Path, name: str) -> None:
    shutil.rmtree(root / name, ignore_errors=True)
    for stale in root.glob(f".building-{name}-*"):
        shutil.rmtree(stale, ignore_errors=True)


@contextlib.contextmanager
def _one_line_is_enough() -> Iterator[None]:
    """Drop the progress bars of the libraries, some of which have no switch; what went wrong is raised anyway."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold an exclusive lock, which the system releases if the process dies; yields False where there are no locks."""
    with open(path, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        yield locked
