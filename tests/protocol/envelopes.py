"""What the envelope's tests share: building envelopes, and reading them as a plain list of rows."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from protocol import DataProto
from protocol import tensordict_utils as tu


def envelope(rows: int = 3, **meta: Any) -> DataProto:
    """Dense, jagged, typed and object columns whose values tell the row they come from."""
    return DataProto.from_single_dict(
        {
            "scalar": torch.arange(rows),
            "matrix": torch.arange(rows * 2, dtype=torch.float32).view(rows, 2),
            "jagged": tu.nested_tensor_from_tensor_list([torch.full((row % 3,), row) for row in range(rows)]),
            "name": np.array([f"row{row}" for row in range(rows)], dtype=object),
            "pair": [[row, row] for row in range(rows)],
            "small": np.arange(rows, dtype=np.int32),
        },
        meta_info=meta,
    )


def plain(value: Any) -> Any:
    """Tensors and arrays as Python values, one entry per row."""
    if isinstance(value, torch.Tensor):
        return [row.tolist() for row in value.unbind()]
    return value.tolist()


def rows_of(data: DataProto) -> list[dict[str, Any]]:
    """The envelope as a list of rows."""
    columns = {key: plain(data.batch[key]) for key in data.tensor_keys()}
    columns |= {key: plain(column) for key, column in data.non_tensor_batch.items()}
    return [{key: column[row] for key, column in columns.items()} for row in range(len(data))]


def dtypes_of(data: DataProto) -> dict[str, Any]:
    """Dtype of every column."""
    tensors = {key: data.batch[key].dtype for key in data.tensor_keys()}
    return tensors | {key: column.dtype for key, column in data.non_tensor_batch.items()}


def through_store(value: Any) -> Any:
    """Pickle as an object store does: buffers out of band, and read-only on arrival."""
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(payload, buffers=[bytes(buffer.raw()) for buffer in buffers])
