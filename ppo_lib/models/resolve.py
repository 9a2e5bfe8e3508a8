"""From what a user writes as a model path to what `from_pretrained` accepts. Loads no torch unless a model is built."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppo_lib.errors import ModelError
from ppo_lib.models import smollm2, tiny_llama
from ppo_lib.models.cache import build_once

BUILTIN_PREFIX = "builtin:"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class BuiltinModel:
    """How to make a model that ships without a hub. `folder` changes whenever `build` would write something else."""

    folder: str
    build: Callable[[Path], None]
    progress: str


BUILTIN_MODELS = {
    "builtin:tiny-llama": BuiltinModel("tiny-llama-v1", tiny_llama.build, "building tiny-llama (0.5M random weights)"),
    "builtin:smollm2-135m": BuiltinModel(
        "smollm2-135m-v1", smollm2.build, "converting SmolLM2-135M-Instruct (once, about 20 s, 270 MB)"
    ),
}


def check_model_path(path: str) -> None:
    """Raise `ModelError` if `path` cannot be a model: an unknown built-in, or a folder that is absent or no model.

    Cheap: builds nothing and asks no hub. A Hugging Face id passes if it is well formed.
    """
    if path.startswith(BUILTIN_PREFIX):
        if path not in BUILTIN_MODELS:
            near = difflib.get_close_matches(path, BUILTIN_MODELS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(BUILTIN_MODELS))}."
            raise ModelError(f"there is no built-in model {path!r}; {hint}")
        return
    folder = Path(path).expanduser()
    if path and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"the folder {folder} holds no model: it has no config.json.")
    elif path and folder.exists():
        raise ModelError(f"the model path {folder} is a file; expected a folder that holds config.json.")
    elif not HUB_ID.fullmatch(path):
        raise ModelError(
            f"the model path {path!r} does not exist; expected a folder, a Hugging Face id such as "
            f"'Qwen/Qwen2.5-0.5B-Instruct', or one of {', '.join(sorted(BUILTIN_MODELS))}."
        )


def resolve_model_path(path: str) -> str:
    """A folder or Hugging Face id for `from_pretrained`; a `builtin:` model is built in the cache first if needed.

    Raises `ModelError` as `check_model_path` does, or if a built-in model cannot be built.
    """
    check_model_path(path)
    if path in BUILTIN_MODELS:
        model = BUILTIN_MODELS[path]
        return str(build_once(model.folder, model.build, model.progress))
    folder = Path(path).expanduser()
    return str(folder) if folder.is_dir() else path
