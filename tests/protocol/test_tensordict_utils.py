"""Helpers on a TensorDict of rows: dense, jagged and non-tensor entries."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from protocol import BatchMismatchError, FieldMissingError, jagged
from protocol import tensordict_utils as tu


def rows_td() -> TensorDict:
    """Four rows; row i has i % 3 entries of value i in the two jagged columns, which share their offsets."""
    lengths = torch.tensor([0, 1, 2, 0])
    values = torch.repeat_interleave(torch.arange(4), lengths)
    offsets = jagged.offsets_of(lengths)
    td = TensorDict(
        {
            "dense": torch.arange(8).view(4, 2),
            "long": jagged.from_parts(values, offsets),
            "float": jagged.from_parts(values.float(), offsets),
            "ragged_last": jagged.from_parts(values.expand(3, -1), offsets, dim=2),
            "inner": TensorDict({"x": torch.arange(4)}, batch_size=[4]),
        },
        batch_size=[4],
    )
    tu.assign_non_tensor(td, temperature=0.5, sizes=[1.0, 2.0])
    return tu.assign_non_tensor_stack(td, "text", [["a"], ["b", "c"], [], None])


def plain(td: TensorDict) -> list[dict]:
    columns = {key: tu.get(td, key) for key in ("dense", "long", "float", "ragged_last", "text")}
    columns["inner"] = td["inner", "x"]
    return [
        {
            key: column[row].tolist() if isinstance(column, torch.Tensor) else column[row]
            for key, column in columns.items()
        }
        for row in range(len(td))
    ]


def test_a_list_assigned_for_all_rows_is_never_taken_for_one_value_per_row():
    td = tu.assign_non_tensor(TensorDict({}, batch_size=[2]), sizes=[1.0, 2.0])
    assert isinstance(td.get("sizes"), NonTensorData)
    assert tu.get(tu.index_select_tensor_dict(td, [1]), "sizes") == [1.0, 2.0]


def test_get_and_pop_take_the_wrapper_off():
    td = rows_td()
    assert tu.get(td, "temperature") == 0.5
    assert tu.get(td, "text") == [["a"], ["b", "c"], [], None]
    assert tu.get(td, "lost", 7) == 7
    assert tu.pop(td, "text")[1] == ["b", "c"]
    assert "text" not in td.keys()  # noqa: SIM118
    assert tu.pop(td, "text", None) is None
    with pytest.raises(FieldMissingError, match=r"'text'; present: \['dense'"):
        tu.pop(td, "text")


def test_a_stack_made_by_tensordict_itself_of_rows_that_are_lists_is_read_as_rows():
    td = TensorDict({"t": NonTensorStack.from_list([[1, 2], [3, 4]])}, batch_size=[2])
    assert tu.get(td, "t") == [[1, 2], [3, 4]]


def test_assigning_rows_of_the_wrong_number_is_refused():
    with pytest.raises(BatchMismatchError, match="'text' has 1 entries for 4 rows"):
        tu.assign_non_tensor_stack(rows_td(), "text", ["a"])


@pytest.mark.parametrize(
    "index", [[2, 0, 2], [-1], [], slice(1, 3), slice(2, 2), torch.tensor([True, False, True, False])]
)
def test_index_select_gives_these_rows_and_columns_that_can_still_be_added(index):
    td = rows_td()
    expected = np.arange(4)[index if not isinstance(index, list) else np.array(index, dtype=int)]
    result = tu.index_select_tensor_dict(td, index)
    assert plain(result) == [plain(td)[row] for row in expected]
    assert result["long"].offsets() is result["float"].offsets()
    total = result["long"] + result["float"]
    assert total.values().tolist() == [2 * value for value in result["long"].values().tolist()]
    assert tu.get(result, "temperature") == 0.5
    assert result["long"].dtype == torch.int64


def test_a_jagged_tensor_with_holes_is_selected_by_its_rows():
    holes = torch.nested.narrow(
        torch.arange(12).view(2, 6), 1, torch.tensor([1, 0]), torch.tensor([3, 2]), layout=torch.jagged
    )
    result = tu.index_select_tensor_dict(TensorDict({"h": holes, "g": holes + 1}, batch_size=[2]), [1, 0, 1])
    assert [row.tolist() for row in result["h"].unbind()] == [[6, 7], [1, 2, 3], [6, 7]]
    assert [row.tolist() for row in result["g"].unbind()] == [[7, 8], [2, 3, 4], [7, 8]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_other_layout_are_refused_by_name():
    strided = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)])
    with pytest.raises(BatchMismatchError, match=r"layout torch.strided; expected torch.jagged"):
        jagged.parts_of(strided, "s")


def test_chunks_share_memory_and_concat_puts_them_back():
    td = rows_td()
    chunks = tu.chunk_tensordict(td, 2)
    assert [plain(chunk) for chunk in chunks] == [plain(td)[:2], plain(td)[2:]]
    chunks[0]["dense"][0] = -1
    chunks[0]["long"].values()[0] = -1
    assert td["dense"][0].tolist() == [-1, -1]
    assert td["long"].values()[0] == -1
    whole = tu.concat_tensordict(chunks)
    assert plain(whole) == plain(td)
    assert (whole["long"] + whole["float"]).shape[0] == 4
    assert tu.get(whole, "sizes") == [1.0, 2.0]
    assert [len(chunk) for chunk in tu.chunk_tensordict(tu.index_select_tensor_dict(td, []), 3)] == [0, 0, 0]


def test_chunks_that_do_not_divide_are_refused():
    with pytest.raises(BatchMismatchError, match="4 rows cannot be split into 3"):
        tu.chunk_tensordict(rows_td(), 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda td: td.del_("dense"), r"part 1 and part 0 differ in fields \['dense'\]"),
        (lambda td: td.set("dense", td["dense"].int()), r"'dense' is int64 \(4, 2\) in part 0 and int32 \(4, 2\)"),
        (
            lambda td: td.set("dense", td["long"]),
            r"'dense' is int64 \(4, 2\) in part 0 and int64 \(4, jagged\) in part 1",
        ),
        (lambda td: tu.assign_non_tensor(td, temperature=0.7), "'temperature' is 0.5 in part 0 and 0.7 in part 1"),
        (lambda td: tu.assign_non_tensor(td, text="x"), "'text' is NonTensorStack in part 0 and NonTensorData"),
    ],
)
def test_concat_of_parts_that_differ_names_the_field(change, message):
    td = rows_td()
    change(td)
    with pytest.raises(BatchMismatchError, match=message):
        tu.concat_tensordict([rows_td(), td])


def test_concat_of_nothing_is_refused():
    with pytest.raises(BatchMismatchError, match="empty"):
        tu.concat_tensordict([])


def test_padding_to_a_divisor_marks_rows_and_takes_their_weight():
    td = rows_td()
    mask = torch.ones(3, dtype=torch.long)
    td["response_mask"] = jagged.from_parts(mask, td["long"].offsets())
    padded, added = tu.pad_to_divisor(td, 3)
    assert added == 2
    assert plain(padded) == plain(td) + plain(td)[:2]
    assert padded["is_padding"].tolist() == [False] * 4 + [True] * 2
    assert [row.tolist() for row in padded["response_mask"].unbind()] == [[], [1], [1, 1], [], [], [0]]
    assert mask.tolist() == [1, 1, 1]
    back = tu.unpad(padded, added)
    assert set(back.keys()) == set(td.keys())
    assert plain(back) == plain(td)
    assert tu.pad_to_divisor(td, 2) == (td, 0)
    assert tu.unpad(td, 0) is td
    with pytest.raises(BatchMismatchError, match="size_divisor=0"):
        tu.pad_to_divisor(td, 0)
    with pytest.raises(BatchMismatchError, match="5 padding rows off 4"):
        tu.unpad(td, 5)


def test_a_jagged_tensor_from_rows():
    nested = tu.nested_tensor_from_tensor_list([torch.ones(2, 3), torch.zeros(0, 3)])
    assert [tuple(row.shape) for row in nested.unbind()] == [(2, 3), (0, 3)]
    for rows, message in [
        ([], "at least one row"),
        ([torch.ones(2), torch.ones(2).long()], r"row 1 is torch.int64 \(2,\), row 0 is torch.float32"),
        ([torch.ones(2, 1), torch.ones(2, 2)], r"row 1 is torch.float32 \(2, 2\)"),
    ]:
        with pytest.raises(BatchMismatchError, match=message):
            tu.nested_tensor_from_tensor_list(rows)


# ---- entries in and out


def test_assigning_wrapped_values_keeps_what_they_are():
    td = TensorDict({}, batch_size=[2])
    tu.assign_non_tensor(td, rows=NonTensorStack(NonTensorData("a"), NonTensorData("b")), one=NonTensorData([1, 2]))
    tu.assign_non_tensor_data(td, "data", ["x", "y"])
    assert tu.get(tu.index_select_tensor_dict(td, [1]), "rows") == ["b"]
    assert tu.get(tu.index_select_tensor_dict(td, [1]), "one") == [1, 2]
    assert tu.get(tu.index_select_tensor_dict(td, [1]), "data") == ["x", "y"]


def test_unwrapping_gives_the_value_the_rows_or_the_thing_itself():
    td = rows_td()
    assert tu.unwrap_non_tensor_data(td.get("temperature")) == 0.5
    assert tu.unwrap_non_tensor_data(td.get("text"))[1] == ["b", "c"]
    assert tu.unwrap_non_tensor_data(td.get("dense")) is td.get("dense")
    assert tu.get_non_tensor_data(td, "temperature", None) == 0.5
    assert tu.get_non_tensor_data(td, "lost", "default") == "default"
    with pytest.raises(BatchMismatchError, match=r"'dense' is a tensor of shape \(4, 2\)"):
        tu.get_non_tensor_data(td, "dense", None)


def test_get_keys_takes_these_entries_and_pop_keys_moves_them_all_or_none():
    td = rows_td()
    assert set(tu.get_keys(td, ["text", "long"]).keys()) == {"text", "long"}
    popped = tu.pop_keys(td, ["text", "temperature"])
    assert tu.get(popped, "text")[1] == ["b", "c"]
    assert tu.get(popped, "temperature") == 0.5
    left = set(td.keys())
    assert left == {"dense", "long", "float", "ragged_last", "inner", "sizes"}
    for take in (tu.get_keys, tu.pop_keys):
        with pytest.raises(FieldMissingError, match=r"'text', 'lost'; present: \['dense'"):
            take(td, ["dense", "text", "lost"])
    assert set(td.keys()) == left


def test_get_tensordict_takes_tensors_rows_and_values():
    td = tu.get_tensordict({"x": torch.arange(2), "rows": [[1, 2], [3, 4]]}, {"sizes": [1, 2], "t": 0.5})
    assert td.batch_size == (2,)
    assert isinstance(td.get("rows"), NonTensorStack)
    assert tu.get(td, "rows") == [[1, 2], [3, 4]]
    assert (tu.get(td, "sizes"), tu.get(td, "t")) == ([1, 2], 0.5)
    assert tu.get_tensordict({}, {"t": 1}).batch_size == ()
    assert tu.get_tensordict({"rows": [], "x": torch.zeros(0, 3)}).batch_size == (0,)
    with pytest.raises(BatchMismatchError, match="'rows' has 3 rows, 'x' has 2"):
        tu.get_tensordict({"x": torch.arange(2), "rows": [1, 2, 3]})
    with pytest.raises(BatchMismatchError, match=r"\['x'\] are given both"):
        tu.get_tensordict({"x": torch.arange(2)}, {"x": 1})
    with pytest.raises(BatchMismatchError, match="'x' is a tensor without dimensions"):
        tu.get_tensordict({"x": torch.tensor(1)})


def test_rows_as_dicts_become_stacked_jagged_or_object_columns():
    rows = [{"a": torch.ones(2), "b": torch.ones(row), "c": [row]} for row in range(3)]
    td = tu.list_of_dict_to_tensordict(rows)
    assert td["a"].shape == (3, 2)
    assert [len(row) for row in td["b"].unbind()] == [0, 1, 2]
    assert tu.get(td, "c") == [[0], [1], [2]]
    for bad, message in [
        ([], "at least one row"),
        ([{"a": 1}, {"b": 1}], r"row 1 and row 0 differ in fields \['a', 'b'\]"),
        ([{"a": torch.ones(1)}, {"a": torch.ones(2, 2)}], "field 'a': row 1"),
    ]:
        with pytest.raises(BatchMismatchError, match=message):
            tu.list_of_dict_to_tensordict(bad)


# ---- rows, whole TensorDicts


def test_concatenating_nested_tensors_puts_their_rows_under_one_another():
    parts = [
        tu.nested_tensor_from_tensor_list([torch.ones(1), torch.ones(2)]),
        tu.nested_tensor_from_tensor_list([torch.ones(3)]),
    ]
    assert [len(row) for row in tu.concat_nested_tensors(parts).unbind()] == [1, 2, 3]
    for bad, message in [
        ([], "empty"),
        ([parts[0], torch.ones(2)], "tensor 1 is not nested"),
        ([parts[0], parts[1].long()], "float32 .* in part 0 and int64"),
    ]:
        with pytest.raises(BatchMismatchError, match=message):
            tu.concat_nested_tensors(bad)


def test_contiguous_gives_a_new_tensordict_with_the_same_kinds_of_entries():
    td = rows_td()
    td["turned"] = torch.arange(8).view(2, 4).T
    result = tu.contiguous(td)
    assert result is not td
    assert result["turned"].is_contiguous()
    assert not td["turned"].is_contiguous()
    tu.assert_tensordict_eq(result, td)


def test_equal_tensordicts_pass_and_others_are_an_assertion_error_that_says_where():
    td = rows_td()
    td["nan"] = torch.full((4,), float("nan"))
    tu.assert_tensordict_eq(td, td.copy())
    for change, message in [
        (lambda other: other.set("dense", td["dense"].int()), "'dense' .* int64 .* int32"),
        (lambda other: other["inner"].set("x", torch.tensor([0, 1, 9, 3])), "'inner.x' .* row 2: 2 and 9"),
        (lambda other: other.del_("text"), r"only one side has the fields \['text'\]"),
        (lambda other: tu.assign_non_tensor(other, temperature=0.7), "'temperature' .*: 0.5 and 0.7"),
        (lambda other: tu.assign_non_tensor_stack(other, "text", [["a"], ["b"], [], None]), "'text' .* row 1"),
    ]:
        other = rows_td()
        other["nan"] = torch.full((4,), float("nan"))
        change(other)
        with pytest.raises(AssertionError, match=message):
            tu.assert_tensordict_eq(td, other)
    with pytest.raises(BatchMismatchError, match=r"batch sizes are \(4,\) and \(3,\)"):
        tu.assert_tensordict_eq(td, tu.index_select_tensor_dict(td, [0, 1, 2]))


def test_mini_batches_of_a_tensordict_hold_every_row_once_an_epoch():
    td = rows_td()
    in_order = [part["inner", "x"].tolist() for part in tu.make_iterator(td, 2, 2)]
    assert in_order == [[0, 1], [2, 3]] * 2
    shuffled = [part["inner", "x"].tolist() for part in tu.make_iterator(td, 2, 8, 3, {"shuffle": True})]
    assert all(sorted(shuffled[at] + shuffled[at + 1]) == [0, 1, 2, 3] for at in range(0, 16, 2))
    assert len({str(shuffled[at : at + 2]) for at in range(0, 16, 2)}) > 1
    assert shuffled == [part["inner", "x"].tolist() for part in tu.make_iterator(td, 2, 8, 3, {"shuffle": True})]


def test_no_rows_with_an_object_column_go_through_every_operation():
    td = tu.assign_non_tensor_stack(TensorDict({"x": torch.zeros(0, 2)}, batch_size=[0]), "s", [])
    for result in (
        tu.index_select_tensor_dict(td, []),
        tu.index_select_tensor_dict(rows_td(), []),
        tu.concat_tensordict([td, td]),
        tu.chunk_tensordict(td, 2)[1],
        tu.contiguous(td),
        td.copy(),
        tu.union_tensor_dict(TensorDict({}, batch_size=[0]), td),
    ):
        assert len(result) == 0
        assert tu.get(result, "text" if "text" in result.keys() else "s") == []  # noqa: SIM118
    whole = tu.concat_tensordict([td, tu.get_tensordict({"x": torch.ones(1, 2), "s": ["a"]})])
    assert tu.get(whole, "s") == ["a"]
