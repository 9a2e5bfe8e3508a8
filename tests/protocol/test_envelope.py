"""Construction, indexing and fields of the envelope."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from envelopes import dtypes_of, envelope, rows_of
from tensordict import NonTensorData, NonTensorStack, TensorDict

from protocol import BatchMismatchError, DataProto, DataProtoItem, FieldMissingError
from protocol import tensordict_utils as tu


def same(left: DataProto, right: DataProto) -> bool:
    return (rows_of(left), dtypes_of(left), left.meta_info) == (rows_of(right), dtypes_of(right), right.meta_info)


def test_importing_the_errors_loads_no_torch():
    code = "import sys, protocol, protocol.errors, protocol.lineage; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_of_the_package_is_an_attribute_error_that_lists_the_known_ones():
    import protocol

    with pytest.raises(AttributeError, match=r"'DataPrto'.*DataProto"):
        protocol.DataPrto  # noqa: B018
    assert all(getattr(protocol, name) is not None for name in protocol.__all__)


# ---- construction


def test_from_single_dict_sends_tensors_to_batch_and_the_rest_to_columns():
    data = DataProto.from_single_dict({"x": torch.arange(2), "u": np.array(["a", "b"]), "l": [[1], [2]]}, {"t": 0.7})
    assert data.tensor_keys() == {"x"}
    assert data.non_tensor_batch.keys() == {"u", "l"}
    assert (len(data), data.meta_info) == (2, {"t": 0.7})


def test_rows_of_equal_length_lists_stay_a_one_dimensional_column():
    data = DataProto.from_dict(non_tensors={"pair": [[1, 2], [3, 4]]})
    assert data.non_tensor_batch["pair"].shape == (2,)
    assert data.non_tensor_batch["pair"][1] == [3, 4]
    for result in (data.repeat(2), data[[1, 0]], DataProto.concat([data, data]), data.select(deepcopy=True)):
        assert result.non_tensor_batch["pair"].ndim == 1
        assert isinstance(result.non_tensor_batch["pair"][0], list)


def test_a_two_dimensional_array_becomes_a_column_of_its_rows():
    column = DataProto.from_dict(non_tensors={"a": np.arange(4).reshape(2, 2)}).non_tensor_batch["a"]
    assert column.shape == (2,)
    assert column[1].tolist() == [2, 3]


def test_only_object_columns_give_a_length_without_a_batch():
    data = DataProto.from_dict(non_tensors={"u": ["a", "b", "c"]})
    assert data.batch is None
    assert len(data) == 3
    assert len(data[1:]) == 2
    assert data[0].non_tensor_batch == {"u": "a"}


def test_an_envelope_without_columns_has_no_rows():
    assert len(DataProto(meta_info={"a": 1})) == 0
    assert len(DataProto.from_dict()) == 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3, 4)}),
            r"'b' has shape \(3, 4\); 'a' has",
        ),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"u": ["x"]}), "'u' has 1 rows, batch has 2"),
        (lambda: DataProto.from_dict(non_tensors={"u": [1, 2], "v": [1]}), "'v' has 1 rows, column 'u' has 2"),
        (lambda: DataProto.from_dict({"a": [1, 2]}), "'a' must be a tensor, found list"),
        (lambda: DataProto.from_dict({"a": torch.tensor(1)}), r"'a' has shape \(\)"),
        (lambda: DataProto.from_single_dict({"a": 3}), "'a' must be a list or numpy array.*found int"),
        (lambda: DataProto.from_single_dict({"a": np.array(3)}), "'a'.*zero-dimensional"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"a": [1, 2]}), r"\['a'\] stand both"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2, 2)}, {"u": [1, 2]}, num_batch_dims=2), "num_batch_dims=2"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, num_batch_dims=0), "at least one batch dimension"),
        (lambda: DataProto(TensorDict({}, batch_size=[])), "no batch dimension"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(build, message):
    with pytest.raises(BatchMismatchError, match=message):
        build()


def test_two_batch_dimensions_are_kept():
    data = DataProto.from_dict({"a": torch.zeros(4, 3, 2)}, num_batch_dims=2)
    assert data.batch is not None
    assert data.batch.batch_size == (4, 3)
    assert data[1:3].batch["a"].shape == (2, 3, 2)


def test_an_envelope_owns_the_dicts_it_was_built_from():
    meta, columns = {"list": [1]}, {"u": np.array([1, 2])}
    data = DataProto.from_dict(None, columns, meta)
    data.meta_info["list"].append(2)
    data.non_tensor_batch["v"] = np.array([3, 4])
    assert meta == {"list": [1]}
    assert columns.keys() == {"u"}


# ---- TensorDict round trip


def test_to_tensordict_has_stacks_of_rows_and_single_values():
    td = envelope(3, temperature=1.0, sizes=[1, 2]).to_tensordict()
    assert isinstance(td.get("pair"), NonTensorStack)
    assert isinstance(td.get("temperature"), NonTensorData)
    assert tu.get(td, "pair") == [[0, 0], [1, 1], [2, 2]]
    assert tu.get(td, "sizes") == [1, 2]
    assert td.batch_size == (3,)


@pytest.mark.parametrize(
    "column",
    [
        np.array([1, 2], dtype=np.int32),
        np.array([np.int32(1), np.int32(2)], dtype=object),
        np.array(["a", "b"], dtype="<U7"),
        np.array([1.5, float("inf")], dtype=np.float16),
        np.array([True, False]),
        np.array(["2020-01-01", "2021-01-01"], dtype="datetime64[ns]"),
        np.array([None, {"a": 1}], dtype=object),
        np.array([(1, 2.0), (3, 4.0)], dtype=[("x", np.int8), ("y", np.float32)]),
    ],
    ids=lambda column: str(column.dtype),
)
def test_the_tensordict_round_trip_keeps_values_and_dtype_of_a_column(column):
    back = DataProto.from_tensordict(DataProto.from_dict(non_tensors={"c": column}).to_tensordict())
    assert back.batch is None
    assert back.meta_info == {}
    assert back.non_tensor_batch["c"].dtype == column.dtype
    assert back.non_tensor_batch["c"].tolist() == column.tolist()


@pytest.mark.parametrize("rows", [1, 3])
def test_the_tensordict_round_trip_keeps_the_envelope(rows):
    data = envelope(rows, temperature=0.5, nested={"a": [1, None]})
    assert same(DataProto.from_tensordict(data.to_tensordict()), data)
    assert same(DataProto.from_tensordict(data[:0].to_tensordict()), data[:0])


def test_meta_info_given_to_from_tensordict_goes_over_what_is_in_it():
    td = envelope(2, a=1, b=2).to_tensordict()
    assert DataProto.from_tensordict(td, {"b": 3}).meta_info == {"a": 1, "b": 3}


@pytest.mark.parametrize(("meta", "message"), [({"name": 1}, "'name' is also the name"), ({3: 1}, "3 is not a string")])
def test_meta_info_that_cannot_stand_in_a_tensordict_is_refused(meta, message):
    data = envelope(2)
    data.meta_info.update(meta)
    with pytest.raises(BatchMismatchError, match=message):
        data.to_tensordict()


def test_a_column_written_past_the_constructor_is_checked_before_it_leaves():
    data = envelope(2)
    data.non_tensor_batch["late"] = np.array([1, 2, 3])
    with pytest.raises(BatchMismatchError, match="'late' has 3 rows, batch has 2"):
        data.to_tensordict()


# ---- indexing


def test_an_integer_gives_one_row():
    item = envelope(3, a=[1])[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch is not None
    assert item.batch["matrix"].tolist() == [4.0, 5.0]
    assert item.batch["jagged"].tolist() == [2, 2]
    assert item.non_tensor_batch["pair"] == [2, 2]
    assert item.meta_info == {"a": [1]}
    assert len(list(envelope(3))) == 3  # iteration ends


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, 2), [0, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        (slice(3, 1), []),
        ([2, 0, 2], [2, 0, 2]),
        ([-1], [3]),
        ([], []),
        (np.array([3, 1], dtype=np.int32), [3, 1]),
        (np.array([], dtype=np.float64), []),
        (torch.tensor([1, 1]), [1, 1]),
        (torch.tensor([True, False, False, True]), [0, 3]),
        ([False, True, False, False], [1]),
        (np.array([True] * 4), [0, 1, 2, 3]),
    ],
)
def test_every_kind_of_index_gives_these_rows_in_all_columns(index, expected):
    result = envelope(4)[index]
    assert rows_of(result) == [rows_of(envelope(4))[row] for row in expected]
    assert dtypes_of(result) == dtypes_of(envelope(4))


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (4, IndexError, "row 4 is out of range for 4"),
        (-5, IndexError, "row -5"),
        ([0, 4], IndexError, "row 4 is out of range"),
        ([True, False], BatchMismatchError, "mask of 2 entries.*4 rows"),
        ([0.5], BatchMismatchError, "float"),
        (torch.zeros(2, 2, dtype=torch.long), BatchMismatchError, r"\(2, 2\)"),
        (True, BatchMismatchError, "one-dimensional"),
    ],
)
def test_an_index_that_selects_nothing_sensible_is_refused(index, error, message):
    with pytest.raises(error, match=message):
        envelope(4)[index]


def test_a_slice_shares_memory_and_an_index_copies():
    data = envelope(4)
    assert data.batch is not None
    data[1:3].batch["matrix"][0] = -1.0
    data[[2, 3]].batch["matrix"][:] = -2.0
    assert data.batch["matrix"].tolist() == [[0, 1], [-1, -1], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    "derive",
    [
        lambda data: data[:2],
        lambda data: data[[0]],
        lambda data: data[0],
        lambda data: data.repeat(2),
        lambda data: data.chunk(2)[1],
        lambda data: data.split(3)[0],
        lambda data: data.select(),
        lambda data: DataProto.concat([data]),
        lambda data: data.pop(["scalar"], meta_info_keys=["kept"]),
        lambda data: DataProto.from_tensordict(data.to_tensordict()),
        lambda data: DataProto().union(data),
    ],
)
def test_results_own_their_meta_info(derive):
    data = envelope(4, kept={"list": [1], "array": np.zeros(1)})
    kept = data.meta_info["kept"]
    result = derive(data)
    result.meta_info["kept"]["list"].append(2)
    result.meta_info["kept"]["array"][0] = 5
    result.meta_info["new"] = 1
    assert kept["list"] == [1]
    assert kept["array"][0] == 0
    assert "new" not in data.meta_info


def test_an_object_that_cannot_be_copied_may_stand_in_meta_info():
    import threading

    lock = threading.Lock()
    assert envelope(2, lock=lock)[:1].meta_info["lock"] is lock


# ---- select, pop, rename


def test_select_keeps_only_what_was_asked_for():
    data = envelope(2, a=1, b=2).select(["scalar"], ["name"], ["a"])
    assert data.field_names() == {"scalar", "name"}
    assert data.meta_info == {"a": 1}
    assert len(envelope(2).select([], [])) == 2


def test_select_with_deepcopy_copies_tensors_and_objects_and_without_shares_them():
    data = envelope(2)
    deep, shallow = data.select(deepcopy=True), data.select()
    data.batch["matrix"][0] = -1
    data.non_tensor_batch["pair"][0].append(9)
    assert deep.batch["matrix"][0].tolist() == [0, 1]
    assert deep.non_tensor_batch["pair"][0] == [0, 0]
    assert shallow.batch["matrix"][0].tolist() == [-1, -1]
    assert shallow.non_tensor_batch["pair"][0] == [0, 0, 9]


def test_pop_moves_keys_and_keeps_the_length_on_both_sides():
    data = envelope(3, a=1, b=2)
    popped = data.pop(["scalar", "matrix", "jagged"], ["name"], ["a"])
    assert popped.field_names() == {"scalar", "matrix", "jagged", "name"}
    assert data.field_names() == {"pair", "small"}
    assert (popped.meta_info, data.meta_info) == ({"a": 1}, {"b": 2})
    assert len(popped) == len(data) == 3


@pytest.mark.parametrize("keys", [(["scalar", "lost"],), (["scalar"], ["lost"]), (["scalar"], ["name"], ["lost"])])
@pytest.mark.parametrize("method", ["pop", "select"])
def test_a_missing_key_is_named_and_nothing_is_moved(method, keys):
    data = envelope(2, a=1)
    before = rows_of(data)
    with pytest.raises(FieldMissingError, match=r"'lost'; present: \["):
        getattr(data, method)(*keys)
    assert rows_of(data) == before
    assert data.meta_info == {"a": 1}


def test_rename_changes_names_and_can_swap_them():
    data = envelope(2)
    scalar, matrix = data.batch["scalar"], data.batch["matrix"]
    assert data.rename(["scalar", "matrix", "name"], ["matrix", "scalar", "title"]) is data
    assert data.batch["matrix"] is scalar
    assert data.batch["scalar"] is matrix
    assert data.rename("title", "name").non_tensor_batch["name"][1] == "row1"


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        (["scalar", "lost"], ["a", "b"], FieldMissingError),
        (["scalar"], ["name"], BatchMismatchError),
        (["scalar", "matrix"], ["a", "a"], BatchMismatchError),
        (["scalar", "matrix"], ["a"], BatchMismatchError),
    ],
)
def test_a_rename_that_would_lose_a_field_changes_nothing(old, new, error):
    data = envelope(2)
    before = rows_of(data)
    with pytest.raises(error):
        data.rename(old, new)
    assert rows_of(data) == before


def test_to_moves_tensors_in_place():
    data = envelope(2).select(["scalar"])
    assert data.to("meta") is data
    assert data.batch["scalar"].device.type == "meta"


def test_what_was_written_past_the_constructor_can_be_checked_and_asked_for():
    data = envelope(2)
    assert data.tensor_keys() == {"scalar", "matrix", "jagged"}
    assert data.field_names() == {"scalar", "matrix", "jagged", "name", "pair", "small"}
    data.check_consistency()
    for column, message in [
        (np.zeros(3), "'late' has 3 rows, batch has 2"),
        (np.zeros((2, 2)), "'late' must be a one-dimensional array"),
        ([1, 2], "'late' must be a one-dimensional array"),
    ]:
        data.non_tensor_batch["late"] = column
        with pytest.raises(BatchMismatchError, match=message):
            data.check_consistency()
    del data.non_tensor_batch["late"]
    data.non_tensor_batch["scalar"] = np.zeros(2)
    with pytest.raises(BatchMismatchError, match=r"\['scalar'\] stand both"):
        data.check_consistency()
