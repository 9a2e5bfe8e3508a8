"""The envelope: DataProto and its helpers. Names load when first used, so `protocol.errors` costs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from protocol.errors import BatchMismatchError, FieldMissingError, PPOLibError

if TYPE_CHECKING:
    from protocol.envelope import DataProto, DataProtoItem
    from protocol.no_padding import left_right_2_no_padding, no_padding_2_padding
    from protocol.rows import pad_dataproto_to_divisor, unpad_dataproto
    from protocol.tensordict_utils import union_tensor_dict

_HOMES = {
    "DataProto": "envelope",
    "DataProtoItem": "envelope",
    "left_right_2_no_padding": "no_padding",
    "no_padding_2_padding": "no_padding",
    "pad_dataproto_to_divisor": "rows",
    "union_tensor_dict": "tensordict_utils",
    "unpad_dataproto": "rows",
}

__all__ = [
    "BatchMismatchError",
    "DataProto",
    "DataProtoItem",
    "FieldMissingError",
    "PPOLibError",
    "left_right_2_no_padding",
    "no_padding_2_padding",
    "pad_dataproto_to_divisor",
    "union_tensor_dict",
    "unpad_dataproto",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"protocol.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'protocol' has no attribute {name!r}; it has {', '.join(__all__)}")
