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
    with pytest.raises(BatchMismatchError, match="positive divisor, found 0"):
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
