"""A second dimension: folding rows into groups, cutting rows into pieces; and rows taken apart and collated."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from envelopes import dtypes_of, envelope, rows_of

from protocol import BatchMismatchError, DataProto, DataProtoItem, collate_fn, fold_batch_dim, unfold_batch_dim
from protocol import tensordict_utils as tu


def dense() -> DataProto:
    return DataProto.from_single_dict(
        {
            "x": torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]),
            "label": ["a", "b", "c", "d"],
            "n": np.arange(4, dtype="i2"),
        }
    )


def test_folding_gives_tensors_and_columns_the_two_dimensions_of_the_batch():
    folded = fold_batch_dim(dense(), 2)
    assert folded.batch.batch_size == (2, 2)
    assert folded.batch["x"].tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    assert folded.non_tensor_batch["label"].tolist() == [["a", "b"], ["c", "d"]]
    assert (folded.non_tensor_batch["n"].shape, folded.non_tensor_batch["n"].dtype) == ((2, 2), np.int16)
    assert len(folded) == 2
    assert rows_of(unfold_batch_dim(folded)) == rows_of(dense())
    assert dtypes_of(unfold_batch_dim(folded)) == dtypes_of(dense())


@pytest.mark.parametrize(
    "keep",
    [
        lambda d: d[[1, 0]][[1, 0]],
        lambda d: DataProto.concat(d.split(1)),
        lambda d: pickle.loads(pickle.dumps(d)),
        lambda d: d.repeat(2)[::2],
        lambda d: d.select(deepcopy=True),
        lambda d: d.select(["x"], []).union(d.select([], ["label", "n"])),
    ],
)
def test_a_folded_envelope_goes_through_other_operations(keep):
    assert rows_of(unfold_batch_dim(keep(fold_batch_dim(dense(), 2)))) == rows_of(dense())


def test_padding_of_a_folded_envelope_marks_whole_groups():
    folded = fold_batch_dim(dense(), 2)
    folded.padding(1)
    assert folded.batch["is_padding"].tolist() == [[False, False], [False, False], [True, True]]


def test_a_folded_column_cannot_stand_in_a_tensordict():
    with pytest.raises(BatchMismatchError, match=r"'label' is folded \(2, 2\); call unfold_batch_dim"):
        fold_batch_dim(dense(), 2).to_tensordict()


def test_object_columns_alone_and_no_rows_can_be_folded():
    data = DataProto.from_dict(non_tensors={"u": ["a", "b", "c", "d"]})
    folded = fold_batch_dim(data, 2)
    assert folded.non_tensor_batch["u"].tolist() == [["a", "b"], ["c", "d"]]
    assert unfold_batch_dim(folded).batch is None
    assert rows_of(unfold_batch_dim(folded)) == rows_of(data)
    empty = fold_batch_dim(dense()[:0], 2)
    assert empty.batch["x"].shape == (2, 0, 2)
    assert dtypes_of(unfold_batch_dim(empty)) == dtypes_of(dense())


def test_two_dimensions_of_a_tensor_become_the_batch_dimension():
    data = DataProto.from_dict({"x": torch.arange(12).view(2, 3, 2)})
    assert unfold_batch_dim(data).batch["x"].tolist() == torch.arange(12).view(6, 2).tolist()
    assert unfold_batch_dim(data, 3).batch["x"].tolist() == list(range(12))
    with pytest.raises(BatchMismatchError, match="batch_dims=0"):
        unfold_batch_dim(data, 0)


def test_cutting_makes_n_rows_of_each_of_pieces_and_of_copies():
    data = DataProto.from_single_dict(
        {
            "x": torch.arange(8).view(2, 4),
            "y": torch.tensor([1, 2]),
            "pairs": [[1, 2], [3, 4]],
            "u": ["a", "b"],
            "ragged": [[[1], [2, 3]], [[], {}]],
            "arrays": [np.array([1, 2], dtype=np.int8), np.array([3, 4, 5, 6], dtype=np.int8)],
        }
    )
    cut = data.unfold_column_chunks(2, split_keys=["x", "pairs", "ragged", "arrays"])
    assert cut.batch["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cut.batch["y"].tolist() == [1, 1, 2, 2]
    assert cut.non_tensor_batch["pairs"].tolist() == [[1], [2], [3], [4]]
    assert cut.non_tensor_batch["ragged"].tolist() == [[[1]], [[2, 3]], [[]], [{}]]
    assert cut.non_tensor_batch["u"].tolist() == ["a", "a", "b", "b"]
    assert [row.tolist() for row in cut.non_tensor_batch["arrays"]] == [[1], [2], [3, 4], [5, 6]]
    assert cut.non_tensor_batch["arrays"][0].dtype == np.int8
    assert list(cut.batch.keys()) == ["x", "y"]
    assert rows_of(data.unfold_column_chunks(2)) == rows_of(data.repeat(2))


def test_every_row_is_repeated_its_own_number_of_times():
    data = dense()
    for times in ([2, 0, 1, 0], torch.tensor([2, 0, 1, 0]), np.array([2, 0, 1, 0]), (2, 0, 1, 0)):
        assert data.sample_level_repeat(times).non_tensor_batch["label"].tolist() == ["a", "a", "c"]
    assert len(data.sample_level_repeat([0, 0, 0, 0])) == 0
    assert len(data[:0].sample_level_repeat([])) == 0


def test_a_slice_by_name():
    assert dense().slice(1, 3).non_tensor_batch["label"].tolist() == ["b", "c"]
    assert dense().slice(step=-1).non_tensor_batch["label"].tolist() == ["d", "c", "b", "a"]


def test_rows_taken_apart_collate_to_what_they_were():
    data = envelope(4, kept=[1])
    back = collate_fn(list(data))
    assert rows_of(back) == rows_of(data)
    assert dtypes_of(back) == dtypes_of(data)
    assert back.meta_info == {"kept": [1]}
    assert list(back.batch.keys()) == list(data.batch.keys())
    objects = collate_fn([DataProtoItem(None, {"u": [1]}), DataProtoItem(None, {"u": [2]})])
    assert objects.batch is None
    assert objects.non_tensor_batch["u"].tolist() == [[1], [2]]
    assert collate_fn([DataProtoItem(data[0].batch), DataProtoItem(data[1].batch)]).batch["jagged"].is_nested
    mixed = [DataProtoItem(None, {"u": np.int8(1)}), DataProtoItem(None, {"u": np.float32(0.5)})]
    assert [type(row) for row in collate_fn(mixed).non_tensor_batch["u"]] == [np.int8, np.float32]


def test_rows_whose_tensors_cannot_stand_under_one_another_are_refused_by_name():
    rows = [DataProtoItem(tu.get_tensordict({"x": torch.zeros(1, *shape)})[0]) for shape in ((2, 3), (2, 4))]
    with pytest.raises(BatchMismatchError, match=r"field 'x': row 1 is torch.float32 \(2, 4\)"):
        collate_fn(rows)
