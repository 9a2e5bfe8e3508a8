"""DataProto: the padded envelope that the driver passes through a step, growing field by field.

It does not travel into workers (those take and return TensorDicts of jagged rows) and knows no stage by name.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, overload

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from protocol import disk, display, wire
from protocol import tensordict_utils as tu
from protocol.dimensions import DimensionOperations
from protocol.errors import BatchMismatchError, FileFormatError, PPOLibError
from protocol.jagged import parts_of
from protocol.lineage import LineageEntry
from protocol.merge import MergeOperations
from protocol.rows import RowOperations
from protocol.values import column_of_rows, deep_equal, object_column, own_copy, require_fields, short

Envelope = TypeVar("Envelope", bound="DataProto")


@dataclass
class DataProtoItem:
    """One row of an envelope. Tensors share memory with it."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto(RowOperations, MergeOperations, DimensionOperations):
    """Rows of tensors (`batch`), rows of Python objects (`non_tensor_batch`) and what holds for all (`meta_info`).

    Object columns are one-dimensional: a row holding a list keeps it, through every operation. `union`, `pop`,
    `rename`, `reorder`, `padding` and `to` change the envelope, all or nothing; everything else returns a new one with
    its own `meta_info`. `batch` may be None where there are only object columns.
    """

    # ---- construction

    @classmethod
    def from_single_dict(
        cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """Tensors of `data` go to `batch`, arrays and lists to `non_tensor_batch`."""
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        others = {key: value for key, value in data.items() if key not in tensors}
        return cls.from_dict(tensors, others, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor] | None = None,
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Envelope of tensors that agree in their first `num_batch_dims` dimensions, and of columns of objects."""
        if num_batch_dims < 1:
            raise BatchMismatchError(f"an envelope has at least one batch dimension, found {num_batch_dims}")
        if non_tensors and num_batch_dims != 1:
            raise BatchMismatchError(f"object columns are one-dimensional, but num_batch_dims={num_batch_dims}")
        batch = _tensor_batch(tensors, num_batch_dims) if tensors else None
        return cls(batch, dict(non_tensors or {}), own_copy(meta_info or {}), auto_padding)

    @classmethod
    def from_tensordict(
        cls, tensor_dict: TensorDictBase, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
    ) -> Self:
        """The inverse of `to_tensordict`: stacks become object columns, single values `meta_info`. Tensors are shared.

        `meta_info` given here goes over what is in `tensor_dict`.
        """
        if not isinstance(tensor_dict, TensorDictBase):
            raise BatchMismatchError(
                f"expected a TensorDict, found {type(tensor_dict).__name__}; from_dict takes a dict"
            )
        td, tensors, columns, meta = tensor_dict, {}, {}, {}
        for key, entry in tu.entries(td):
            home = columns if isinstance(entry, NonTensorStack) else meta
            home = home if isinstance(entry, (NonTensorStack, NonTensorData)) else tensors
            home[key] = tu.unwrap_non_tensor_data(entry)
        dtypes = meta.pop(tu.COLUMN_DTYPES, {})
        columns = {k: np.array(v, dtypes[k]) if k in dtypes else object_column(k, v) for k, v in columns.items()}
        batch = None
        if tensors or not columns:
            batch = TensorDict(tensors, batch_size=td.batch_size[:num_batch_dims], device=td.device)
        return cls(batch, columns, own_copy({**meta, **(meta_info or {})}))

    def to_tensordict(self) -> TensorDict:
        """Tensors (shared), object columns as NonTensorStack, meta_info as NonTensorData. Names must not collide."""
        self.check_consistency()
        td = TensorDict({}, batch_size=[len(self)]) if self.batch is None else self.batch.copy()
        taken = set(td.keys()) | self.non_tensor_batch.keys()
        for key in self.meta_info:
            if key in taken or not isinstance(key, str):
                why = "is also the name of a field" if key in taken else "is not a string"
                raise BatchMismatchError(f"meta_info key {key!r} {why} and cannot stand in a TensorDict")
        for key, column in self.non_tensor_batch.items():
            if column.ndim > 1:
                raise BatchMismatchError(f"column {key!r} is folded {column.shape}; call unfold_batch_dim before this")
            tu.assign_non_tensor_stack(td, key, column.tolist())
        dtypes = {key: column.dtype for key, column in self.non_tensor_batch.items() if column.dtype != object}
        for key, value in {**own_copy(self.meta_info), **({tu.COLUMN_DTYPES: dtypes} if dtypes else {})}.items():
            tu.assign_non_tensor_data(td, key, value)
        return td

    def __reduce__(self) -> tuple[Any, ...]:
        batch = None if self.batch is None else wire.serialize_tensordict(self.batch, in_block=True)
        return _from_wire, (type(self), batch, wire.pickle_values(self._rest()))

    def _rest(self) -> dict[str, Any]:
        """What this envelope consists of beside its tensors, subclass attributes included."""
        return {**self.__dict__, "batch": None, "lineage": tuple(map(tuple, self.lineage))}

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write one file that `load_from_disk` reads; whole or not at all.

        It holds tensors, arrays and plain Python values: None, numbers, strings, bytes, and lists, tuples, sets and
        dicts of these. Anything else is refused with NotStorableError naming where it stands, before a byte is written.
        """
        batch = None if self.batch is None else wire.serialize_tensordict(self.batch)
        disk.save(filepath, (batch, wire.encode_values(self._rest())))

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike[str]) -> Self:
        """What `save_to_disk` wrote, in writable CPU memory. Nothing found in the file is executed.

        Raises FileFormatError where the file is none of these or is damaged.
        """
        batch, rest = disk.load(filepath)
        try:
            return _from_wire(cls, batch, rest)
        except (PPOLibError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise FileFormatError(f"{filepath} holds no whole envelope: {error}") from error

    def __copy__(self) -> Self:
        return self.select()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.select(deepcopy=True)

    # ---- access

    def __repr__(self) -> str:
        return display.as_text(self)

    def get_data_info(self) -> str:
        """Names, shapes, dtypes and devices of all fields and the types in meta_info, one to a line; no values."""
        return display.data_info(self)

    def print_size(self, prefix: str = "") -> None:
        """Print how much memory tensors and object columns take, behind `prefix`."""
        print(prefix + display.size_text(self))

    def _repr_html_(self) -> str:
        return display.as_html(self)

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: slice | Sequence[Any] | np.ndarray | torch.Tensor) -> Self: ...
    def __getitem__(self, item: Any) -> DataProtoItem | Self:
        """`data[3]` is one row; a slice, list, array, tensor or boolean mask gives an envelope.

        A row or a slice of step 1 shares the tensors' memory, everything else copies.
        """
        if not isinstance(item, (int, np.integer)) or isinstance(item, bool):
            return self.select_idxs(item)
        if not -len(self) <= item < len(self):
            raise IndexError(f"row {item} is out of range for {len(self)} rows")
        return DataProtoItem(
            None if self.batch is None else self.batch[int(item)],
            {key: column[item] for key, column in self.non_tensor_batch.items()},
            own_copy(self.meta_info),
        )

    def select(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
        deepcopy: bool = False,
    ) -> Self:
        """Envelope with only these keys; None keeps all of a kind. Tensors and objects are shared unless `deepcopy`."""
        batch_keys, columns, meta = self._found(batch_keys, non_tensor_batch_keys, meta_info_keys)
        batch = None if self.batch is None else self.batch.select(*batch_keys)
        new = self._derived(batch, {key: self.non_tensor_batch[key] for key in columns})
        new.meta_info = {key: new.meta_info[key] for key in meta}
        if deepcopy:
            new.batch = None if new.batch is None else new.batch.clone()
            new.non_tensor_batch, new.meta_info = copy.deepcopy((new.non_tensor_batch, new.meta_info))
        return new

    def pop(
        self,
        batch_keys: Sequence[str] | None = None,
        non_tensor_batch_keys: Sequence[str] | None = None,
        meta_info_keys: Sequence[str] | None = None,
    ) -> Self:
        """Move these keys out of this envelope into the one returned; None moves nothing of a kind.

        Raises FieldMissingError, with nothing moved, if one of them is not there.
        """
        batch_keys, columns, meta = self._found(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        popped = self.select(batch_keys, columns, meta)
        if self.batch is not None:
            self.batch = self.batch.exclude(*batch_keys)
        self.non_tensor_batch = {key: v for key, v in self.non_tensor_batch.items() if key not in columns}
        self.meta_info = {key: value for key, value in self.meta_info.items() if key not in meta}
        self.record("pop", [*batch_keys, *columns])
        return popped

    def _found(self, batch: Any, columns: Any, meta: Any) -> tuple[list[str], list[str], list[str]]:
        """The keys of each kind, None standing for all; FieldMissingError for any that is absent."""
        have = () if self.batch is None else tuple(self.batch.keys())
        return (
            require_fields(have if batch is None else batch, have, "batch"),
            require_fields(
                self.non_tensor_batch if columns is None else columns, self.non_tensor_batch, "non_tensor_batch"
            ),
            require_fields(self.meta_info if meta is None else meta, self.meta_info, "meta_info"),
        )

    def rename(self, old_keys: str | Sequence[str], new_keys: str | Sequence[str]) -> Self:
        """Rename fields of `batch` or `non_tensor_batch` in place; swapping names is fine. Returns this envelope."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        require_fields(old, self.field_names(), "batch or non_tensor_batch")
        names = dict(zip(old, new))
        result = [names.get(key, key) for key in self.field_names()]
        if len(old) != len(new) or len(names) != len(old) or len(set(result)) != len(result):
            raise BatchMismatchError(f"cannot rename {old} to {new}: names must pair up and stay distinct")
        if self.batch is not None:
            renamed = {names.get(key, key): entry for key, entry in tu.entries(self.batch)}
            self.batch = TensorDict(renamed, batch_size=self.batch.batch_size, device=self.batch.device)
        self.non_tensor_batch = {names.get(key, key): column for key, column in self.non_tensor_batch.items()}
        return self.record("rename", new)

    def to(self, device: str | torch.device) -> Self:
        """Move the tensors to `device` in place. Returns this envelope."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self


def _tensor_batch(tensors: Mapping[str, torch.Tensor], num_batch_dims: int) -> TensorDict:
    """TensorDict of tensors whose leading dimensions agree; the error names the two that do not."""
    first, batch_size = None, None
    for key, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise BatchMismatchError(f"field {key!r} must be a tensor, found {type(tensor).__name__}")
        if tensor.is_nested:
            parts_of(tensor, key)  # refuses the other layout of nested tensors
        leading = tuple(tensor.shape[:num_batch_dims])
        if len(leading) < num_batch_dims or (batch_size is not None and leading != batch_size):
            other = "" if first is None else f"; {first!r} has {tuple(tensors[first].shape)}"
            raise BatchMismatchError(
                f"field {key!r} has shape {tuple(tensor.shape)}{other}: "
                f"the first {num_batch_dims} dimensions must agree"
            )
        first, batch_size = key, leading
    return TensorDict(dict(tensors), batch_size=batch_size)


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Rows back into an envelope: the inverse of `list(data)`. Copies tensors, shares objects.

    Tensors are stacked, or become jagged where their shapes differ; numpy scalars make a column of their dtype. Fields
    must be the same in all rows, and so must meta_info. Raises BatchMismatchError naming the row that differs.
    """
    if not x:
        raise BatchMismatchError("nothing to collate: the list of rows is empty")
    first = x[0]
    names = [set(() if row.batch is None else row.batch.keys()) | row.non_tensor_batch.keys() for row in x]
    for number, row in enumerate(x):
        if odd := names[number] ^ names[0]:
            raise BatchMismatchError(f"row {number} and row 0 differ in fields {sorted(odd)}")
        if not deep_equal(row.meta_info, first.meta_info):
            raise BatchMismatchError(
                f"meta_info is {short(first.meta_info)} in row 0 and {short(row.meta_info)} in row {number}"
            )
    columns = {key: column_of_rows(key, [row.non_tensor_batch[key] for row in x]) for key in first.non_tensor_batch}
    batch = None
    if first.batch is not None:
        batch = TensorDict({}, batch_size=[len(x)])
        for key in first.batch.keys():  # noqa: SIM118
            batch.set(key, tu.column_of(key, [row.batch.get(key) for row in x if row.batch is not None]))
    return DataProto(batch, columns, own_copy(first.meta_info))


def _from_wire(cls: type[Envelope], batch: Any, rest: Any) -> Envelope:
    new = object.__new__(cls)

    def fill_in() -> None:
        new.__dict__.update(wire.unpickle_values(rest))

    if batch is None:
        fill_in()
    else:
        tensors = wire.deserialize_tensordict(batch, meanwhile=fill_in)
        new.batch = tensors  # after `fill_in`, which has None there
    new.lineage = tuple(LineageEntry(*entry) for entry in new.lineage)
    new.check_consistency()
    return new
