"""Two TensorDicts side by side: are their entries equal, and what does their union hold."""

from __future__ import annotations

from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from protocol.entries import COLUMN_DTYPES, AnyTensorDict, get, unwrap_non_tensor_data
from protocol.errors import BatchMismatchError, NotEqualError
from protocol.td_rows import columns_of, describe, kind_of, with_dtypes
from protocol.values import deep_equal, first_differing_row, short, tensor_equal


def union_tensor_dict(tensor_dict1: AnyTensorDict, tensor_dict2: TensorDictBase) -> AnyTensorDict:
    """Add the entries of the second to the first, in place (memory is shared); one that both have must be equal.

    Everything is checked before anything changes.
    """
    left, right = tensor_dict1, tensor_dict2
    if left.batch_size != right.batch_size:
        raise BatchMismatchError(f"cannot unite batch sizes {tuple(left.batch_size)} and {tuple(right.batch_size)}")
    added = []
    for key in columns_of(right):
        if key in left.keys():  # noqa: SIM118
            check_same(str(key), left.get(key), right.get(key))
        else:
            added.append(key)
    for key in added:
        left.set(key, right.get(key))
    with_dtypes(left, {**get(right, COLUMN_DTYPES, {}), **get(left, COLUMN_DTYPES, {})})
    return left


def assert_tensordict_eq(tensordict1: TensorDictBase, tensordict2: TensorDictBase) -> None:
    """Raise NotEqualError (an AssertionError) unless both hold equal entries under the same keys; see `check_same`."""
    left, right = tensordict1, tensordict2
    if left.batch_size != right.batch_size:
        raise NotEqualError(f"batch sizes are {tuple(left.batch_size)} and {tuple(right.batch_size)}")
    if odd := set(left.keys()) ^ set(right.keys()):
        raise NotEqualError(f"only one side has the fields {sorted(map(str, odd))}")
    try:
        for key in left.keys():  # noqa: SIM118
            check_same(str(key), left.get(key), right.get(key))
    except BatchMismatchError as error:
        raise NotEqualError(str(error)) from None


def check_same(key: str, left: Any, right: Any) -> None:
    """Raise BatchMismatchError naming key, shapes and the first differing row unless two entries are equal.

    NaN equals NaN, containers are compared by value, and dtype, jagged or dense, and kind of entry must agree.
    """
    if kind_of(left) != kind_of(right):
        raise BatchMismatchError(f"{key!r} stands on both sides, as {describe(left)} and as {describe(right)}")
    if isinstance(left, Tensor):
        equal, one, other = tensor_equal(left, right), left, right
    elif isinstance(left, TensorDictBase) and not isinstance(left, (NonTensorData, NonTensorStack)):
        for inner in sorted(set(left.keys()) | set(right.keys())):
            check_same(f"{key}.{inner}", left.get(inner, None), right.get(inner, None))
        return
    else:
        one, other = unwrap_non_tensor_data(left), unwrap_non_tensor_data(right)
        equal = deep_equal(one, other)
    if not equal:
        row = None if isinstance(left, NonTensorData) else first_differing_row(one, other)
        at = "" if row is None else f" in row {row}: {short(one[row])} and {short(other[row])}"
        if isinstance(left, NonTensorData):
            at = f": {short(one)} and {short(other)}"
        raise BatchMismatchError(f"{key!r} stands on both sides as {describe(left)} and differs{at}")
