"""Importance weights, rejection and mismatch metrics, with values worked by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ppo_lib.algorithms.correction_names import Bounds, Rejection, importance_bounds, rejections
from ppo_lib.algorithms.rollout_correction import correct_rollouts, mismatch_metrics
from ppo_lib.errors import BatchMismatchError, ConfigError

NAN = float("nan")
# ratios 2, 4 | 1/2, (hole), 1 | nothing
LOG2 = math.log(2.0)
ROLLOUT = torch.tensor([[-1.0, -2.0, NAN], [-1.0, NAN, -3.0], [NAN, NAN, NAN]])
OLD = ROLLOUT + torch.tensor([[LOG2, 2 * LOG2, NAN], [-LOG2, NAN, 0.0], [0.0, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0]])


def settings(**changed):
    return SimpleNamespace(
        **{
            "rollout_is": None,
            "rollout_is_threshold": 2.0,
            "rollout_is_batch_normalize": False,
            "rollout_rs": None,
            "rollout_rs_threshold": None,
            **changed,
        }
    )


def corrected(old=OLD, rollout=ROLLOUT, mask=MASK, **changed):
    return correct_rollouts(old, rollout, mask, settings(**changed))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"rollout_is": "token", "rollout_is_threshold": 3.0}, [[2, 3, 0], [0.5, 0, 1], [0, 0, 0]]),
        ({"rollout_is": "token", "rollout_is_threshold": "0.75_3"}, [[2, 0, 0], [0, 0, 1], [0, 0, 0]]),
        ({"rollout_is": "sequence", "rollout_is_threshold": 100.0}, [[8, 8, 0], [0.5, 0, 0.5], [0, 0, 0]]),
        ({"rollout_is": "sequence", "rollout_is_threshold": 5}, [[5, 5, 0], [0.5, 0, 0.5], [0, 0, 0]]),
        # means: (2 + 3 + 0.5 + 1) / 4 tokens = 1.625; (8 + 0.5) / 2 responses = 4.25
        (
            {"rollout_is": "token", "rollout_is_threshold": 3.0, "rollout_is_batch_normalize": True},
            [[2 / 1.625, 3 / 1.625, 0], [0.5 / 1.625, 0, 1 / 1.625], [0, 0, 0]],
        ),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": 100.0, "rollout_is_batch_normalize": True},
            [[8 / 4.25, 8 / 4.25, 0], [0.5 / 4.25, 0, 0.5 / 4.25], [0, 0, 0]],
        ),
    ],
)
def test_weights_are_ratios_of_tokens_or_responses_within_bounds(changed, expected):
    result = corrected(**changed)
    torch.testing.assert_close(result.weights, torch.tensor(expected, dtype=torch.float32))
    assert torch.equal(result.response_mask, MASK)


@pytest.mark.parametrize(
    ("rule", "threshold", "expected"),
    [
        ("token_k1", 2.5, [[1, 0, 0], [1, 0, 1]]),  # ratios 2, 4 | .5, 1 within 0.4 .. 2.5
        ("token_k1", "0.9_5", [[1, 1, 0], [0, 0, 1]]),
        ("token_k2", 0.3, [[1, 0, 0], [1, 0, 1]]),  # .24, .96 | .24, 0
        ("token_k3", 0.25, [[0, 0, 0], [1, 0, 1]]),  # .307, 1.61 | .193, 0
        ("seq_sum_k1", "0.4_7", [[0, 0, 0], [1, 0, 1]]),  # product 8 | .5
        ("seq_mean_k1", "0.4_3", [[1, 1, 0], [1, 0, 1]]),  # geometric mean 2.83 | .707
        ("seq_mean_k1", "0.8_3", [[1, 1, 0], [0, 0, 0]]),
        ("seq_max_k1", "0.4_3", [[0, 0, 0], [1, 0, 1]]),  # 4 is one too many
        ("seq_sum_k2", 1.0, [[0, 0, 0], [1, 0, 1]]),  # 1.2 | .24
        ("seq_mean_k2", 0.7, [[1, 1, 0], [1, 0, 1]]),  # .6 | .12
        ("seq_max_k2", 0.7, [[0, 0, 0], [1, 0, 1]]),  # .96 | .24
        ("seq_sum_k3", 1.9, [[0, 0, 0], [1, 0, 1]]),  # 1.92 | .193
        ("seq_mean_k3", 0.97, [[1, 1, 0], [1, 0, 1]]),  # .96 | .097
        ("seq_max_k3", 1.5, [[0, 0, 0], [1, 0, 1]]),  # 1.61 | .193
        ("token_k1,seq_mean_k3", "2.5,0.05", [[0, 0, 0], [0, 0, 0]]),
        ("token_k1, seq_mean_k3", "2.5, 0.5", [[0, 0, 0], [1, 0, 1]]),
    ],
)
def test_rejection_leaves_out_tokens_or_responses_that_are_too_far(rule, threshold, expected):
    result = corrected(rollout_rs=rule, rollout_rs_threshold=threshold)
    assert result.response_mask.tolist() == [*expected, [0, 0, 0]]
    assert result.weights is None
    rejected = 1 - sum(map(sum, expected)) / 4
    rows = 1 - sum(any(row) for row in expected) / 2
    assert result.metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(rejected)
    assert result.metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(rows)


def test_mismatch_is_measured_on_policy_tokens_only():
    metrics = mismatch_metrics(OLD, ROLLOUT, MASK)
    # log ratios in units of log 2: 1, 2 | -1, 0; mean log-probs of a response: rollout -1.5 | -2
    expected = {
        "kl": -2 * LOG2 / 4,
        "k3_kl": (2 + 4 + 0.5 + 1) / 4 - 1 - 2 * LOG2 / 4,
        "training_ppl": (math.exp(1.5 - 1.5 * LOG2) + math.exp(2 + 0.5 * LOG2)) / 2,
        "rollout_ppl": (math.exp(1.5) + math.exp(2)) / 2,
        "log_ppl_diff": (-1.5 * LOG2 + 0.5 * LOG2) / 2,
        "chi2_token": (4 + 16 + 0.25 + 1) / 4 - 1,
        "chi2_seq": (64 + 0.25) / 2 - 1,
    }
    assert metrics == {f"rollout_corr/{name}": pytest.approx(value, rel=1e-5) for name, value in expected.items()}


def test_metrics_of_weights_tell_how_far_they_were_before_the_bounds():
    metrics = corrected(rollout_is="sequence", rollout_is_threshold=5).metrics
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx((8 + 0.5) / 2)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(8)
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(0.5)
    assert metrics["rollout_corr/rollout_is_std"] == pytest.approx(3.75)
    assert metrics["rollout_corr/rollout_is_bounded_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(2.75**2 / ((25 + 0.25) / 2))


def test_a_batch_without_policy_tokens_has_no_metrics_and_zero_weights():
    result = corrected(mask=torch.zeros(3, 3), rollout_is="token", rollout_rs="seq_mean_k1", rollout_rs_threshold=2)
    assert result.metrics == {}
    assert result.weights.tolist() == torch.zeros(3, 3).tolist()
    assert result.response_mask.tolist() == torch.zeros(3, 3).tolist()


@given(
    arrays("float32", (3, 4), elements=st.floats(-60, 60, width=32)),
    arrays("bool", (3, 4)),
    st.sampled_from(["token", "sequence"]),
    st.booleans(),
)
def test_padding_and_mask_types_change_nothing_and_finite_input_gives_finite_output(gap, mask, level, normalize):
    rollout, gap, mask = torch.full((3, 4), -2.0), torch.from_numpy(gap), torch.from_numpy(mask)
    changed = {
        "rollout_is": level,
        "rollout_is_threshold": 1e9,
        "rollout_is_batch_normalize": normalize,
        "rollout_rs": "token_k1,seq_max_k3",
        "rollout_rs_threshold": "4,3",
    }
    expected = corrected(rollout + gap, rollout, mask.long(), **changed)
    assert torch.isfinite(expected.weights).all()
    assert all(math.isfinite(value) for value in expected.metrics.values())
    assert (expected.weights[~mask] == 0).all()
    wide = [torch.cat([x, torch.full((3, 2), fill)], 1) for x, fill in ((rollout + gap, NAN), (rollout, 7.0))]
    padded = corrected(*wide, torch.cat([mask, torch.zeros(3, 2, dtype=torch.bool)], 1), **changed)
    torch.testing.assert_close(padded.weights[:, :4], expected.weights)
    assert torch.equal(padded.response_mask[:, :4].bool(), expected.response_mask.bool())
    assert padded.metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-12)


def test_shapes_that_differ_are_named():
    with pytest.raises(BatchMismatchError, match=r"rollout_log_probs \(3, 2\)"):
        mismatch_metrics(OLD, ROLLOUT[:, :2], MASK)


def test_thresholds_are_read_once_for_config_and_computation():
    assert importance_bounds(2) == Bounds(None, 2.0)
    assert importance_bounds("0.5_2") == Bounds(0.5, 2.0)
    assert rejections("token_k1,seq_sum_k2", "2,0.5") == (
        Rejection("token", "k1", Bounds(0.5, 2.0)),
        Rejection("seq_sum", "k2", Bounds(None, 0.5)),
    )
    assert rejections("seq_max_k2,seq_mean_k3", 0.1) == (
        Rejection("seq_max", "k2", Bounds(None, 0.1)),
        Rejection("seq_mean", "k3", Bounds(None, 0.1)),
    )
    assert rejections(None, None) == ()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: importance_bounds("a"), "0.5_2.0"),
        (lambda: importance_bounds(-1), "above 0"),
        (lambda: importance_bounds(float("inf")), "above 0"),
        (lambda: importance_bounds("1_2_3"), "two as lo_hi"),
        (lambda: importance_bounds("2_1"), "lower bound 2 is not below 1"),
        (lambda: rejections("token_k4", 1), "token_k3"),
        (lambda: rejections("token_k1", None), "is not set"),
        (lambda: rejections("token_k1", 0.5), "above 1"),
        (lambda: rejections("token_k2", "0.5_2"), "one bound"),
        (lambda: rejections("token_k1,token_k2", "2,3,4"), "3 values for the 2 entries"),
    ],
)
def test_a_threshold_that_bounds_nothing_says_what_would(call, said):
    with pytest.raises(ConfigError, match=said):
        call()
