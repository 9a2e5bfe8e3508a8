"""Prompts: from files or built-in tasks to batches, at a place in the data that can be saved.

The names are loaded when they are used, so that opening data files (`open_rows`, `rows_of`) does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lib.data.collate import collate_fn
    from ppo_lib.data.dataloader import ResumableDataLoader
    from ppo_lib.data.dataset import RLHFDataset, create_rl_dataset, dataset_class
    from ppo_lib.data.gsm8k import prepare_gsm8k
    from ppo_lib.data.sampler import create_sampler, sampler_class
    from ppo_lib.data.sources import open_data, open_rows

_HOME = {
    "RLHFDataset": "dataset",
    "ResumableDataLoader": "dataloader",
    "collate_fn": "collate",
    "create_rl_dataset": "dataset",
    "create_sampler": "sampler",
    "dataset_class": "dataset",
    "open_data": "sources",
    "open_rows": "sources",
    "prepare_gsm8k": "gsm8k",
    "sampler_class": "sampler",
}
__all__ = [
    "RLHFDataset",
    "ResumableDataLoader",
    "collate_fn",
    "create_rl_dataset",
    "create_sampler",
    "dataset_class",
    "open_data",
    "open_rows",
    "prepare_gsm8k",
    "sampler_class",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"ppo_lib.data.{_HOME[name]}"), name)
    raise AttributeError(f"module 'ppo_lib.data' has no attribute {name!r}; it has {', '.join(__all__)}")
