"""Union and concat: what happens when envelopes meet."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from envelopes import dtypes_of, envelope, rows_of

from protocol import BatchMismatchError, DataProto, union_tensor_dict
from protocol import tensordict_utils as tu

NAN = float("nan")


def test_union_adds_columns_and_meta_info_in_place():
    data = DataProto.from_dict({"a": torch.arange(2)}, {"u": ["x", "y"]}, {"m": 1})
    other = DataProto.from_dict({"b": torch.arange(2)}, {"v": [1, 2]}, {"n": [2]})
    assert data.union(other) is data
    assert data.field_names() == {"a", "u", "b", "v"}
    assert data.meta_info == {"m": 1, "n": [2]}
    assert other.field_names() == {"b", "v"}


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[1.0, NAN], [NAN, 2.0]]),
        torch.tensor([[1.0, NAN]] * 2).bfloat16(),
        torch.tensor([[1.0, 2.0]] * 2).to(torch.float8_e4m3fn),
        tu.nested_tensor_from_tensor_list([torch.tensor([NAN]), torch.zeros(0)]),
        np.array([NAN, 1.0]),
        [{"a": np.array([1.0, NAN]), "t": torch.tensor([NAN])}, [1, (2, {"x": NAN})]],
        [None, "text"],
    ],
)
def test_union_of_a_column_with_an_equal_copy_of_itself_keeps_it(value):
    data = DataProto.from_single_dict({"c": value, "d": torch.arange(2)})
    before = dtypes_of(data)
    data.union(data.select(deepcopy=True))
    assert dtypes_of(data) == before


def test_union_works_where_one_side_has_no_tensors_or_nothing_at_all():
    columns = DataProto.from_dict(non_tensors={"u": ["a", "b"]})
    tensors = DataProto.from_dict({"x": torch.arange(2)})
    expected = [{"x": 0, "u": "a"}, {"x": 1, "u": "b"}]
    assert rows_of(columns.select().union(tensors)) == expected
    assert rows_of(tensors.select().union(columns)) == expected
    assert rows_of(DataProto(meta_info={"m": 1}).union(tensors)) == rows_of(tensors)
    assert tensors.select().union(DataProto(meta_info={"m": 1})).meta_info == {"m": 1}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"t": torch.tensor([[0, 1], [2, 9], [9, 9]])}, r"'t' .* int64 \(3, 2\).*row 1: \[2, 3\] and \[2, 9\]"),
        ({"t": torch.zeros(3, 4).long()}, r"'t'.*int64 \(3, 2\).*int64 \(3, 4\)"),
        ({"t": torch.zeros(3, 2)}, r"'t'.*int64 \(3, 2\).*float32 \(3, 2\)"),
        ({"j": tu.nested_tensor_from_tensor_list([torch.zeros(1), torch.zeros(2), torch.ones(1)])}, "'j'.*row 2"),
        ({"u": [{"a": [1]}, {"a": [3]}, {}]}, r"'u' .*row 1: \{'a': \[2\]\} and \{'a': \[3\]\}"),
        ({"u": torch.arange(3)}, r"\['u'\] are tensors on one side"),
        ({"t": [1, 2, 3]}, r"\['t'\] are tensors on one side"),
        ({"new": torch.arange(4)}, "3 rows with 4"),
    ],
)
def test_a_failed_union_names_key_and_row_and_leaves_both_sides_as_they_were(other, message):
    data = DataProto.from_single_dict(
        {
            "t": torch.arange(6).view(3, 2),
            "j": tu.nested_tensor_from_tensor_list([torch.zeros(1), torch.zeros(2), torch.zeros(1)]),
            "u": [{"a": [1]}, {"a": [2]}, {}],
        },
        {"m": 1},
    )
    rows = len(next(iter(other.values()))) if "new" in other else 3
    guest = DataProto.from_single_dict({**other, "extra": torch.arange(rows), "more": list(range(rows))}, {"n": 2})
    before = rows_of(data)
    with pytest.raises(BatchMismatchError, match=message):
        data.union(guest)
    assert rows_of(data) == before
    assert data.meta_info == {"m": 1}
    assert guest.meta_info == {"n": 2}


def test_union_refuses_differing_meta_info_and_names_both_values():
    data = envelope(2, t=0.5, array=np.array([1, NAN]))
    data.union(DataProto(meta_info={"array": np.array([1, NAN])}))
    with pytest.raises(BatchMismatchError, match=r"meta_info\['t'\] is 0.5 on one side and 0.7"):
        data.union(DataProto(meta_info={"t": 0.7, "fresh": 1}))
    assert "fresh" not in data.meta_info


def test_union_does_not_reach_another_envelope_over_the_same_batch():
    first = envelope(2)
    second = DataProto(first.batch)
    second.union(DataProto.from_dict({"new": torch.arange(2)}))
    assert "new" not in first.field_names()


def test_union_tensor_dict_changes_its_first_operand_all_or_nothing():
    left = DataProto.from_single_dict({"a": torch.arange(2), "s": np.array([1, 2], dtype=np.int8)}).to_tensordict()
    good = DataProto.from_single_dict({"b": torch.arange(2), "t": np.array([1, 2], dtype=np.int8)}).to_tensordict()
    assert union_tensor_dict(left, good) is left
    assert DataProto.from_tensordict(left).non_tensor_batch["t"].dtype == np.int8
    assert DataProto.from_tensordict(left).non_tensor_batch["s"].dtype == np.int8
    bad = DataProto.from_dict({"c": torch.arange(2), "a": torch.zeros(2).long()}).to_tensordict()
    with pytest.raises(BatchMismatchError, match=r"'a'.*row 1: 1 and 0"):
        union_tensor_dict(left, bad)
    assert "c" not in left.keys()  # noqa: SIM118
    with pytest.raises(BatchMismatchError, match="batch sizes"):
        union_tensor_dict(left, DataProto.from_dict({"z": torch.arange(3)}).to_tensordict())


# ---- concat


def test_concat_puts_rows_under_one_another_and_keeps_dtypes():
    data = envelope(3)
    whole = DataProto.concat([data, data[:1], data[:0]])
    assert rows_of(whole) == rows_of(data) + rows_of(data)[:1]
    assert dtypes_of(whole) == dtypes_of(data)


def test_columns_of_different_dtypes_become_objects_and_no_value_changes():
    parts = [DataProto.from_dict(non_tensors={"c": np.array(values)}) for values in ([1, 2], ["a"], [0.5], [True])]
    column = DataProto.concat(parts).non_tensor_batch["c"]
    assert column.tolist() == [1, 2, "a", 0.5, True]
    assert [type(value) for value in column] == [int, int, str, float, bool]
    strings = [DataProto.from_dict(non_tensors={"c": np.array(values)}) for values in (["a"], ["long"])]
    assert DataProto.concat(strings).non_tensor_batch["c"].dtype == "<U4"


def test_metrics_and_timing_are_collected_from_every_part_in_order():
    parts = [envelope(1, metrics={"loss": 1.0, "first": 5}, timing={"gen": 0.10}), envelope(1, metrics={"loss": 2.0})]
    parts.append(envelope(1, metrics=[{"loss": 3.0}, {"loss": 4.0}], timing={"gen": 0.11}))
    meta = DataProto.concat(parts).meta_info
    assert meta["metrics"] == {"loss": [1.0, 2.0, 3.0, 4.0], "first": [5]}
    assert meta["timing"] == {"gen": [0.10, 0.11]}
    by_pairs = DataProto.concat([DataProto.concat(parts[:2]), parts[2]])
    assert by_pairs.meta_info == meta


def test_other_meta_info_must_agree_by_value_and_is_kept_from_whichever_part_has_it():
    first, second = envelope(1, array=np.array([1.0, NAN]), a=1), envelope(1, array=np.array([1.0, NAN]), b=2)
    meta = DataProto.concat([first, second]).meta_info
    assert (meta["a"], meta["b"]) == (1, 2)
    with pytest.raises(BatchMismatchError, match=r"meta_info\['a'\] is 1 in earlier parts and 2 in part 1"):
        DataProto.concat([first, envelope(1, a=2)])
    with pytest.raises(BatchMismatchError, match=r"meta_info\['metrics'\] must be a dict"):
        DataProto.concat([envelope(1, metrics=0.5)])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda: [], "empty"),
        (
            lambda: [envelope(1), envelope(1).select(["scalar"])],
            r"part 1 and part 0 differ in fields \['jagged', 'matrix'",
        ),
        (lambda: [envelope(1), envelope(1).select(None, ["name"])], r"differ in fields \['pair', 'small'\]"),
        (lambda: [DataProto.from_dict({"a": torch.zeros(1, w)}) for w in (2, 3)], r"'a'.*\(1, 2\).*\(1, 3\) in part 1"),
        (lambda: [DataProto.from_dict({"a": torch.zeros(1).to(d)}) for d in (torch.int8, torch.int64)], "int8.*int64"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(parts, message):
    with pytest.raises(BatchMismatchError, match=message):
        DataProto.concat(parts())
