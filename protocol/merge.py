"""What happens when two envelopes meet: side by side (`union`) and under one another (`concat`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np

from protocol import tensordict_utils as tu
from protocol.base import Columns
from protocol.errors import BatchMismatchError
from protocol.values import concat_columns, deep_equal, first_differing_row, own_copy, short

COLLECTED = ("metrics", "timing")  # measured anew by every part, so the parts need not agree


class MergeOperations(Columns):
    """Methods of DataProto that bring envelopes together."""

    def union(self, other: Self) -> Self:
        """Add the columns and meta_info of `other`, in place, and return this envelope. Tensors are shared.

        What stands on both sides must be equal (NaN equals NaN, containers by value). Everything is checked before
        anything changes. Raises BatchMismatchError naming key, shapes and first differing row.
        """
        if not isinstance(other, Columns):
            raise BatchMismatchError(f"an envelope can be united with another, found {type(other).__name__}")
        empty = any(side.batch is None and not side.non_tensor_batch for side in (self, other))
        if len(self) != len(other) and not empty:
            raise BatchMismatchError(f"cannot unite {len(self)} rows with {len(other)}")
        columns = union_numpy_dict(dict(self.non_tensor_batch), other.non_tensor_batch)
        for key in self.meta_info.keys() & other.meta_info.keys():
            if not deep_equal(self.meta_info[key], other.meta_info[key]):
                raise BatchMismatchError(
                    f"meta_info[{key!r}] is {short(self.meta_info[key])} on one side "
                    f"and {short(other.meta_info[key])} on the other"
                )
        objects = self.non_tensor_batch.keys() | other.non_tensor_batch.keys()
        if twice := sorted((self.tensor_keys() | other.tensor_keys()) & objects):
            raise BatchMismatchError(f"fields {twice} are tensors on one side and object columns on the other")
        added = sorted(other.field_names() - self.field_names())
        batch = other.batch if self.batch is None else self.batch
        batch = None if batch is None else batch.copy()
        if batch is not None and other.batch is not None:
            tu.union_tensor_dict(batch, other.batch)
        self.batch = batch
        self.non_tensor_batch = columns
        self.meta_info = {**own_copy(other.meta_info), **self.meta_info}
        return self.record("union", added)

    @classmethod
    def concat(cls, data: Iterable[Self]) -> Self:
        """Rows of all parts under one another, as a new envelope. Columns must be the same in all of them.

        Of `meta_info`, "metrics" and "timing" are collected: a key's values from every part, in order, in one list.
        Every other key must have one value in all parts that have it.
        """
        data = list(data)
        if not data:
            raise BatchMismatchError("nothing to concatenate: the list of envelopes is empty")
        if odd := [(number, type(part).__name__) for number, part in enumerate(data) if not isinstance(part, Columns)]:
            raise BatchMismatchError(
                f"part {odd[0][0]} is a {odd[0][1]}, no envelope; rows are put together by collate_fn"
            )
        first = data[0]
        for number, part in enumerate(data):
            odd = part.tensor_keys() ^ first.tensor_keys()
            odd |= part.non_tensor_batch.keys() ^ first.non_tensor_batch.keys()
            if odd:
                raise BatchMismatchError(f"part {number} and part 0 differ in fields {sorted(odd)}")
        batches = [part.batch for part in data if part.batch is not None]
        columns = {key: concat_columns([part.non_tensor_batch[key] for part in data]) for key in first.non_tensor_batch}
        whole = first._derived(tu.concat_tensordict(batches) if batches else None, columns, "concat")
        whole.meta_info = merged_meta_info([part.meta_info for part in data])
        whole.auto_padding = any(part.auto_padding for part in data)
        return whole


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add the arrays of the second to the first, in place, and return it; one that both have must be equal.

    NaN equals NaN, containers are compared by value. Everything is checked before anything changes. Raises
    BatchMismatchError naming key, shapes and first differing row.
    """
    for key in tensor_dict1.keys() & tensor_dict2.keys():
        _check_same_column(key, tensor_dict1[key], tensor_dict2[key])
    tensor_dict1.update({key: array for key, array in tensor_dict2.items() if key not in tensor_dict1})
    return tensor_dict1


def merged_meta_info(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The meta_info of a concatenation; see `concat` for the rule."""
    merged: dict[str, Any] = {}
    for number, part in enumerate(parts):
        for key, value in part.items():
            if key in COLLECTED:
                _collect(merged.setdefault(key, {}), key, value)
            elif key not in merged:
                merged[key] = own_copy(value)
            elif not deep_equal(merged[key], value):
                raise BatchMismatchError(
                    f"meta_info[{key!r}] is {short(merged[key])} in earlier parts and {short(value)} in part {number}. "
                    f"Parts may differ only in {' and '.join(COLLECTED)}; pop the key before concatenating."
                )
    return merged


def _collect(into: dict[str, list], key: str, value: Any) -> None:
    """Append a part's measurements: a dict, a list of dicts, or a dict of lists as an earlier `concat` left it."""
    for measured in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(measured, dict):
            raise BatchMismatchError(f"meta_info[{key!r}] must be a dict of measurements, found {short(value)}")
        for name, number in measured.items():
            into.setdefault(name, []).extend(own_copy(number) if isinstance(number, list) else [own_copy(number)])


def _check_same_column(key: str, left: np.ndarray, right: np.ndarray) -> None:
    if left.shape != right.shape:
        raise BatchMismatchError(f"{key!r} stands on both sides, with shapes {left.shape} and {right.shape}")
    row = first_differing_row(left, right)
    if row is not None:
        raise BatchMismatchError(
            f"{key!r} {left.dtype} {left.shape} stands on both sides and differs first in row {row}: "
            f"{short(left[row])} and {short(right[row])}"
        )
