from __future__ import annotations

import math

import pytest
import torch

from ppo_lib.algorithms.masked import check_same_shape, distance, log_ratio, masked_mean, masked_sum, masked_whiten
from ppo_lib.errors import BatchMismatchError

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32, torch.float32])
def test_sums_and_means_select_by_any_mask(dtype):
    x = torch.tensor([[1.0, NAN, 3.0], [4.0, 5.0, NAN]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]]).to(dtype)
    assert masked_sum(x, mask).item() == 13
    assert masked_mean(x, mask).item() == 3.25
    assert masked_sum(x, mask, dim=1).tolist() == [4, 9]
    assert masked_mean(x, mask, dim=1).tolist() == [2, 4.5]


def test_nothing_kept_is_zero_and_not_nan():
    x, mask = torch.full((2, 3), NAN), torch.zeros(2, 3)
    assert masked_mean(x, mask).item() == 0
    assert masked_mean(x, mask, dim=1).tolist() == [0, 0]
    assert masked_whiten(x, mask).tolist() == [[0, 0, 0], [0, 0, 0]]


def test_whitening_by_hand():
    x = torch.tensor([[1.0, NAN, 2.0], [NAN, NAN, 6.0]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 1]])
    std = math.sqrt((4 + 1 + 9) / 2)  # around the mean 3, unbiased
    expected = torch.tensor([[-2 / std, 0, -1 / std], [0, 0, 3 / std]])
    torch.testing.assert_close(masked_whiten(x, mask), expected)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 1000, 12345])
@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e4 + 0.3])
def test_equal_entries_whiten_to_exactly_zero(count, value):
    x = torch.full((1, count), value)
    assert masked_whiten(x, torch.ones(1, count)).abs().max().item() == 0


def test_log_ratio_is_bounded_and_stops_the_gradient_outside_the_mask():
    a = torch.tensor([[1.0, 100.0, -100.0, NAN]], requires_grad=True)
    result = log_ratio(a, torch.zeros(1, 4), torch.tensor([[1, 1, 1, 0]]))
    assert result.tolist() == [[1, 20, -20, 0]]
    result.sum().backward()
    assert a.grad.tolist() == [[1, 0, 0, 0]]


def test_distance_has_no_direction_while_it_is_a_rounding_error():
    a = torch.tensor([[0.5, -2.0, 9e-6, -9e-6, 0.0, 2e-5, -2e-5]], requires_grad=True)
    result = distance(a)
    assert torch.equal(result, a.detach().abs())
    result.sum().backward()
    assert a.grad.tolist() == [[1, -1, 0, 0, 0, 1, -1]]


def test_shapes_that_differ_are_named():
    with pytest.raises(BatchMismatchError, match=r"first \(2, 3\), second \(2, 1\)"):
        check_same_shape(first=torch.zeros(2, 3), second=torch.zeros(2, 1))
    with pytest.raises(BatchMismatchError, match=r"only \(3,\)"):
        check_same_shape(only=torch.zeros(3))
