"""Rows from files: parquet, json, jsonl and the built-in tasks, each row knowing the file and place it came from.

Nothing here loads torch, so a configuration check can open the files and look at their columns in milliseconds.
Parquet is kept as a table and turned into Python objects a row at a time: a million rows stay small.
"""

from __future__ import annotations

import copy
import difflib
import json
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from ppo_lib.data import builtin
from ppo_lib.errors import DataError

Row = dict[str, Any]


class RowFile(Protocol):
    """One file's rows. `columns` are the names found in any row."""

    name: str
    columns: tuple[str, ...]

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Row `index` as Python objects of the caller's own."""
        ...

    def column(self, name: str) -> list[Any]:
        """One value a row; None where a row has none."""
        ...


class ListRows:
    """Rows already in memory: json, jsonl, built-in tasks."""

    def __init__(self, name: str, rows: list[Row]):
        self.name, self._rows = name, rows
        self.columns = tuple(dict.fromkeys(key for row in rows for key in row))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        """Row `index`, the caller's to change."""
        return copy.deepcopy(self._rows[index])  # a scorer that edits its extra_info must not edit the data

    def column(self, name: str) -> list[Any]:
        """One value a row, None where a row has none."""
        return [row.get(name) for row in self._rows]


class ParquetRows:
    """A parquet file: its footer is read when it is opened, its rows when they are first needed."""

    def __init__(self, path: Path):
        import pyarrow.parquet as pq

        self.name = str(path)
        try:
            footer = pq.ParquetFile(path)
        except Exception as error:  # pyarrow raises its own errors and plain OSError for damaged files
            raise _damaged(self.name, error) from error
        self._length = footer.metadata.num_rows
        self.columns = tuple(footer.schema_arrow.names)

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _table(self) -> Any:
        import pyarrow.parquet as pq

        try:
            return pq.read_table(self.name)
        except Exception as error:
            raise _damaged(self.name, error) from error

    def row(self, index: int) -> Row:
        """Row `index`, the caller's to change."""
        return self._table.slice(index, 1).to_pylist()[0]

    def column(self, name: str) -> list[Any]:
        """One value a row, all None for a column that is not there."""
        if name not in self.columns:
            return [None] * len(self)
        return self._table.column(name).to_pylist()


class Rows:
    """The rows of several files, one after the other. A row's number counts from 0 over all of them."""

    def __init__(self, files: Sequence[RowFile]):
        self.files = tuple(files)
        self.columns = tuple(dict.fromkeys(name for file in files for name in file.columns))
        self._ends = list(accumulate(len(file) for file in files))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Row:
        file, inner = self._place(index)
        return file.row(inner)

    def column(self, name: str) -> list[Any]:
        """The values of one column; None where a file or row lacks it."""
        return [value for file in self.files for value in file.column(name)]

    def where(self, index: int) -> str:
        """File and row of row `index`, for messages; a file's rows count from 0."""
        file, inner = self._place(index)
        return f"{file.name}, row {inner}"

    def _place(self, index: int) -> tuple[RowFile, int]:
        which = bisect_right(self._ends, index)
        start = self._ends[which - 1] if which else 0
        return self.files[which], index - start


def open_rows(data_files: str | Sequence[str], required_columns: Sequence[str] = ()) -> Rows:
    """Open `data_files` (paths ending in .parquet, .json, .jsonl, or `builtin:NAME`).

    Raises `DataError` naming the file if one is missing, unreadable, of an unknown kind, without rows, or without a
    column of `required_columns`.
    """
    names = [data_files] if isinstance(data_files, str) else list(data_files)
    if not names:
        raise DataError("no data files given; expected at least one path or builtin:NAME.")
    files = [_open(str(name)) for name in names]
    for file in files:
        if len(file) == 0:
            raise DataError(f"{file.name} is empty: it has no rows.")
        for column in required_columns:
            if column not in file.columns:
                near = difflib.get_close_matches(column, file.columns, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise DataError(f"{file.name} has no column {column!r}; it has {', '.join(file.columns)}{hint}")
    return Rows(files)


def open_data(data_files: str | Sequence[str], config: Any, is_train: bool) -> Rows:
    """`open_rows` with the columns that the section `data` needs, and `builtin:NAME` as training or validation part."""
    names = [data_files] if isinstance(data_files, str) else list(data_files)
    return open_rows([builtin.with_split(n, is_train) for n in names], [config.prompt_key, config.reward_fn_key])


def _open(name: str) -> RowFile:
    if name.startswith(builtin.PREFIX):
        return ListRows(name, builtin.rows(name))
    path = Path(name).expanduser()
    if path.is_dir():
        raise DataError(f"{path} is a folder; expected a .parquet, .json or .jsonl file.")
    if not path.is_file():
        raise DataError(
            f"the data file {name} does not exist" + (f" ({path.absolute()})." if str(path) != name else ".")
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty: 0 bytes.")
    if path.suffix == ".parquet":
        return ParquetRows(path)
    if path.suffix in (".json", ".jsonl"):
        return ListRows(str(path), _read_json(path))
    raise DataError(f"{path}: unknown kind of data file {path.suffix!r}; expected .parquet, .json or .jsonl.")


def _read_json(path: Path) -> list[Row]:
    """A .json file is one list of objects or, as people also write it, one object a line; .jsonl is the latter."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise _damaged(str(path), error) from error
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {error.lineno}: not valid JSON: {error.msg}.") from error
        places = [f"row {index}" for index in range(len(rows))]
    else:
        rows, places = [], []
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}, line {number}: not valid JSON: {error.msg} (column {error.colno})."
                ) from error
            places.append(f"line {number}")
    for row, place in zip(rows, places):
        if not isinstance(row, dict):
            raise DataError(f"{path}, {place}: expected an object with named columns, found {type(row).__name__}.")
    return rows


def _damaged(name: str, error: Exception) -> DataError:
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return DataError(f"{name} cannot be read; it may be damaged: {said}")
