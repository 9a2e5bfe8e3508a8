"""Values that are not tensors of the batch: object columns, and equality and copying of nested Python values."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from protocol.errors import BatchMismatchError, FieldMissingError


def object_column(name: str, values: Any, batch_size: Sequence[int] = ()) -> np.ndarray:
    """One-dimensional column with one entry per row.

    A one-dimensional array is taken as it is, dtype included, and so is one of the shape `batch_size` of a folded
    batch; of any other array with more dimensions every row becomes one entry. A list or tuple becomes an object array
    whose entries are the list's own, also where all of them are lists of one length (`np.array` would make a second
    dimension of those).
    """
    if isinstance(values, np.ndarray) and (values.ndim == 1 or (values.ndim > 1 and values.shape == tuple(batch_size))):
        return values
    if (isinstance(values, np.ndarray) and values.ndim > 1) or isinstance(values, (list, tuple)):
        column = np.empty(len(values), dtype=object)
        for row, value in enumerate(values):
            column[row] = value
        return column
    found = "a zero-dimensional array" if isinstance(values, np.ndarray) else type(values).__name__
    raise BatchMismatchError(
        f"column {name!r} must be a list or numpy array with one entry per row, found {found}. "
        "A single value for the whole batch belongs in meta_info."
    )


def whole_number(value: Any, name: str, least: int = 1) -> int:
    """`value` as an int. BatchMismatchError naming the argument where it is none, or below `least`."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise BatchMismatchError(f"{name}={value!r}: expected a whole number from {least} up")
    return number


def column_of_rows(name: str, rows: Sequence[Any]) -> np.ndarray:
    """Column of what stood in the rows of one: of its own dtype where all are numpy scalars, of objects elsewhere."""
    if not rows or not all(isinstance(row, np.generic) for row in rows):
        return object_column(name, list(rows))
    return np.array(rows, dtype=common_dtype([row.dtype for row in rows]))


def common_dtype(dtypes: Sequence[np.dtype]) -> np.dtype:
    """Dtype of columns that stand under one another: their own, the widest of strings, object where they differ.

    numpy's promotion would make 1 a 1.0 or a "1".
    """
    kinds = {dtype.kind if dtype.kind in "US" else dtype for dtype in dtypes}
    return np.result_type(*dtypes) if len(kinds) == 1 else np.dtype(object)


def concat_columns(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Columns under one another, every entry as it was."""
    dtype = common_dtype([column.dtype for column in columns])
    return np.concatenate([column.astype(dtype, copy=False) for column in columns])


def deep_equal(left: Any, right: Any) -> bool:
    """Equality by value: NaN equals NaN; containers, arrays and tensors are compared entry by entry."""
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and tensor_equal(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return isinstance(left, np.ndarray) and isinstance(right, np.ndarray) and _array_equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(deep_equal(value, right[key]) for key, value in left.items())
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(deep_equal, left, right))
    try:
        return bool(left == right) or bool(left != left and right != right)
    except Exception:  # an object whose == cannot answer is not known to be equal
        return False


def tensor_equal(left: Any, right: Any) -> bool:
    """Same shape, dtype and values, NaN equal to NaN. Jagged tensors are compared by rows and values."""
    if left.is_nested or right.is_nested:
        return (
            left.is_nested
            and right.is_nested
            and tensor_equal(left.offsets(), right.offsets())
            and tensor_equal(left.values(), right.values())
        )
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    right = right.to(left.device)
    return torch.equal(left, right) or bool(_same(left, right).all())


def _same(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if left.element_size() == 1 and left.dtype.is_floating_point:  # fp8 has no comparison of its own
        left, right = left.float(), right.float()
    return (left == right) | ((left != left) & (right != right))


def _array_equal(left: np.ndarray, right: np.ndarray) -> bool:
    if left.shape != right.shape:
        return False
    if left.dtype == object or right.dtype == object:
        return all(map(deep_equal, left.ravel().tolist(), right.ravel().tolist()))
    return np.array_equal(left, right, equal_nan=left.dtype.kind in "fc" and right.dtype.kind in "fc")


def first_differing_row(left: Any, right: Any) -> int | None:
    """Index of the first row in which two columns of equal length and dtype differ, or None."""
    if isinstance(left, torch.Tensor) and not left.is_nested:
        different = ~_same(left, right.to(left.device)).reshape(len(left), -1).all(-1)
        return int(different.int().argmax()) if bool(different.any()) else None
    rows = zip(left.unbind(), right.unbind()) if isinstance(left, torch.Tensor) else zip(left, right)
    return next((row for row, (one, other) in enumerate(rows) if not deep_equal(one, other)), None)


def own_copy(value: Any) -> Any:
    """Copy dicts, lists, tuples, sets, arrays and tensors at any depth; share every other object.

    What an envelope does to `meta_info`, so that a change made in a part never shows in the whole. A tokenizer or a
    lock that somebody stored there is neither copied nor broken.
    """
    if type(value) is dict:
        return {key: own_copy(entry) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(own_copy, value))
    if type(value) is set:
        return set(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.clone() if isinstance(value, torch.Tensor) else value


def require_fields(wanted: Iterable[str], present: Iterable[str], kind: str) -> list[str]:
    """The wanted names without repetition. Raises FieldMissingError naming all that are not among those present."""
    names = [wanted] if isinstance(wanted, str) else list(dict.fromkeys(wanted))
    have = set(present)
    missing = [name for name in names if name not in have]
    if missing:
        raise FieldMissingError(f"no {kind} field {', '.join(map(repr, missing))}; present: {sorted(map(str, have))}")
    return names


def short(value: Any, limit: int = 80) -> str:
    """One line for an error message."""
    text = " ".join(repr(value.tolist() if isinstance(value, torch.Tensor) else value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
