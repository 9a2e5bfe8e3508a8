"""A list of items to one batch: tensors stacked, everything else a column of objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ppo_lib.errors import DataError


def collate_fn(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Stack what is a tensor in every item, (…) to (P, …); put the rest into one-dimensional object arrays (P,).

    A row that holds a list stays a row that holds a list, whatever the lengths. A key that an item lacks is None there.

    Raises `DataError` if the tensors under one key have different shapes or dtypes, or only some items hold a tensor.
    """
    keys = dict.fromkeys(key for item in items for key in item)
    return {key: _column(key, [item.get(key) for item in items]) for key in keys}


def _column(key: str, values: list[Any]) -> Any:
    if not any(isinstance(value, torch.Tensor) for value in values):
        column = np.empty(len(values), dtype=object)
        for row, value in enumerate(values):  # a slice assignment would turn equal-length lists into a second dimension
            column[row] = value
        return column
    first = _kind(values[0])
    for row, value in enumerate(values):
        if _kind(value) != first:
            raise DataError(f"cannot stack {key!r}: row 0 holds {first}, row {row} holds {_kind(value)}.")
    return torch.stack(values)


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
