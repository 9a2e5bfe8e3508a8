"""The envelope: DataProto and its helpers. Names load when first used, so `protocol.errors` costs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from protocol.errors import (
    BatchMismatchError,
    FieldMissingError,
    FileFormatError,
    NotEqualError,
    NotStorableError,
    PPOLibError,
)

if TYPE_CHECKING:
    from protocol import tensordict_utils
    from protocol.dimensions import fold_batch_dim, unfold_batch_dim
    from protocol.envelope import DataProto, DataProtoItem, collate_fn
    from protocol.lineage import LineageEntry, stage
    from protocol.merge import union_numpy_dict
    from protocol.no_padding import left_right_2_no_padding, no_padding_2_padding
    from protocol.packed import deserialize_single_tensor, serialize_single_tensor
    from protocol.rows import DataProtoConfig, pad_dataproto_to_divisor, unpad_dataproto
    from protocol.schema import FIELDS, STAGES, FieldSpec, check_stage_output
    from protocol.td_merge import union_tensor_dict
    from protocol.wire import deserialize_tensordict, serialize_tensordict

_HOMES = {
    "DataProto": "envelope",
    "DataProtoConfig": "rows",
    "DataProtoItem": "envelope",
    "FIELDS": "schema",
    "FieldSpec": "schema",
    "LineageEntry": "lineage",
    "STAGES": "schema",
    "check_stage_output": "schema",
    "collate_fn": "envelope",
    "deserialize_single_tensor": "packed",
    "deserialize_tensordict": "wire",
    "fold_batch_dim": "dimensions",
    "left_right_2_no_padding": "no_padding",
    "no_padding_2_padding": "no_padding",
    "pad_dataproto_to_divisor": "rows",
    "serialize_single_tensor": "packed",
    "serialize_tensordict": "wire",
    "stage": "lineage",
    "unfold_batch_dim": "dimensions",
    "union_numpy_dict": "merge",
    "union_tensor_dict": "td_merge",
    "unpad_dataproto": "rows",
}

__all__ = [
    "BatchMismatchError",
    "DataProto",
    "DataProtoConfig",
    "DataProtoItem",
    "FIELDS",
    "FieldMissingError",
    "FieldSpec",
    "FileFormatError",
    "LineageEntry",
    "NotEqualError",
    "NotStorableError",
    "PPOLibError",
    "STAGES",
    "check_stage_output",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "left_right_2_no_padding",
    "no_padding_2_padding",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "stage",
    "tensordict_utils",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]


def __getattr__(name: str) -> Any:
    if name == "tensordict_utils":
        return import_module("protocol.tensordict_utils")
    if name in _HOMES:
        return getattr(import_module(f"protocol.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'protocol' has no attribute {name!r}; it has {', '.join(__all__)}")
