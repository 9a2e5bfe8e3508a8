"""Faults that people met in pipelines like this one, each with the behaviour that is right."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from envelopes import envelope, rows_of

from protocol import (
    BatchMismatchError,
    DataProto,
    DataProtoConfig,
    FieldMissingError,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)


@pytest.mark.parametrize(
    "column",
    [
        [[1, 2], [3, 4]],
        [[1], [2]],
        [(1, 2), (3, 4)],
        np.array([1, 2], dtype=np.int32),
        [np.zeros(2), np.ones(2)],
        [[], []],
    ],
    ids=str,
)
def test_rows_of_equal_length_lists_never_become_a_second_dimension_and_dtypes_stay(column, tmp_path):
    data = DataProto.from_single_dict({"x": torch.arange(2), "c": column})
    expected = data.non_tensor_batch["c"]
    data.save_to_disk(tmp_path / "file")
    for back in (
        DataProto.from_tensordict(data.to_tensordict()),
        pickle.loads(pickle.dumps(data)),
        DataProto.load_from_disk(tmp_path / "file"),
        DataProto.concat(data.chunk(2)),
        data.repeat(2, interleave=False)[:2],
    ):
        got = back.non_tensor_batch["c"]
        assert (got.shape, got.dtype) == ((2,), expected.dtype)
        assert [type(row) for row in got] == [type(row) for row in expected]
        assert [np.asarray(row).tolist() for row in got] == [np.asarray(row).tolist() for row in expected]


def test_union_takes_nan_and_arrays_in_dicts_for_equal_works_without_tensors_and_fails_whole():
    def columns() -> DataProto:
        rows = [{"a": np.array([1.0, float("nan")])}, {"a": [torch.ones(1)]}]
        return DataProto.from_dict(non_tensors={"c": rows, "f": np.array([float("nan"), 1.0])})

    data = columns().union(columns())
    assert data.batch is None
    other = columns().union(DataProto.from_dict({"new": torch.arange(2)}))
    other.non_tensor_batch["f"][1] = 2.0
    with pytest.raises(BatchMismatchError, match=r"'f' .*row 1: .*1.0.* and .*2.0"):
        data.union(other)
    assert data.field_names() == {"c", "f"}


def test_errors_name_the_key_both_shapes_and_the_first_row_that_differs():
    data = envelope(3)
    with pytest.raises(BatchMismatchError, match=r"'matrix' .*float32 \(3, 2\).*float32 \(3, 5\)"):
        data.union(DataProto.from_dict({"matrix": torch.zeros(3, 5)}))
    with pytest.raises(BatchMismatchError, match=r"'scalar' .*int64 \(3\).* row 2: 2 and 7"):
        data.union(DataProto.from_dict({"scalar": torch.tensor([0, 1, 7])}))
    with pytest.raises(BatchMismatchError, match=r"'b' has shape \(2, 4\); 'a' has \(3, 4\)"):
        DataProto.from_dict({"a": torch.zeros(3, 4), "b": torch.zeros(2, 4)})
    with pytest.raises(FieldMissingError, match=r"'lost'; present: \['jagged', 'matrix', 'scalar'\]"):
        data.select(["lost"])


def test_a_change_of_a_parts_meta_info_never_shows_in_the_whole():
    data = envelope(4, kept={"list": [1]})
    for part in [*data.chunk(2), *data.split(3), data.repeat(2), data[1:], data[[0]], data.select(), data.slice(0, 2)]:
        part.meta_info["kept"]["list"].append(2)
        part.meta_info["other"] = 1
    assert data.meta_info == {"kept": {"list": [1]}}


def test_pop_loses_nothing_reorder_refuses_a_short_index_deepcopy_copies_and_padding_knows_its_words():
    data = envelope(3)
    before = rows_of(data)
    with pytest.raises(FieldMissingError, match="'lost'"):
        data.pop(["scalar", "lost"], ["name"])
    with pytest.raises(BatchMismatchError, match="each of 3 rows once, found 2"):
        data.reorder(torch.tensor([1, 0]))
    with pytest.raises(BatchMismatchError, match="'any other word'"):
        data.padding(1, "any other word")
    data.select(deepcopy=True).batch["matrix"].fill_(9)
    assert rows_of(data) == before


def test_concat_keeps_every_parts_meta_info_by_a_rule_per_key():
    parts = [
        envelope(1, metrics={"loss": 1.0}, timing={"gen": 0.1}, array=np.array([1.0, float("nan")]), only_first=1),
        envelope(
            1, metrics={"loss": 2.0}, timing={"gen": 0.1000001}, array=np.array([1.0, float("nan")]), only_second=2
        ),
    ]
    meta = DataProto.concat(parts).meta_info
    assert meta["metrics"] == {"loss": [1.0, 2.0]}
    assert meta["timing"] == {"gen": [0.1, 0.1000001]}
    assert (meta["only_first"], meta["only_second"]) == (1, 2)
    parts[1].meta_info["array"] = np.array([1.0, 2.0])
    with pytest.raises(
        BatchMismatchError, match=r"meta_info\['array'\] is .*nan.* in earlier parts and .*2.* in part 1"
    ):
        DataProto.concat(parts)


@pytest.mark.parametrize("ask", ["envelope", "everywhere"])
def test_chunk_with_padding_on_never_fails_and_added_rows_carry_no_weight(ask, monkeypatch):
    tensors = {"scalar": torch.arange(5), "response_mask": torch.ones(5, 2, dtype=torch.int64)}
    data = DataProto.from_dict(tensors, auto_padding=ask == "envelope")
    if ask == "everywhere":
        assert not data.is_padding_enabled()
        monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert data.is_padding_enabled()
    whole = DataProto.concat(data.chunk(4))
    assert whole.batch["is_padding"].tolist() == [False] * 5 + [True] * 3
    assert whole.batch["response_mask"].sum(1).tolist() == [2] * 5 + [0] * 3
    assert rows_of(unpad_dataproto(whole, 3)) == rows_of(data)
    padded, added = pad_dataproto_to_divisor(data, 4)
    assert (len(padded), added) == (8, 3)


def test_a_pickle_of_any_protocol_loads_under_any_environment(tmp_path):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / f"{protocol}.pkl").write_bytes(pickle.dumps(envelope(3), protocol=protocol))
    code = (
        "import pickle, sys\nfor file in sys.argv[1:]:\n"
        "    assert pickle.load(open(file, 'rb')).batch['matrix'].tolist()[2] == [4, 5]"
    )
    for switch in ({}, {"VERL_DATAPROTO_SERIALIZATION_METHOD": "numpy", "LIST_TO_STACK": "0"}):
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2]), **switch}
        subprocess.run([sys.executable, "-c", code, *map(str, tmp_path.glob("*.pkl"))], check=True, env=environment)


def test_mini_batches_are_shuffled_exactly_when_asked_for_and_say_so():
    data = envelope(6)

    def order(**arguments):
        parts = list(data.make_iterator(3, 2, **arguments))
        return [row for part in parts for row in part.batch["scalar"].tolist()], {part.lineage[-1:] for part in parts}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_order, said = order()
        assert (in_order, said) == ([*range(6), *range(6)], {()})
        assert order(seed=1, dataloader_kwargs={"shuffle": False})[0] == in_order
        shuffled, said = order(seed=1, dataloader_kwargs={"shuffle": True})
    assert sorted(shuffled[:6]) == sorted(shuffled[6:]) == list(range(6))
    assert shuffled[:6] != shuffled[6:]
    assert [entry.op for (entry,) in said] == ["shuffle"]
    assert order(seed=1, dataloader_kwargs={"shuffle": True})[0] == shuffled
    assert order(seed=2, dataloader_kwargs={"shuffle": True})[0] != shuffled
    with pytest.warns(UserWarning, match="seed=1 does nothing: rows keep their order"):
        assert order(seed=1)[0] == in_order
