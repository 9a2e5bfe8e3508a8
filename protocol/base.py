"""What an envelope is made of, and the rule that holds for all of it; what it can do stands in `rows` and `merge`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from tensordict import TensorDict, TensorDictBase

from protocol.errors import BatchMismatchError
from protocol.lineage import LineageEntry, current_stage
from protocol.values import object_column, own_copy, short


@dataclass(eq=False, repr=False)
class Columns:
    """Columns of equal length, each under one name."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    auto_padding: bool = False  # chunk may add rows of zero weight
    lineage: tuple[LineageEntry, ...] = ()

    def __post_init__(self) -> None:
        if not (self.batch is None or isinstance(self.batch, TensorDictBase)):
            found = type(self.batch).__name__
            raise BatchMismatchError(
                f"batch must be a TensorDict or None, found {found}; from_dict takes tensors by name"
            )
        size = () if self.batch is None else self.batch.batch_size
        self.non_tensor_batch = {
            k: object_column(k, column, size) for k, column in (self.non_tensor_batch or {}).items()
        }
        self.meta_info = dict(self.meta_info or {})
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raise BatchMismatchError unless all fields have the same number of rows and one home each."""
        if self.batch is not None and not self.batch.batch_size:
            raise BatchMismatchError("batch has no batch dimension: its batch_size is empty")
        if not isinstance(self.meta_info, dict):
            raise BatchMismatchError(f"meta_info must be a dict, found {type(self.meta_info).__name__}")
        if twice := sorted(self.tensor_keys() & self.non_tensor_batch.keys()):
            raise BatchMismatchError(f"fields {twice} stand both in batch and in non_tensor_batch")
        for key, column in self.non_tensor_batch.items():
            folded = self.batch is not None and np.shape(column) == self.batch.batch_size
            if not isinstance(column, np.ndarray) or (column.ndim != 1 and not folded):
                raise BatchMismatchError(f"column {key!r} must be a one-dimensional array, found {short(column)}")
            if len(column) != len(self):
                other = "batch" if self.batch is not None else f"column {next(iter(self.non_tensor_batch))!r}"
                raise BatchMismatchError(f"column {key!r} has {len(column)} rows, {other} has {len(self)}")

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def tensor_keys(self) -> set[str]:
        """Names of the fields in `batch`."""
        return set() if self.batch is None else set(self.batch.keys())

    def field_names(self) -> set[str]:
        """Names of all tensors and object columns."""
        return self.tensor_keys() | self.non_tensor_batch.keys()

    def record(self, op: str, fields: Iterable[str] = ()) -> Self:
        """Add an entry to `lineage` under the open stage. Say so here when writing straight into `batch`."""
        self.lineage = (*self.lineage, LineageEntry(current_stage(), op, tuple(fields)))
        return self

    def _derived(self, batch: TensorDict | None, columns: dict[str, np.ndarray], op: str | None = None) -> Self:
        """New envelope of these columns that owns a copy of this one's meta_info."""
        new = object.__new__(type(self))  # what a subclass added stays, whatever its __init__ asks for
        new.__dict__.update(self.__dict__, batch=batch, non_tensor_batch=columns, meta_info=own_copy(self.meta_info))
        new.__post_init__()
        return new.record(op) if op else new
