"""What each operation promises, one line each, and the tests that hold all of them to it."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from envelopes import dtypes_of, envelope, rows_of

import protocol
from protocol import (
    BatchMismatchError,
    DataProto,
    FieldMissingError,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)


@dataclass(eq=False, repr=False)
class Tagged(DataProto):
    """What somebody who adds an attribute of their own writes."""

    tag: str = ""


class Promise(NamedTuple):
    """One operation: what it says, a call of it, whether it changes its operand, whether tensors share its memory."""

    says: str
    run: Callable[[Any], Any]
    changes: bool = False
    shares: bool | None = None  # None where there is no tensor to look at


def first_part(parts: Any) -> Any:
    return next(iter(parts))


def columns(rows: int = 4) -> DataProto:
    return DataProto.from_dict({"new": torch.arange(rows)})


def dense(data: DataProto) -> DataProto:
    return data.select(["scalar", "matrix"])


ROWS = 4
PROMISES = {
    "__getitem__": Promise(
        "a slice of step 1 is a view; list, array, tensor, mask copy", lambda d: d[1:3], shares=True
    ),
    "chunk": Promise("equal contiguous views", lambda d: first_part(d.chunk(2)), shares=True),
    "concat": Promise("rows under one another, copied", lambda d: type(d).concat([d, d]), shares=False),
    "from_tensordict": Promise(
        "the inverse of to_tensordict, over the same memory",
        lambda d: DataProto.from_tensordict(d.to_tensordict()),
        shares=True,
    ),
    "make_iterator": Promise(
        "mini-batches in the rows' order, views", lambda d: first_part(d.make_iterator(2, 1)), shares=True
    ),
    "padding": Promise("appends marked rows of zero weight, in place", lambda d: d.padding(2), changes=True),
    "pop": Promise("moves fields into a new envelope", lambda d: d.pop(["scalar"], ["name"], ["kept"]), True, True),
    "rename": Promise("changes names, in place", lambda d: d.rename("name", "title"), True, True),
    "reorder": Promise("permutes rows, in place", lambda d: d.reorder(torch.tensor([3, 2, 1, 0])), changes=True),
    "repeat": Promise("every row n times, copied", lambda d: d.repeat(2), shares=False),
    "sample_level_repeat": Promise(
        "row i n[i] times, copied", lambda d: d.sample_level_repeat([1, 0, 2, 1]), shares=False
    ),
    "select": Promise("these fields only, over the same memory", lambda d: d.select(["scalar"], ["pair"]), shares=True),
    "select_idxs": Promise("the same as data[idxs]", lambda d: d.select_idxs([2, 0]), shares=False),
    "slice": Promise("the same as data[start:end:step]", lambda d: d.slice(1, 3), shares=True),
    "split": Promise("contiguous views of n rows, the last with the rest", lambda d: d.split(3)[0], shares=True),
    "to": Promise("moves the tensors, in place", lambda d: d.to("cpu"), True, True),
    "unfold_column_chunks": Promise(
        "n rows of each: fields named are cut, others repeated; copied",
        lambda d: d.unfold_column_chunks(2, ["matrix", "pair"]),
        shares=False,
    ),
    "union": Promise("adds the other's fields, in place, or changes nothing", lambda d: d.union(columns()), True, True),
    "copy.copy": Promise("the same as select()", copy.copy, shares=True),
    "copy.deepcopy": Promise("the same as select(deepcopy=True)", copy.deepcopy, shares=False),
    "pickle": Promise("arrives in memory of its own", lambda d: pickle.loads(pickle.dumps(d)), shares=False),
    "pad_dataproto_to_divisor": Promise(
        "copies, with marked rows", lambda d: pad_dataproto_to_divisor(d, 3)[0], shares=False
    ),
    "unpad_dataproto": Promise("drops the last rows, a view", lambda d: unpad_dataproto(d, 1), shares=True),
    "fold_batch_dim": Promise("rows into groups, a view", lambda d: fold_batch_dim(dense(d), 2), shares=True),
    "unfold_batch_dim": Promise(
        "groups into rows, a view", lambda d: unfold_batch_dim(fold_batch_dim(dense(d), 2)), shares=True
    ),
    "collate_fn": Promise("rows into an envelope, copied", lambda d: collate_fn(list(d)), shares=False),
}
ELSEWHERE = {  # tested where they are built: they put out no envelope, or take none in
    "check_consistency": "test_envelope.py",
    "field_names": "test_envelope.py",
    "from_dict": "test_envelope.py",
    "from_single_dict": "test_envelope.py",
    "get_data_info": "test_display_and_lineage.py",
    "is_padding_enabled": "test_envelope_rows.py",
    "load_from_disk": "test_disk.py",
    "print_size": "test_display_and_lineage.py",
    "record": "test_display_and_lineage.py",
    "save_to_disk": "test_disk.py",
    "tensor_keys": "test_envelope.py",
    "to_tensordict": "test_envelope.py",
}
CHANGED_TYPE = {"from_tensordict", "collate_fn"}  # make a DataProto of what is none


def subject() -> Tagged:
    data = envelope(ROWS, kept={"list": [1], "array": np.zeros(1)})
    return Tagged(data.batch, data.non_tensor_batch, data.meta_info, tag="mine")


def state(data: DataProto) -> Any:
    return copy.deepcopy((rows_of(data), dtypes_of(data), data.meta_info, data.lineage, data.auto_padding))


def everyone(**only: Any) -> Any:
    chosen = [name for name, promise in PROMISES.items() if all(getattr(promise, k) == v for k, v in only.items())]
    return pytest.mark.parametrize("name", chosen)


def test_no_public_operation_is_without_a_promise():
    methods = {name for name, _ in inspect.getmembers(DataProto, callable) if not name.startswith("_")}
    assert methods == {name for name in PROMISES if hasattr(DataProto, name)} - {"__getitem__"} | ELSEWHERE.keys()
    for name, file in ELSEWHERE.items():
        assert f".{name}(" in (Path(__file__).parent / file).read_text()


def test_every_file_of_the_package_stays_short_enough_to_read():
    files = Path(protocol.__file__).parent.glob("*.py")
    assert {
        file.name: len(file.read_text().splitlines()) for file in files if len(file.read_text().splitlines()) > 350
    } == {}


@everyone(changes=False)
def test_an_operand_is_left_as_it_was(name):
    data = subject()
    before = state(data)
    PROMISES[name].run(data)
    assert str(state(data)) == str(before)


@everyone(changes=True)
def test_an_operation_in_place_changes_its_operand_and_records_it(name):
    data = subject()
    before = state(data)
    PROMISES[name].run(data)
    assert name == "to" or (str(state(data)) != str(before) and data.lineage[-1].op == name)


@everyone()
def test_a_result_owns_its_meta_info(name):
    data = subject()
    kept = data.meta_info["kept"]
    result = PROMISES[name].run(data)
    if result is None or result is data:
        return
    result.meta_info["kept"]["list"].append(2)
    result.meta_info["kept"]["array"][0] = 5
    assert kept["list"] == [1]
    assert kept["array"][0] == 0


@everyone()
def test_a_subclass_and_its_attribute_survive(name):
    data = subject()
    result = PROMISES[name].run(data)
    result = data if result is None else result
    assert type(result) is (DataProto if name in CHANGED_TYPE else Tagged)
    assert name in CHANGED_TYPE or result.tag == "mine"


@everyone()
def test_dtypes_survive_and_a_row_that_holds_a_list_holds_a_list(name):
    data = subject()
    result = PROMISES[name].run(data)
    result = data if result is None else result
    same = result.field_names() & subject().field_names()
    assert {key: dtypes_of(result)[key] for key in same} == {key: dtypes_of(subject())[key] for key in same}
    for column in result.non_tensor_batch.values():
        assert column.ndim == (2 if name == "fold_batch_dim" else 1)
    if "pair" in result.non_tensor_batch:
        assert isinstance(result.non_tensor_batch["pair"].flat[0], list)


@pytest.mark.parametrize("name", [name for name, promise in PROMISES.items() if promise.shares is not None])
def test_tensors_share_memory_only_where_it_is_promised(name):
    data = subject()
    tensors = dict(data.batch.items())
    result = PROMISES[name].run(data)
    for key in result.tensor_keys() & {"scalar", "matrix"}:
        storage = result.batch[key].untyped_storage().data_ptr()
        assert (storage == tensors[key].untyped_storage().data_ptr()) is PROMISES[name].shares


FAILURES: dict[str, tuple[Callable[[DataProto], Any], type[Exception], str]] = {
    "chunk": (lambda d: d.chunk(3), BatchMismatchError, "4 rows cannot be cut into 3"),
    "concat": (lambda d: DataProto.concat([d, d.select(["scalar"])]), BatchMismatchError, r"\['jagged', 'matrix'\]"),
    "from_dict": (
        lambda d: d.from_dict({"a": torch.zeros(1), "b": torch.zeros(2)}),
        BatchMismatchError,
        "'b' has shape",
    ),
    "index": (lambda d: d[[4]], IndexError, "row 4 is out of range for 4 rows"),
    "mini-batch size": (
        lambda d: d.make_iterator(3, 1),
        BatchMismatchError,
        "4 rows cannot be cut into mini-batches of 3",
    ),
    "epochs": (lambda d: d.make_iterator(2, -1), BatchMismatchError, "epochs=-1"),
    "loader option": (
        lambda d: d.make_iterator(2, 1, dataloader_kwargs={"num_workers": 2}),
        BatchMismatchError,
        "'num_workers': 2",
    ),
    "padding": (lambda d: d.padding(2, "middle"), BatchMismatchError, "'first' or 'last', found 'middle'"),
    "pop": (lambda d: d.pop(["scalar", "lost"], ["name"]), FieldMissingError, "'lost'; present"),
    "pop column": (lambda d: d.pop(["scalar"], ["name", "lost"]), FieldMissingError, "'lost'; present"),
    "rename": (lambda d: d.rename(["scalar", "name"], ["x", "x"]), BatchMismatchError, "stay distinct"),
    "reorder": (lambda d: d.reorder(torch.tensor([0, 1, 2])), BatchMismatchError, "row 3 0 times"),
    "repeat": (lambda d: d.repeat(0), BatchMismatchError, "repeat_times=0"),
    "sample_level_repeat": (lambda d: d.sample_level_repeat([1, 2]), BatchMismatchError, "each of 4 rows"),
    "negative times": (lambda d: d.sample_level_repeat([1, 1, -1, 1]), BatchMismatchError, "0 up"),
    "fractions": (lambda d: d.sample_level_repeat([1, 1, 0.5, 1]), BatchMismatchError, "integer"),
    "select": (lambda d: d.select(["lost"]), FieldMissingError, "'lost'; present"),
    "split": (lambda d: d.split(0), BatchMismatchError, "split_size=0"),
    "cut tensor": (
        lambda d: d.unfold_column_chunks(3, ["matrix"]),
        BatchMismatchError,
        r"'matrix'.*\(4, 2\).* 3 equal",
    ),
    "cut flat": (
        lambda d: d.unfold_column_chunks(2, ["scalar"]),
        BatchMismatchError,
        "'scalar' has no second dimension",
    ),
    "cut jagged": (lambda d: d.unfold_column_chunks(2, ["jagged"]), BatchMismatchError, "'jagged' has no second"),
    "cut column": (lambda d: d.unfold_column_chunks(2, ["name"]), BatchMismatchError, "'name' row 0 .*'row0'"),
    "cut lost": (lambda d: d.unfold_column_chunks(2, ["lost"]), FieldMissingError, "'lost'; present"),
    "cut none": (lambda d: d.unfold_column_chunks(0), BatchMismatchError, "n_split=0"),
    "union value": (
        lambda d: d.union(DataProto.from_dict({"new": torch.arange(4), "scalar": torch.tensor([0, 1, 2, 9])})),
        BatchMismatchError,
        "'scalar' .*row 3: 3 and 9",
    ),
    "union rows": (lambda d: d.union(columns(3)), BatchMismatchError, "4 rows with 3"),
    "union meta": (
        lambda d: d.union(DataProto(meta_info={"new": 1, "kept": 2})),
        BatchMismatchError,
        r"meta_info\['kept'\]",
    ),
    "pad": (lambda d: pad_dataproto_to_divisor(d, 0), BatchMismatchError, "size_divisor=0"),
    "unpad": (lambda d: unpad_dataproto(d, 5), BatchMismatchError, "5 padding rows off 4"),
    "fold": (lambda d: fold_batch_dim(dense(d), 3), BatchMismatchError, "4 rows cannot be folded into 3"),
    "fold jagged": (lambda d: fold_batch_dim(d, 2), BatchMismatchError, "'jagged' is no dense tensor"),
    "fold twice": (lambda d: fold_batch_dim(fold_batch_dim(dense(d), 2), 2), BatchMismatchError, r"\(2, 2\) already"),
    "unfold": (lambda d: unfold_batch_dim(dense(d)), BatchMismatchError, r"\['name', 'pair', 'scalar', 'small'\]"),
    "collate": (
        lambda d: collate_fn([d[0], d.select(["scalar"])[1]]),
        BatchMismatchError,
        r"row 1.*\['jagged', 'matrix'\]",
    ),
    "collate nothing": (lambda d: collate_fn([]), BatchMismatchError, "empty"),
    "collate meta": (
        lambda d: collate_fn([d[0], envelope(4, kept=2)[1]]),
        BatchMismatchError,
        "in row 0 and .* in row 1",
    ),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_operation_says_why_and_leaves_its_operand_as_it_was(name):
    run, error, message = FAILURES[name]
    data = subject()
    before = state(data)
    with pytest.raises(error, match=message):
        run(data)
    assert str(state(data)) == str(before)


def test_everything_of_the_list_is_importable_from_the_package():
    names = """
        DataProto DataProtoItem DataProtoConfig union_tensor_dict union_numpy_dict fold_batch_dim unfold_batch_dim
        collate_fn pad_dataproto_to_divisor unpad_dataproto serialize_single_tensor deserialize_single_tensor
        serialize_tensordict deserialize_tensordict
    """
    helpers = """
        assign_non_tensor assign_non_tensor_data assign_non_tensor_stack get get_keys pop pop_keys get_non_tensor_data
        unwrap_non_tensor_data get_tensordict concat_tensordict chunk_tensordict index_select_tensor_dict
        union_tensor_dict make_iterator assert_tensordict_eq pad_to_divisor unpad contiguous
        nested_tensor_from_tensor_list concat_nested_tensors list_of_dict_to_tensordict
    """
    assert all(callable(getattr(protocol, name)) for name in names.split())
    assert all(callable(getattr(protocol.tensordict_utils, name)) for name in helpers.split())


@pytest.mark.parametrize("value", ["2", 1.0, None, True, torch.tensor([1, 2]), -1])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("chunks", lambda d, n: d.chunk(n)),
        ("split_size", lambda d, n: d.split(n)),
        ("repeat_times", lambda d, n: d.repeat(n)),
        ("padding_size", lambda d, n: d.padding(n)),
        ("mini_batch_size", lambda d, n: d.make_iterator(n, 1)),
        ("epochs", lambda d, n: d.make_iterator(1, n)),
        ("n_split", lambda d, n: d.unfold_column_chunks(n)),
        ("size_divisor", pad_dataproto_to_divisor),
        ("pad_size", unpad_dataproto),
        ("new_batch_size", fold_batch_dim),
        ("batch_dims", unfold_batch_dim),
        ("chunks", lambda d, n: protocol.tensordict_utils.chunk_tensordict(d.batch, n)),
        ("size_divisor", lambda d, n: protocol.tensordict_utils.pad_to_divisor(d.batch, n)),
        ("pad_size", lambda d, n: protocol.tensordict_utils.unpad(d.batch, n)),
    ],
)
def test_a_number_that_is_none_is_refused_by_the_name_of_the_argument(name, call, value):
    with pytest.raises(BatchMismatchError, match=rf"{name}=.*: expected a whole number from [01] up"):
        call(subject(), value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d["scalar"], "found 'scalar'; fields stand in data.batch"),
        (lambda d: d[None], "found None"),
        (lambda d: d.union({"x": 1}), "found dict"),
        (lambda d: DataProto.concat(d), "part 0 is a DataProtoItem, no envelope; .* collate_fn"),
        (lambda d: DataProto({"x": torch.zeros(2)}), "batch must be a TensorDict or None, found dict; from_dict"),
        (lambda d: DataProto.from_tensordict({"x": torch.zeros(2)}), "expected a TensorDict, found dict"),
        (lambda d: pickle.dumps(DataProto.from_dict({"s": torch.eye(2).to_sparse()})), "'s' is torch.sparse_coo"),
        (lambda d: pickle.dumps(DataProto.from_dict({"m": torch.ones(2, device="meta")})), "'m' is .* on meta"),
    ],
)
def test_what_is_no_envelope_index_or_tensor_that_travels_is_refused_by_what_it_is(call, message):
    with pytest.raises(BatchMismatchError, match=message):
        call(subject())


def test_concat_takes_any_iterable():
    data = subject()
    assert rows_of(DataProto.concat(part for part in data.split(1))) == rows_of(data)
