"""The envelope: DataProto and its helpers. Names load when first used, so `protocol.errors` costs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from protocol.errors import BatchMismatchError, FieldMissingError, PPOLibError

if TYPE_CHECKING:
    from protocol.envelope import DataProto, DataProtoItem
    from protocol.lineage import LineageEntry, stage
    from protocol.no_padding import left_right_2_no_padding, no_padding_2_padding
    from protocol.rows import pad_dataproto_to_divisor, unpad_dataproto
    from protocol.schema import FIELDS, STAGES, FieldSpec, check_stage_output
    from protocol.tensordict_utils import union_tensor_dict
    from protocol.wire import decode_tensordict, encode_tensordict

_HOMES = {
    "DataProto": "envelope",
    "DataProtoItem": "envelope",
    "FIELDS": "schema",
    "FieldSpec": "schema",
    "LineageEntry": "lineage",
    "STAGES": "schema",
    "check_stage_output": "schema",
    "decode_tensordict": "wire",
    "encode_tensordict": "wire",
    "left_right_2_no_padding": "no_padding",
    "no_padding_2_padding": "no_padding",
    "pad_dataproto_to_divisor": "rows",
    "stage": "lineage",
    "union_tensor_dict": "tensordict_utils",
    "unpad_dataproto": "rows",
}

__all__ = [
    "FIELDS",
    "STAGES",
    "BatchMismatchError",
    "DataProto",
    "DataProtoItem",
    "FieldMissingError",
    "FieldSpec",
    "LineageEntry",
    "PPOLibError",
    "check_stage_output",
    "decode_tensordict",
    "encode_tensordict",
    "left_right_2_no_padding",
    "no_padding_2_padding",
    "pad_dataproto_to_divisor",
    "stage",
    "union_tensor_dict",
    "unpad_dataproto",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"protocol.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'protocol' has no attribute {name!r}; it has {', '.join(__all__)}")
