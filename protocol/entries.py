"""The entries of a TensorDict of rows: what kinds there are, putting them in, and getting them out unwrapped.

Four kinds: dense tensors (B, ...), jagged tensors (B, t_i, ...), `NonTensorStack`s with one Python value per row, and
`NonTensorData`, one Python value for all rows. (A TensorDict within is rows again.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase
from torch import Tensor

from protocol.errors import BatchMismatchError
from protocol.jagged import nested_tensor_from_tensor_list
from protocol.values import require_fields

COLUMN_DTYPES = "__column_dtypes__"
"""Entry that DataProto.to_tensordict adds where an object column has a dtype of its own: {column: numpy dtype}."""

_MISSING = object()
AnyTensorDict = TypeVar("AnyTensorDict", bound=TensorDictBase)


class EmptyStack(NonTensorStack):
    """A NonTensorStack of no rows. TensorDict before 0.15 asks the first row for the names of the dimensions."""

    @property
    def names(self) -> list[str | None]:  # type: ignore[override]
        """The one dimension has no name."""
        return [None]

    @names.setter
    def names(self, value: Any) -> None: ...


def entries(td: TensorDictBase) -> Iterator[tuple[str, Any]]:
    """Top-level (key, entry) pairs with the non-tensor wrappers left on (`td.items()` takes them off)."""
    return ((key, td.get(key)) for key in td.keys())  # noqa: SIM118 (iterating a TensorDict gives its rows)


def stack_of(rows: Sequence[Any]) -> NonTensorStack:
    """NonTensorStack with one entry per row. (`from_list` would make a further dimension of rows that are lists.)

    Rows that hold one and the same object share its wrapper, which costs more than all else here.
    """
    wrappers: dict[int, NonTensorData] = {}
    for row in rows:
        if id(row) not in wrappers:
            wrappers[id(row)] = NonTensorData(row)
    return NonTensorStack(*[wrappers[id(row)] for row in rows]) if wrappers else EmptyStack()


def unwrap_non_tensor_data(entry: Any) -> Any:
    """NonTensorData -> its value, NonTensorStack -> list of its rows; everything else as it is."""
    if isinstance(entry, NonTensorStack):
        return [row.data if isinstance(row, NonTensorData) else row.tolist() for row in entry.tensordicts]
    return entry.data if isinstance(entry, NonTensorData) else entry


# ---- putting in


def assign_non_tensor_data(td: AnyTensorDict, key: str, value: Any) -> AnyTensorDict:
    """Store one Python value for all rows, in place. A list, too, is one value."""
    td.set_non_tensor(key, value)
    return td


def assign_non_tensor_stack(td: AnyTensorDict, key: str, rows: Sequence[Any]) -> AnyTensorDict:
    """Store one Python value per row, in place."""
    if len(rows) != len(td):
        raise BatchMismatchError(f"{key!r} has {len(rows)} entries for {len(td)} rows")
    td.set(key, stack_of(rows))
    return td


def assign_non_tensor(td: AnyTensorDict, **values: Any) -> AnyTensorDict:
    """Store each value once for all rows, lists included, in place; what is wrapped already stays what it is.

    Whether a list is one value or one per row is not guessed from its length: rows are `assign_non_tensor_stack`'s.
    """
    for key, value in values.items():
        if isinstance(value, (NonTensorData, NonTensorStack)):
            td.set(key, value)
        else:
            assign_non_tensor_data(td, key, value)
    return td


def get_tensordict(
    tensor_dict: Mapping[str, Tensor | Sequence[Any]], non_tensor_dict: Mapping[str, Any] | None = None
) -> TensorDict:
    """TensorDict of columns (a tensor, or a list with one Python value per row), and of values that hold for all rows.

    Without columns its batch size is empty. Raises BatchMismatchError naming two columns that differ in rows, or a
    name given twice.
    """
    if twice := sorted(tensor_dict.keys() & (non_tensor_dict or {}).keys()):
        raise BatchMismatchError(f"fields {twice} are given both as columns and as values for all rows")
    source: dict[str, Any] = {}
    first, rows = None, 0
    for key, column in tensor_dict.items():
        if isinstance(column, Tensor) and column.dim() == 0:
            raise BatchMismatchError(f"column {key!r} is a tensor without dimensions; expected one entry per row")
        if first is not None and len(column) != rows:
            raise BatchMismatchError(f"column {key!r} has {len(column)} rows, {first!r} has {rows}")
        wrapped = isinstance(column, (Tensor, TensorDictBase, NonTensorStack))
        first, rows, source[key] = key, len(column), column if wrapped else stack_of(column)
    td = TensorDict(source, batch_size=[] if first is None else [rows])
    return assign_non_tensor(td, **(non_tensor_dict or {}))


def list_of_dict_to_tensordict(rows: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Rows with the same keys -> TensorDict, each field as `column_of` makes it."""
    if not rows:
        raise BatchMismatchError("a TensorDict needs at least one row to know its fields, found none")
    for number, row in enumerate(rows):
        if odd := row.keys() ^ rows[0].keys():
            raise BatchMismatchError(f"row {number} and row 0 differ in fields {sorted(map(str, odd))}")
    return get_tensordict({key: column_of(str(key), [row[key] for row in rows]) for key in rows[0]})


def column_of(key: str, rows: Sequence[Any]) -> Any:
    """Tensors as one tensor, dense where all have one shape and jagged elsewhere; other values as a list."""
    if not all(isinstance(row, Tensor) for row in rows):
        return list(rows)
    if len({(row.shape, row.dtype) for row in rows}) == 1:
        return torch.stack(list(rows))
    try:
        return nested_tensor_from_tensor_list(rows)
    except BatchMismatchError as error:
        raise BatchMismatchError(f"field {key!r}: {error}") from None


# ---- getting out


def get(td: TensorDictBase, key: str, default: Any = None) -> Any:
    """Entry without its non-tensor wrapper (a list where there is one value per row), or `default`."""
    return unwrap_non_tensor_data(td.get(key)) if key in td.keys() else default  # noqa: SIM118


def need(td: TensorDictBase, key: str) -> Any:
    """Entry without its wrapper. FieldMissingError, naming what is there, where it is absent."""
    require_fields([key], td.keys(), "TensorDict")
    return get(td, key)


def get_non_tensor_data(td: TensorDictBase, key: str, default: Any) -> Any:
    """The same as `get` for what is no tensor. BatchMismatchError where it is one."""
    value = get(td, key, default)
    if key in td.keys() and isinstance(value, Tensor):  # noqa: SIM118
        raise BatchMismatchError(f"{key!r} is a tensor of shape {tuple(value.shape)}; expected a Python value")
    return value


def get_keys(td: TensorDictBase, keys: Iterable[str]) -> TensorDict:
    """TensorDict of these entries only, over the same memory. FieldMissingError naming all that are absent."""
    names = require_fields(keys, td.keys(), "TensorDict")
    return TensorDict({key: td.get(key) for key in names}, batch_size=td.batch_size, device=td.device)


def pop(td: TensorDictBase, key: str, default: Any = _MISSING) -> Any:
    """Remove an entry and return it without its wrapper. FieldMissingError where it is absent without a default."""
    if default is not _MISSING and key not in td.keys():  # noqa: SIM118
        return default
    value = need(td, key)
    td.del_(key)
    return value


def pop_keys(td: TensorDictBase, keys: Iterable[str]) -> TensorDict:
    """Move these entries into the TensorDict returned. FieldMissingError, with nothing moved, if one is absent."""
    popped = get_keys(td, keys)
    for key in popped.keys():  # noqa: SIM118
        td.del_(key)
    return popped
