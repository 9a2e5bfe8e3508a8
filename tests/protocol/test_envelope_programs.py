"""Random programs of operations, against an envelope that is a plain list of rows."""

from __future__ import annotations

import copy
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from envelopes import dtypes_of, envelope, rows_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protocol import (
    DataProto,
    collate_fn,
    deserialize_tensordict,
    pad_dataproto_to_divisor,
    serialize_tensordict,
    unpad_dataproto,
)

INDEX_KINDS = {
    "list": list,
    "numpy": lambda rows: np.array(rows, dtype=np.int64),
    "tensor": lambda rows: torch.tensor(rows, dtype=torch.int64),
}


def as_text(row: dict[str, Any]) -> str:
    """A row as something that can be sorted."""
    return repr(sorted(row.items()))


class Programs(RuleBasedStateMachine):
    """`self.data` is the envelope; `self.rows`, `self.meta` and `self.dtypes` (by column) are what it must hold."""

    @initialize(rows=st.integers(1, 5))
    def start(self, rows: int) -> None:
        self.data = envelope(rows, kept={"list": [1, None]})
        self.rows = rows_of(self.data)
        self.meta: dict[str, Any] = {"kept": {"list": [1, None]}}
        self.dtypes = dtypes_of(self.data)
        self.aside: DataProto | None = None
        self.earlier: list[tuple[DataProto, Any]] = []

    def becomes(self, data: DataProto, rows: list[dict[str, Any]]) -> None:
        """A new envelope takes over; the old one is held to what it was."""
        self.earlier = [*self.earlier[-2:], (self.data, copy.deepcopy((self.rows, self.meta, self.dtypes)))]
        self.data, self.rows = data, rows

    @invariant()
    def the_envelope_holds_these_rows(self) -> None:
        if not hasattr(self, "data"):
            return
        assert len(self.data) == len(self.rows)
        assert rows_of(self.data) == self.rows
        assert self.data.meta_info == self.meta
        assert dtypes_of(self.data) == self.dtypes
        assert all(column.ndim == 1 for column in self.data.non_tensor_batch.values())
        for old, (rows, meta, dtypes) in self.earlier:
            assert (rows_of(old), old.meta_info, dtypes_of(old)) == (rows, meta, dtypes)

    @rule(draw=st.data(), kind=st.sampled_from(sorted(INDEX_KINDS)))
    def take_rows(self, draw: Any, kind: str) -> None:
        count = len(self.rows)
        chosen = draw.draw(st.lists(st.integers(-count, count - 1), max_size=6)) if count else []
        self.becomes(self.data[INDEX_KINDS[kind](chosen)], [self.rows[row] for row in chosen])

    @rule(start=st.integers(-6, 6), stop=st.none() | st.integers(-6, 6), step=st.sampled_from([None, 1, 2, -1]))
    def take_slice(self, start: int, stop: int | None, step: int | None) -> None:
        self.becomes(self.data[start:stop:step], self.rows[start:stop:step])

    @rule(draw=st.data())
    def take_mask(self, draw: Any) -> None:
        mask = draw.draw(st.lists(st.booleans(), min_size=len(self.rows), max_size=len(self.rows)))
        self.becomes(self.data[np.array(mask, dtype=bool)], [row for row, keep in zip(self.rows, mask) if keep])

    @precondition(lambda self: len(self.rows) <= 12)
    @rule(times=st.integers(1, 3), interleave=st.booleans())
    def repeat(self, times: int, interleave: bool) -> None:
        rows = [row for row in self.rows for _ in range(times)] if interleave else self.rows * times
        self.becomes(self.data.repeat(times, interleave), rows)

    @rule(draw=st.data())
    def reorder(self, draw: Any) -> None:
        order = draw.draw(st.permutations(range(len(self.rows))))
        self.becomes(self.data.select(), self.rows)
        self.data.reorder(torch.tensor(order, dtype=torch.int64))
        self.rows = [self.rows[row] for row in order]

    @rule(size=st.integers(1, 4))
    def split_and_concat(self, size: int) -> None:
        parts = self.data.split(size)
        assert [len(part) for part in parts[:-1]] == [size] * len(parts[:-1])
        if parts:
            self.becomes(DataProto.concat(parts), self.rows)

    @precondition(lambda self: "is_padding" not in self.dtypes)
    @rule(chunks=st.integers(1, 4))
    def pad_chunk_concat_and_unpad(self, chunks: int) -> None:
        padded, added = pad_dataproto_to_divisor(self.data, chunks)
        self.becomes(unpad_dataproto(DataProto.concat(padded.chunk(chunks)), added), self.rows)

    @precondition(lambda self: len(self.rows) <= 12)
    @rule()
    def concat_with_itself(self) -> None:
        self.becomes(DataProto.concat([self.data, self.data]), self.rows * 2)

    @rule(draw=st.data())
    def pop_and_unite(self, draw: Any) -> None:
        names = draw.draw(st.lists(st.sampled_from(sorted(self.dtypes)), unique=True)) if self.dtypes else []
        self.becomes(self.data.select(), self.rows)
        tensors = [name for name in names if name in self.data.tensor_keys()]
        popped = self.data.pop(tensors, [name for name in names if name not in tensors], ["kept"])
        assert popped.field_names() == set(names)
        assert self.data.field_names() == self.dtypes.keys() - set(names)
        assert rows_of(popped) == [{name: row[name] for name in names} for row in self.rows]
        self.data.union(popped)

    @precondition(lambda self: len(self.dtypes) > 2)
    @rule(draw=st.data())
    def drop_a_column(self, draw: Any) -> None:
        name = draw.draw(st.sampled_from(sorted(self.dtypes.keys() - {"scalar"})))
        tensors = self.data.tensor_keys() - {name}
        self.becomes(
            self.data.select(sorted(tensors), [key for key in self.data.non_tensor_batch if key != name]),
            [{key: value for key, value in row.items() if key != name} for row in self.rows],
        )
        del self.dtypes[name]

    @rule(draw=st.data(), new=st.sampled_from(["x", "y", "z"]))
    def rename(self, draw: Any, new: str) -> None:
        old = draw.draw(st.sampled_from(sorted(self.dtypes.keys() - {"scalar"}) or ["scalar"]))
        if new in self.dtypes or old == "scalar":
            return
        self.becomes(self.data.select(), self.rows)
        self.data.rename(old, new)
        self.rows = [{new if key == old else key: value for key, value in row.items()} for row in self.rows]
        self.dtypes = {new if key == old else key: dtype for key, dtype in self.dtypes.items()}

    @precondition(lambda self: len(self.rows) <= 12)
    @rule(draw=st.data())
    def repeat_each_row_its_own_number_of_times(self, draw: Any) -> None:
        times = draw.draw(st.lists(st.integers(0, 2), min_size=len(self.rows), max_size=len(self.rows)))
        rows = [row for row, count in zip(self.rows, times) for _ in range(count)]
        self.becomes(self.data.sample_level_repeat(times), rows)

    @precondition(lambda self: {"matrix", "pair"} & self.dtypes.keys() and len(self.rows) <= 12)
    @rule(draw=st.data())
    def cut_columns(self, draw: Any) -> None:
        width = {len(row[key]) for row in self.rows for key in {"matrix", "pair"} & row.keys()}
        if width != {2}:
            return
        cut = draw.draw(st.sets(st.sampled_from(sorted({"matrix", "pair"} & self.dtypes.keys()))))
        rows = [
            {key: value[part : part + 1] if key in cut else value for key, value in row.items()}
            for row in self.rows
            for part in range(2)
        ]
        self.becomes(self.data.unfold_column_chunks(2, cut), rows)

    @precondition(lambda self: self.rows)
    @rule(draw=st.data(), seed=st.none() | st.integers(0, 9))
    def go_through_mini_batches(self, draw: Any, seed: int | None) -> None:
        size = draw.draw(st.sampled_from([size for size in range(1, len(self.rows) + 1) if len(self.rows) % size == 0]))
        options = {"shuffle": seed is not None}
        parts = list(self.data.make_iterator(size, 2, seed, options))
        assert {len(part) for part in parts} == {size}
        for epoch in (parts[: len(parts) // 2], parts[len(parts) // 2 :]):
            seen = [row for part in epoch for row in rows_of(part)]
            assert sorted(map(as_text, seen)) == sorted(map(as_text, self.rows))
            assert seed is not None or seen == self.rows
        self.becomes(DataProto.concat(list(self.data.make_iterator(size, 1))), self.rows)

    @precondition(lambda self: self.rows and "is_padding" not in self.dtypes)
    @rule(added=st.integers(0, 3), word=st.sampled_from(["first", "last"]))
    def pad_in_place_and_unpad(self, added: int, word: str) -> None:
        self.becomes(self.data.select(), self.rows)
        self.data.padding(added, word)
        copied = self.rows[0 if word == "first" else -1]
        padded = [{**row} for row in self.rows] + [{**copied} for _ in range(added)]
        assert [{k: v for k, v in row.items() if k != "is_padding"} for row in rows_of(self.data)] == padded
        self.data = unpad_dataproto(self.data, added)

    @precondition(lambda self: self.rows)
    @rule()
    def take_rows_apart_and_collate_them(self) -> None:
        lengths = {len(row["jagged"]) for row in self.rows if "jagged" in row}
        if len(lengths) == 1:  # rows of one length come back dense: known, and another dtype and shape of field
            return
        self.becomes(collate_fn(list(self.data)), self.rows)

    @rule(way=st.sampled_from(["pickle", "tensordict", "wire", "disk", "copy", "deepcopy"]))
    def round_trip(self, way: str) -> None:
        if way == "disk":
            with tempfile.TemporaryDirectory() as folder:
                self.data.save_to_disk(Path(folder) / "data")
                self.becomes(DataProto.load_from_disk(Path(folder) / "data"), self.rows)
        elif way in ("copy", "deepcopy"):
            self.becomes(getattr(copy, way)(self.data), self.rows)
        elif way == "pickle":
            self.becomes(pickle.loads(pickle.dumps(self.data)), self.rows)
        elif way == "tensordict":
            self.becomes(DataProto.from_tensordict(self.data.to_tensordict()), self.rows)
        else:
            encoded = pickle.loads(pickle.dumps(serialize_tensordict(self.data.to_tensordict())))
            self.becomes(DataProto.from_tensordict(deserialize_tensordict(encoded)), self.rows)


class TestPrograms(Programs.TestCase):
    settings = settings(max_examples=300, stateful_step_count=10, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(7200)
class TestManyPrograms(Programs.TestCase):
    settings = settings(max_examples=10_000, stateful_step_count=10, deadline=None)
