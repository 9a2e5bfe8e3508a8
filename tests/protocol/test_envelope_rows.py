"""Repeat, reorder, chunk, split and padding."""

from __future__ import annotations

import pytest
import torch
from envelopes import envelope, rows_of

from protocol import BatchMismatchError, DataProto, pad_dataproto_to_divisor, unpad_dataproto


def scalars(data: DataProto) -> list[int]:
    return data.batch["scalar"].tolist()


def test_repeat_interleaved_keeps_copies_together_and_otherwise_repeats_the_whole():
    data = envelope(2)
    assert scalars(data.repeat(3)) == [0, 0, 0, 1, 1, 1]
    assert scalars(data.repeat(2, interleave=False)) == [0, 1, 0, 1]
    assert rows_of(data.repeat(2)) == [rows_of(data)[row] for row in (0, 0, 1, 1)]
    data.repeat(1).batch["matrix"][0] = 9  # a copy
    assert data.batch["matrix"][0].tolist() == [0, 1]


@pytest.mark.parametrize("times", [0, -1])
def test_repeating_no_times_is_refused(times):
    with pytest.raises(BatchMismatchError, match=f"repeat_times={times}"):
        envelope(2).repeat(times)


def test_reorder_permutes_all_columns_in_place():
    data = envelope(3)
    before = rows_of(data)
    assert data.reorder(torch.tensor([2, 0, 1])) is None
    assert rows_of(data) == [before[2], before[0], before[1]]
    data.reorder(torch.tensor([-1, 0, 1]))
    assert scalars(data) == [1, 2, 0]


@pytest.mark.parametrize("indices", [[0, 1], [0, 1, 1], [0, 1, 2, 2]])
def test_reorder_refuses_what_is_no_permutation_and_changes_nothing(indices):
    data = envelope(3)
    with pytest.raises(BatchMismatchError, match=r"row [12] [02] times"):
        data.reorder(torch.tensor(indices))
    assert scalars(data) == [0, 1, 2]


def test_split_leaves_a_short_last_part():
    assert [scalars(part) for part in envelope(5).split(2)] == [[0, 1], [2, 3], [4]]
    assert envelope(3)[:0].split(2) == []
    with pytest.raises(BatchMismatchError, match="split_size=0"):
        envelope(2).split(0)


def test_chunk_gives_equal_parts_that_share_memory():
    data = envelope(4)
    parts = data.chunk(2)
    assert [scalars(part) for part in parts] == [[0, 1], [2, 3]]
    parts[1].batch["matrix"][0] = -1
    assert data.batch["matrix"][2].tolist() == [-1, -1]
    assert [len(part) for part in data[:0].chunk(2)] == [0, 0]


def test_chunk_that_does_not_divide_says_what_to_do():
    with pytest.raises(BatchMismatchError, match=r"5 rows cannot be cut into 2.*auto_padding"):
        envelope(5).chunk(2)
    with pytest.raises(BatchMismatchError, match="chunks=0"):
        envelope(5).chunk(0)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2, 4, 7])
def test_chunk_with_padding_never_fails_and_unpad_gives_the_rows_back(rows, chunks):
    data = DataProto.from_single_dict(
        {"scalar": torch.arange(rows), "response_mask": torch.ones(rows, 3, dtype=torch.long), "u": list(range(rows))},
        auto_padding=True,
    )
    parts = data.chunk(chunks)
    assert len({len(part) for part in parts}) == 1
    whole = DataProto.concat(parts)
    added = len(whole) - rows
    if added:
        assert whole.batch["is_padding"].tolist() == [False] * rows + [True] * added
        assert whole.batch["response_mask"].sum(1).tolist() == [3] * rows + [0] * added
        assert whole.is_padding_enabled()
    assert rows_of(unpad_dataproto(whole, added)) == rows_of(data)
    assert data.batch["response_mask"].min() == 1  # the operand kept its own


def test_pad_repeats_the_first_rows_and_unpad_takes_them_off_in_every_column():
    data = envelope(3, a=1)
    padded, added = pad_dataproto_to_divisor(data, 8)
    assert added == 5
    assert scalars(padded) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert padded.non_tensor_batch["pair"][7] == [1, 1]
    assert padded.meta_info == {"a": 1}
    assert rows_of(unpad_dataproto(padded, added)) == rows_of(data)


def test_padding_of_object_columns_alone_round_trips():
    data = DataProto.from_dict(non_tensors={"u": ["a", "b", "c"]})
    padded, added = pad_dataproto_to_divisor(data, 2)
    assert padded.batch["is_padding"].tolist() == [False, False, False, True]
    back = unpad_dataproto(padded, added)
    assert back.batch is None
    assert rows_of(back) == rows_of(data)


def test_padding_rows_that_were_there_before_stay_marked():
    data, _ = pad_dataproto_to_divisor(envelope(3), 4)
    padded, added = pad_dataproto_to_divisor(data, 6)
    assert padded.batch["is_padding"].tolist() == [False] * 3 + [True] * 3
    assert unpad_dataproto(padded, added).batch["is_padding"].tolist() == [False] * 3 + [True]


def test_nothing_to_pad_gives_the_same_envelope():
    data = envelope(4)
    padded, added = pad_dataproto_to_divisor(data, 2)
    assert padded is data
    assert added == 0
    assert unpad_dataproto(padded, 0) is data


@pytest.mark.parametrize("size", [-1, 4])
def test_unpad_refuses_more_rows_than_there_are(size):
    with pytest.raises(BatchMismatchError, match=f"cannot take {size} |pad_size={size}"):
        unpad_dataproto(envelope(3), size)


@pytest.mark.parametrize(("candidate", "row"), [("first", 0), ("last", 2), ("", 2)])
def test_padding_appends_copies_of_the_row_it_was_told(candidate, row):
    data = envelope(3)
    data.padding(2, candidate)
    assert scalars(data) == [0, 1, 2, row, row]
    assert data.batch["is_padding"].sum() == 2


def test_padding_refuses_a_word_it_does_not_know_and_changes_nothing():
    data = envelope(3)
    with pytest.raises(BatchMismatchError, match="'frist'"):
        data.padding(2, "frist")
    with pytest.raises(BatchMismatchError, match="padding_size=-1"):
        data.padding(-1)
    with pytest.raises(BatchMismatchError, match="to 0 rows"):
        data[:0].padding(1)
    assert len(data) == 3
