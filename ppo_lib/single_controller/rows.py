"""What dispatch does to the rows of a batch, for both kinds of batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from tensordict import TensorDictBase

from protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from protocol import tensordict_utils as tu

__all__ = ["Batch", "column_names", "is_batch", "join_rows", "split_padded"]

Batch: TypeAlias = TensorDictBase | DataProto


def is_batch(value: object) -> bool:
    """Whether dispatch cuts this argument into rows."""
    return isinstance(value, (TensorDictBase, DataProto))


def column_names(batch: Batch) -> set[str]:
    """The tensor columns."""
    held = batch.batch if isinstance(batch, DataProto) else batch
    return set() if held is None else set(held.keys())


def split_padded(batch: Batch, parts: int) -> Sequence[Batch]:
    """Equal contiguous parts over the same memory, padded with rows of zero weight where the rows do not divide.

    Also one part is a new envelope: a column that a worker adds to it does not appear in the driver's.
    """
    if isinstance(batch, DataProto):
        return pad_dataproto_to_divisor(batch, parts)[0].chunk(parts)
    return tu.chunk_tensordict(tu.pad_to_divisor(batch, parts)[0], parts)


def join_rows(parts: list[Any], padding: int) -> Any:
    """The parts one below the other, without the last `padding` rows."""
    if isinstance(parts[0], DataProto):
        return unpad_dataproto(DataProto.concat(parts), padding)
    return tu.unpad(parts[0] if len(parts) == 1 else tu.concat_tensordict(parts), padding)
