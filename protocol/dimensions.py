"""Operations about a second dimension: folding rows into groups, and cutting rows into pieces.

Only here is an object column more than one-dimensional: after `fold_batch_dim` it has the two dimensions of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from protocol import tensordict_utils as tu
from protocol.base import Columns
from protocol.errors import BatchMismatchError
from protocol.rows import Rows
from protocol.values import object_column, require_fields, short, whole_number


class DimensionOperations(Columns):
    """Methods of DataProto that cut rows into pieces."""

    def unfold_column_chunks(self, n_split: int, split_keys: Iterable[str] | None = None) -> Self:
        """Every row becomes `n_split` rows, next to each other: fields in `split_keys` are cut, others repeated.

        Of a tensor (B, n_split * k, ...) and of a column of lists or arrays, row i becomes its `n_split` contiguous
        pieces of equal length. Copies tensors; shares objects that are not cut. Raises FieldMissingError for a key
        that is not there, BatchMismatchError naming field and row that cannot be cut evenly.
        """
        n_split = whole_number(n_split, "n_split")
        cut = set(require_fields(split_keys or (), self.field_names(), "batch or non_tensor_batch"))
        rows = torch.arange(len(self)).repeat_interleave(n_split)
        batch = None
        if self.batch is not None:
            repeated = tu.take_rows(self.batch.exclude(*cut), rows)
            pieces = {key: _cut_tensor(key, self.batch.get(key), n_split) for key in cut & self.tensor_keys()}
            whole = {**dict(tu.entries(repeated)), **pieces}
            in_order = {key: whole[key] for key in self.batch.keys()}  # noqa: SIM118
            batch = TensorDict(in_order, batch_size=repeated.batch_size, device=self.batch.device)
        columns = {
            key: _cut_column(key, column, n_split) if key in cut else column[rows.numpy()]
            for key, column in self.non_tensor_batch.items()
        }
        return self._derived(batch, columns, "unfold_column_chunks")


def _cut_tensor(key: str, tensor: Any, n_split: int) -> Tensor:
    if isinstance(tensor, (TensorDictBase, NonTensorData, NonTensorStack)) or tensor.is_nested or tensor.dim() < 2:
        raise BatchMismatchError(f"{key!r} has no second dimension of one length to cut into {n_split} pieces")
    if tensor.shape[1] % n_split:
        raise BatchMismatchError(f"{key!r} of shape {tuple(tensor.shape)} cannot be cut into {n_split} equal pieces")
    return tensor.unflatten(1, (n_split, tensor.shape[1] // n_split)).flatten(0, 1).clone()


def _cut_column(key: str, column: np.ndarray, n_split: int) -> np.ndarray:
    pieces: list[Any] = []
    for row, value in enumerate(column):
        whole = isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim > 0)
        if not whole or len(value) % n_split:
            raise BatchMismatchError(f"{key!r} row {row} cannot be cut into {n_split} equal pieces: {short(value)}")
        size = len(value) // n_split
        pieces += [value[part * size : (part + 1) * size] for part in range(n_split)]
    return object_column(key, pieces)


def fold_batch_dim(data: Rows, new_batch_size: int) -> Rows:
    """(B, ...) -> (new_batch_size, B / new_batch_size, ...) in tensors and object columns. Shares memory.

    The result has two batch dimensions; `unfold_batch_dim` takes the second away again.
    """
    rows = len(data)
    new_batch_size = whole_number(new_batch_size, "new_batch_size")
    if rows % new_batch_size:
        raise BatchMismatchError(f"{rows} rows cannot be folded into {new_batch_size} equal groups")
    if data.batch is not None and data.batch.batch_dims != 1:
        raise BatchMismatchError(f"batch has batch size {tuple(data.batch.batch_size)} already; expected one dimension")
    size = (new_batch_size, rows // new_batch_size)
    batch = TensorDict({}, batch_size=[rows]) if data.batch is None else data.batch
    _refuse_ragged(batch, "folded")
    folded = TensorDict(
        {key: entry.unflatten(0, size) for key, entry in tu.entries(batch)}, batch_size=size, device=batch.device
    )
    return data._derived(folded, {key: v.reshape(size) for key, v in data.non_tensor_batch.items()}, "fold_batch_dim")


def unfold_batch_dim(data: Rows, batch_dims: int = 2) -> Rows:
    """(n, k, ...) -> (n * k, ...): the first `batch_dims` dimensions of every field become one. A view where it can be.

    Object columns must have that many dimensions, as `fold_batch_dim` made them.
    """
    batch_dims = whole_number(batch_dims, "batch_dims")
    if data.batch is None:
        raise BatchMismatchError("nothing to unfold: a folded envelope has a batch, and this one has none")
    _refuse_ragged(data.batch, "unfolded")
    short_ones = [key for key, entry in tu.entries(data.batch) if entry.dim() < batch_dims]
    short_ones += [key for key, column in data.non_tensor_batch.items() if column.ndim != batch_dims]
    if short_ones:
        raise BatchMismatchError(f"fields {sorted(short_ones)} do not have the {batch_dims} dimensions to be unfolded")
    tensors = {key: entry.flatten(0, batch_dims - 1) for key, entry in tu.entries(data.batch)}
    columns = {key: column.reshape(-1) for key, column in data.non_tensor_batch.items()}
    if tensors or not columns:
        rows = len(next(iter(tensors.values()))) if tensors else data.batch.batch_size[:batch_dims].numel()
        return data._derived(
            TensorDict(tensors, batch_size=[rows], device=data.batch.device), columns, "unfold_batch_dim"
        )
    return data._derived(None, columns, "unfold_batch_dim")


def _refuse_ragged(batch: TensorDictBase, what: str) -> None:
    for key, entry in tu.entries(batch):
        if not isinstance(entry, Tensor) or entry.is_nested:
            raise BatchMismatchError(f"{key!r} is no dense tensor and cannot be {what}")
