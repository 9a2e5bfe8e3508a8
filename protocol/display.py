"""How an envelope shows itself: one line per field, as text and, in a notebook, as a table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from protocol.values import short

if TYPE_CHECKING:
    from protocol.envelope import DataProto

_HEAD = ("field", "shape", "dtype", "first row")
_SHOWN = 6  # entries of the first row


def as_text(data: DataProto) -> str:
    """Aligned table of all fields, then meta_info."""
    lines = [_HEAD, *_fields(data)]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    table = ["  ".join([*(cell.ljust(width) for cell, width in zip(line, widths)), line[3]]) for line in lines]
    return "\n  ".join(
        [_title(data), *table, *(f"meta_info[{key!r}] = {short(value)}" for key, value in data.meta_info.items())]
    )


def as_html(data: DataProto) -> str:
    """The same as an HTML table, escaped."""
    row = "<tr>{}</tr>".format
    head = row("".join(f"<th>{cell}</th>" for cell in _HEAD))
    body = "".join(row("".join(f"<td>{escape(cell)}</td>" for cell in line)) for line in _fields(data))
    meta = "".join(f"<li>{escape(repr(key))}: {escape(short(value))}</li>" for key, value in data.meta_info.items())
    return f"<b>{escape(_title(data))}</b><table>{head}{body}</table>" + (f"meta_info<ul>{meta}</ul>" if meta else "")


def _title(data: DataProto) -> str:
    return f"{type(data).__name__} of {len(data)} rows"


def _fields(data: DataProto) -> Iterator[tuple[str, str, str, str]]:
    tensors = [] if data.batch is None else data.batch.items()
    for key, column in [*tensors, *data.non_tensor_batch.items()]:
        yield str(key), *_described(column)


def _described(column: Any) -> tuple[str, str, str]:
    shape = ", ".join(str(size) if isinstance(size, int) else "jagged" for size in column.shape)
    first: Any = column[0] if len(column) else ""
    if isinstance(column, Tensor):
        return f"({shape})", str(column.dtype).removeprefix("torch."), _beginning(first) if len(column) else ""
    return f"({shape})", str(column.dtype), short(first.item() if isinstance(first, np.generic) else first, 40)


def _beginning(row: Tensor) -> str:
    flat = row.detach().flatten()
    shown = ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in flat[:_SHOWN].tolist())
    return f"[{shown}{', ...' if len(flat) > _SHOWN else ''}]" if row.dim() else shown


def data_info(data: DataProto) -> str:
    """The fields and what they are made of, without their values."""
    lines = ["batch"]
    for key, entry in [] if data.batch is None else data.batch.items():
        shape, dtype, _ = _described(entry) if isinstance(entry, Tensor) else (type(entry).__name__, "", "")
        lines.append(f"  {key}: {shape} {dtype} {getattr(entry, 'device', None) or ''}".rstrip())
    lines.append("non_tensor_batch")
    lines += [f"  {key}: {column.shape} {column.dtype}" for key, column in data.non_tensor_batch.items()]
    lines.append("meta_info")
    return "\n".join([*lines, *(f"  {key}: {_type_name(value)}" for key, value in data.meta_info.items())])


def _type_name(value: Any) -> str:
    """Type of a value; of containers also the types within, of arrays and tensors shape and dtype."""
    name = type(value).__name__
    if isinstance(value, (Tensor, np.ndarray)):
        shape, dtype, _ = _described(value) if value.ndim else ("()", str(value.dtype).removeprefix("torch."), "")
        return f"{name}{shape} {dtype}"
    if isinstance(value, dict):
        return name + "{" + ", ".join(f"{key}: {_type_name(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"{name}[{', '.join(sorted(set(map(_type_name, value))))}]"
    return name


def size_text(data: DataProto) -> str:
    """How much memory the tensors and the object columns take. Of objects only the top level can be measured."""
    tensors = 0 if data.batch is None else sum(map(_bytes, data.batch.values(True, True)))
    columns = sum(
        column.nbytes + (sum(map(sys.getsizeof, column.flat)) if column.dtype == object else 0)
        for column in data.non_tensor_batch.values()
    )
    return f"{len(data)} rows, tensors {tensors / 2**30:.6f} GB, object columns {columns / 2**30:.6f} GB"


def _bytes(entry: Any) -> int:
    tensor = entry.values() if isinstance(entry, Tensor) and entry.is_nested else entry
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0
