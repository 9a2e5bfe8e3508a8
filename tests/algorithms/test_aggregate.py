from __future__ import annotations

import pytest
import torch

from ppo_lib.algorithms.aggregate import Denominators, agg_loss, denominators_of
from ppo_lib.algorithms.names import LOSS_AGG_MODES
from ppo_lib.errors import BatchMismatchError, ConfigError

LOSS = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [7.0, 7.0, 7.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 13 / 3),
        ("token-sum", 13.0),
        ("seq-mean-token-sum", 13 / 2),
        ("seq-mean-token-mean", (1.5 + 10) / 2),
        ("seq-mean-token-sum-norm", 13 / 2 / 5),
    ],
)
def test_each_mode_by_hand_and_a_fully_masked_row_is_no_sequence(mode, expected):
    whole = denominators_of(MASK, horizon=5)
    assert whole == Denominators(num_tokens=3, num_seqs=2, horizon=5)
    assert agg_loss(LOSS, MASK, mode, whole).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_golden(golden, mode):
    inputs = golden["loss_inputs"]
    mask = torch.tensor(inputs["mask"])
    result = agg_loss(torch.tensor(inputs["old"]), mask, mode, denominators_of(mask, horizon=4))
    assert result.item() == pytest.approx(golden[f"agg {mode}"], abs=1e-5)


def test_every_mode_is_tested():
    assert len(LOSS_AGG_MODES) == 5


def test_a_constant_horizon_makes_the_loss_independent_of_padding():
    wide = torch.nn.functional.pad
    whole = denominators_of(MASK, horizon=3)
    narrow = agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", whole)
    padded_mask = wide(MASK, (0, 4))
    padded = agg_loss(
        wide(LOSS, (0, 4)), padded_mask, "seq-mean-token-sum-norm", denominators_of(padded_mask, horizon=3)
    )
    assert narrow.item() == padded.item()


@pytest.mark.parametrize("horizon", [None, 0, -4])
def test_without_a_constant_horizon_the_norm_is_refused(horizon):
    with pytest.raises(ConfigError, match="loss_scale_factor"):
        agg_loss(LOSS, MASK, "seq-mean-token-sum-norm", denominators_of(MASK, horizon))


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_an_all_masked_batch_has_loss_zero_and_gradient_zero(mode):
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    result = agg_loss(loss, torch.zeros(2, 3), mode, Denominators(0, 0, horizon=3))
    result.backward()
    assert result.item() == 0
    assert loss.grad.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_an_unknown_mode_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'token-mean'"):
        agg_loss(LOSS, MASK, "token_mean")


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(BatchMismatchError, match="loss_mask"):
        agg_loss(LOSS, MASK[:1], "token-mean")
