"""What happens when two envelopes meet: side by side (`union`) and under one another (`concat`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tensordict import TensorDict

from protocol import tensordict_utils as tu
from protocol.errors import BatchMismatchError
from protocol.values import concat_columns, deep_equal, first_differing_row, own_copy, short

if TYPE_CHECKING:
    from typing import Self

COLLECTED = ("metrics", "timing")  # measured anew by every part, so the parts need not agree


class MergeOperations:
    """Methods of DataProto that bring envelopes together."""

    if TYPE_CHECKING:
        batch: TensorDict | None
        non_tensor_batch: dict[str, np.ndarray]
        meta_info: dict[str, Any]
        auto_padding: bool

        def __len__(self) -> int: ...
        def _derived(self, batch: TensorDict | None, columns: dict[str, np.ndarray], op: str | None) -> Self: ...
        def _noted(self, op: str, fields: Sequence[str] = ()) -> Self: ...

    def union(self, other: Self) -> Self:
        """Add the columns and meta_info of `other`, in place, and return this envelope. Tensors are shared.

        What stands on both sides must be equal (NaN equals NaN, containers by value). Everything is checked before
        anything changes. Raises BatchMismatchError naming key, shapes and first differing row.
        """
        both = _has_columns(self) and _has_columns(other)
        if both and len(self) != len(other):
            raise BatchMismatchError(f"cannot unite {len(self)} rows with {len(other)}")
        for key in self.non_tensor_batch.keys() & other.non_tensor_batch.keys():
            _check_same_column(key, self.non_tensor_batch[key], other.non_tensor_batch[key])
        for key in self.meta_info.keys() & other.meta_info.keys():
            if not deep_equal(self.meta_info[key], other.meta_info[key]):
                raise BatchMismatchError(
                    f"meta_info[{key!r}] is {short(self.meta_info[key])} on one side "
                    f"and {short(other.meta_info[key])} on the other"
                )
        check_one_home(_tensor_keys(self) | _tensor_keys(other), {**self.non_tensor_batch, **other.non_tensor_batch})
        added = sorted((_tensor_keys(other) | other.non_tensor_batch.keys()) - _tensor_keys(self))
        batch = other.batch if self.batch is None else self.batch
        batch = None if batch is None else batch.copy()
        if batch is not None and other.batch is not None:
            tu.union_tensor_dict(batch, other.batch)
        self.batch = batch
        self.non_tensor_batch = {**other.non_tensor_batch, **self.non_tensor_batch}
        self.meta_info = {**own_copy(other.meta_info), **self.meta_info}
        return self._noted("union", added)

    @staticmethod
    def concat(data: Sequence[MergeOperations]) -> Any:
        """Rows of all parts under one another, as a new envelope. Columns must be the same in all of them.

        Of `meta_info`, "metrics" and "timing" are collected: a key's values from every part, in order, in one list.
        Every other key must have one value in all parts that have it.
        """
        if not data:
            raise BatchMismatchError("nothing to concatenate: the list of envelopes is empty")
        first = data[0]
        for number, part in enumerate(data):
            odd = (_tensor_keys(part) ^ _tensor_keys(first)) | (
                part.non_tensor_batch.keys() ^ first.non_tensor_batch.keys()
            )
            if odd:
                raise BatchMismatchError(f"part {number} and part 0 differ in fields {sorted(odd)}")
        batches = [part.batch for part in data if part.batch is not None]
        columns = {key: concat_columns([part.non_tensor_batch[key] for part in data]) for key in first.non_tensor_batch}
        whole = first._derived(tu.concat_tensordict(batches) if batches else None, columns, "concat")
        whole.meta_info = merged_meta_info([part.meta_info for part in data])
        whole.auto_padding = any(part.auto_padding for part in data)
        return whole


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


def check_one_home(tensor_keys: set[str], columns: dict[str, np.ndarray]) -> None:
    """A field is either a tensor or an object column."""
    if twice := sorted(tensor_keys & columns.keys()):
        raise BatchMismatchError(f"fields {twice} stand both in batch and in non_tensor_batch")


def _check_same_column(key: str, left: np.ndarray, right: np.ndarray) -> None:
    row = first_differing_row(left, right)
    if row is not None:
        raise BatchMismatchError(
            f"{key!r} {left.dtype} {left.shape} stands on both sides and differs first in row {row}: "
            f"{short(left[row])} and {short(right[row])}"
        )


def _tensor_keys(data: MergeOperations) -> set[str]:
    return set() if data.batch is None else set(data.batch.keys())


def _has_columns(data: MergeOperations) -> bool:
    return data.batch is not None or bool(data.non_tensor_batch)
