from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lib.trainer.balance import balanced_partitions, log_seqlen_unbalance
from protocol.errors import BatchMismatchError

quick = settings(max_examples=60, deadline=None)


def totals(lengths, partitions):
    return [sum(lengths[i] for i in part) for part in partitions]


def spread(lengths, partitions):
    sums = totals(lengths, partitions)
    return max(sums) - min(sums)


def test_by_hand():
    assert balanced_partitions([8, 1, 2, 6], 2, equal_size=True) == [[0, 1], [2, 3]]
    assert balanced_partitions([8, 1, 1, 6], 2, equal_size=False) == [[0], [1, 2, 3]]
    assert balanced_partitions([5, 4, 3, 3, 3], 2, equal_size=False) == [[0, 1], [2, 3, 4]]


@quick
@given(
    lengths=st.lists(st.integers(0, 2048), min_size=1, max_size=60),
    parts=st.integers(1, 8),
    equal_size=st.booleans(),
)
def test_every_index_once_no_part_empty_sizes_equal_where_asked(lengths, parts, equal_size):
    lengths = lengths + [7] * (parts - len(lengths))
    if equal_size:
        lengths += [5] * (-len(lengths) % parts)
    partitions = balanced_partitions(lengths, parts, equal_size)
    assert len(partitions) == parts
    assert sorted(i for part in partitions for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) and part for part in partitions)
    if equal_size:
        assert {len(part) for part in partitions} == {len(lengths) // parts}
    # no part exceeds the mean by more than the longest row
    assert max(totals(lengths, partitions)) <= sum(lengths) / parts + max(lengths)
    assert partitions == balanced_partitions(lengths, parts, equal_size)


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("parts", [2, 8, 64])
def test_random_lengths_end_within_one_token(parts, equal_size):
    draw = random.Random(0)
    lengths = [draw.randint(1, 2048) for _ in range(4096)]
    assert spread(lengths, balanced_partitions(lengths, parts, equal_size)) <= 1


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("parts", [8, 64])
@pytest.mark.parametrize("shape", ["long tail", "two lengths"])
def test_lengths_as_they_come_end_within_one_token(shape, parts, equal_size):
    draw = random.Random(1)
    if shape == "long tail":
        lengths = [min(max(int(draw.lognormvariate(6.5, 0.8)), 16), 16384) for _ in range(4096)]
    else:
        lengths = [draw.choice((100, 2000)) + draw.randint(0, 100) for _ in range(4096)]
    assert spread(lengths, balanced_partitions(lengths, parts, equal_size)) <= 1


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor])
def test_a_tensor_is_split_like_a_list_and_indices_are_plain_numbers(kind):
    lengths = [9, 2, 7, 4, 4, 6]
    partitions = balanced_partitions(kind(lengths), 2, equal_size=True)
    assert partitions == balanced_partitions(lengths, 2, equal_size=True)
    assert {type(index) for part in partitions for index in part} == {int}


def test_free_sizes_level_what_equal_sizes_cannot():
    lengths = [100, *[1] * 99]
    assert spread(lengths, balanced_partitions(lengths, 2, equal_size=True)) == 99
    assert spread(lengths, balanced_partitions(lengths, 2, equal_size=False)) == 1


def test_measures_of_work_may_be_fractions():
    lengths = [0.5 * i + 0.25 for i in range(40)]
    assert spread(lengths, balanced_partitions(lengths, 4, equal_size=True)) <= 1


@pytest.mark.parametrize(
    ("rows", "parts", "equal_size", "message"),
    [
        (3, 4, False, "3 rows into 4 parts that are not empty"),
        (3, 0, False, "3 rows into 0 parts"),
        (0, 1, False, "0 rows into 1 parts"),
        (5, 2, True, "5 rows into 2 parts of equal size"),
    ],
)
def test_a_split_that_cannot_be_is_refused(rows, parts, equal_size, message):
    with pytest.raises(BatchMismatchError, match=message):
        balanced_partitions([1] * rows, parts, equal_size)


def test_the_unbalance_is_logged_as_it_was_and_as_it_is():
    assert log_seqlen_unbalance([10, 8, 1, 3], [[0, 2], [1, 3]]) == {
        "global_seqlen/min": 4,
        "global_seqlen/max": 18,
        "global_seqlen/minmax_diff": 14,
        "global_seqlen/balanced_min": 11,
        "global_seqlen/balanced_max": 11,
        "global_seqlen/mean": 11,
    }
