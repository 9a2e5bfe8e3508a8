"""The driver's own random generators: seeded, and saved as plain JSON values."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed the driver's own generators. Workers and rollouts have seeds of their own."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def driver_random_state() -> dict[str, Any]:
    """The states of the driver's generators as plain JSON values."""
    version, words, gauss = random.getstate()
    legacy: dict[str, Any] = dict(np.random.get_state(legacy=False))
    position = legacy.pop("state")
    return {
        "python": [version, list(words), gauss],
        "numpy": {**legacy, "key": position["key"].tolist(), "pos": position["pos"]},
        "torch": torch.get_rng_state().tolist(),
    }


def restore_driver_random_state(state: dict[str, Any]) -> None:
    """Undo `driver_random_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    legacy = dict(state["numpy"])
    position = {"key": np.array(legacy.pop("key"), dtype=np.uint32), "pos": legacy.pop("pos")}
    np.random.set_state({**legacy, "state": position})
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
