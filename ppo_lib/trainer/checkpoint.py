"""Checkpoints on disk: written aside, listed in a manifest, renamed, and only then pointed to.

    default_local_dir/latest_checkpointed_iteration.txt
    default_local_dir/global_step_20/{actor/, critic/, data.pt, trainer_state.json, manifest.json}

A directory under its final name is whole. Whatever kills the run while one is written leaves a `.tmp` directory, which
the next save of that step removes, and a pointer that still names the checkpoint before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppo_lib.errors import CheckpointCorruptError, CheckpointError, ConfigError

POINTER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STATE = "trainer_state.json"


class CheckpointStore:
    """The checkpoints of one run, in `default_local_dir`.

    `keep_actor` and `keep_critic` are how many steps keep that part (None: all); a step that kept neither is removed.
    """

    def __init__(self, root: str | Path, keep_actor: int | None = None, keep_critic: int | None = None):
        self.root = Path(root).expanduser().absolute()
        self.keep = {"actor": keep_actor, "critic": keep_critic}

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step stands once it is whole."""
        return self.root / f"global_step_{step}"

    def latest(self) -> Path | None:
        """The checkpoint that the pointer names; without a pointer the newest; None where nothing was saved."""
        pointer = self.root / POINTER
        if not pointer.exists():
            steps = self.steps()
            return self.path(max(steps)) if steps else None
        text = pointer.read_text(errors="replace").strip()
        if not text.isdecimal():
            raise CheckpointCorruptError(
                f"{pointer} holds {text!r}, not a step number; write the step to resume from, or delete it"
            )
        return self.path(int(text))

    def resolve(self, resume_mode: str, resume_from_path: str | None) -> Path | None:
        """The checkpoint to resume from, checked against its manifest; None for a fresh start."""
        if resume_mode == "disable":
            return None
        if resume_mode == "auto":
            found = self.latest()
        else:
            if not resume_from_path:
                raise ConfigError(
                    "trainer.resume_mode=resume_path needs trainer.resume_from_path; name a global_step_N folder"
                )
            found = Path(resume_from_path).expanduser().absolute()
        if found is not None:
            self.verify(found)
        return found

    @staticmethod
    def verify(path: Path) -> None:
        """Raise unless every file that the manifest lists is there with its size."""
        if not path.is_dir():
            raise CheckpointError(f"there is no checkpoint at {path}; expected a folder named global_step_N")
        try:
            listed = {str(name): int(size) for name, size in json.loads((path / MANIFEST).read_text())["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
            raise CheckpointCorruptError(
                f"{path} has no readable {MANIFEST} ({cause}); it was not written whole: resume from another step"
            ) from cause
        for name, size in listed.items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size:
                what = "is missing" if found is None else f"has {found} bytes"
                raise CheckpointCorruptError(
                    f"{path / name} {what}, the manifest says {size} bytes; resume from another step"
                )

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Give a folder to write into; on success it becomes the checkpoint of `step`, on failure it is removed."""
        final, aside = self.path(step), self.root / f"global_step_{step}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            yield aside
            files = {str(f.relative_to(aside)): f.stat().st_size for f in sorted(aside.rglob("*")) if f.is_file()}
            write_json(aside / MANIFEST, {"step": step, "files": files})
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._publish(aside, final)
        _replace_text(self.root / POINTER, str(step))
        self._retire(step)

    def _publish(self, aside: Path, final: Path) -> None:
        """Rename; a checkpoint of the same step from an earlier run makes way only at this moment."""
        replaced = final.with_name(final.name + ".old")
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            final.rename(replaced)
        aside.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)

    def _retire(self, newest: int) -> None:
        """Remove what `keep` no longer covers. Read from the disk, so that it holds across restarts."""
        steps = sorted(s for s in self.steps() if s <= newest)
        for part, keep in self.keep.items():
            for step in steps[: len(steps) - keep] if keep and keep > 0 else []:
                shutil.rmtree(self.path(step) / part, ignore_errors=True)
        for step in steps[:-1]:
            if not any((self.path(step) / part).exists() for part in self.keep):
                shutil.rmtree(self.path(step), ignore_errors=True)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in no particular order."""
        names = (re.fullmatch(r"global_step_(\d+)", p.name) for p in self.root.glob("global_step_*"))
        return [int(m[1]) for m in names if m]


def write_json(path: Path, value: Any) -> None:
    """Write JSON and make sure it is on the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote; a damaged file is a named error."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise CheckpointCorruptError(f"{path} cannot be read ({cause}); resume from another step") from cause


@contextmanager
def damage_named(folder: Path) -> Iterator[None]:
    """Turn what reading damaged state raises into a `CheckpointCorruptError` that names the checkpoint."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as cause:  # unpickling and indexing of damaged bytes raise anything
        raise CheckpointCorruptError(f"{folder} cannot be read back ({cause!r}); resume from another step") from cause


def _replace_text(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".tmp")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
