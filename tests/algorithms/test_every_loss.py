"""What holds for every loss: a new policy loss is tested by being registered."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lib.algorithms import names
from ppo_lib.algorithms.aggregate import agg_loss, denominators_of
from ppo_lib.algorithms.kl import kl_penalty
from ppo_lib.algorithms.loss_config import LossConfig, PolicyLossSettings
from ppo_lib.algorithms.masked import LOG_RATIO_CLAMP
from ppo_lib.algorithms.registry import get_of_mini_batch_fn, get_policy_loss_fn
from ppo_lib.algorithms.value_loss import compute_value_loss

NAN = float("nan")
MODES = sorted(names.LOSS_AGG_MODES)
SETTINGS = PolicyLossSettings(clip_cov_ratio=0.3, clip_cov_lb=-0.5, kl_cov_ratio=0.3, dro_beta=0.5)
STOPPED_GRADIENT = {"gspo", "cispo", "dppo_tv", "dppo_kl"}  # what they descend is not the gradient of what they report
quick = settings(max_examples=20, deadline=None)


def _policy_loss(name):
    def loss(x, rows, mask, mode, whole):
        config = LossConfig(denominators=whole, policy_loss=SETTINGS)
        of_mini_batch = get_of_mini_batch_fn(name)
        if of_mini_batch is not None:
            flat = [x[key].detach()[mask.bool()] for key in ("old", "new", "other")]
            found = of_mini_batch(*flat, replace(config, draws=x["draws"][mask.bool()]))
            config = replace(config, mini_batch=found, draws=x["draws"][rows])
        arguments = [x[key][rows] for key in ("old", "new", "other")]
        return get_policy_loss_fn(name)(*arguments, mask[rows], mode, config, x["weights"][rows])

    return loss


def _value_loss(x, rows, mask, mode, whole):
    return compute_value_loss(x["new"][rows], x["other"][rows], x["old"][rows], mask[rows], 0.5, mode, whole)


def _kl_loss(name):
    def loss(x, rows, mask, mode, whole):
        penalty = kl_penalty(x["new"][rows], x["old"][rows], name, mask[rows])
        return agg_loss(penalty, mask[rows], mode, whole), {}

    return loss


LOSSES = {
    **{name: _policy_loss(name) for name in names.POLICY_LOSSES},
    "value": _value_loss,
    **{f"kl {name}": _kl_loss(name) for name in ("k1", "abs", "k2", "k3", "k3+")},
}


def inputs_of(rows, width, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = {name: torch.randn(rows, width, generator=generator, dtype=dtype) for name in ("old", "new", "other")}
    x["old"], x["new"] = (-x[name].abs() for name in ("old", "new"))  # log-probabilities
    weights, draws = torch.rand(2, rows, width, generator=generator, dtype=dtype)
    return {**x, "weights": weights + 0.5, "draws": draws}


@st.composite
def loss_inputs(draw):
    rows, width, seed = draw(st.integers(1, 6)), draw(st.integers(1, 7)), draw(st.integers(0, 2**31))
    kept = draw(st.sampled_from([0.0, 0.5, 1.0]))
    mask = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < kept
    return inputs_of(rows, width, seed), mask, draw(st.sampled_from(MODES))


def evaluate(loss, x, mask, mode, parts):
    """The sums over `parts` (lists of rows) of loss and metrics, and the gradient of the loss."""
    whole = denominators_of(mask, horizon=11)
    x = {**x, "new": x["new"].clone().requires_grad_()}
    results = [loss(x, torch.tensor(rows, dtype=torch.int64), mask, mode, whole) for rows in parts]
    total = sum(value for value, _ in results)
    total.backward()
    metrics = {name: sum(part[name] for _, part in results) for name in results[0][1]}
    return {"loss": total.detach(), "gradient": x["new"].grad, **metrics}


def everything(mask):
    return [list(range(len(mask)))]


@pytest.mark.parametrize("name", LOSSES)
class TestEveryLoss:
    @quick
    @given(inputs=loss_inputs(), data=st.data())
    def test_any_split_into_micro_batches_and_ranks_gives_the_same_loss_gradient_and_metrics(self, name, inputs, data):
        x, mask, mode = inputs
        order = data.draw(st.permutations(range(len(mask))))
        cuts = sorted(data.draw(st.sets(st.integers(0, len(mask)), max_size=3)) | {0, len(mask)})
        parts = [order[start:end] for start, end in itertools.pairwise(cuts)]
        split = evaluate(LOSSES[name], x, mask, mode, parts)
        torch.testing.assert_close(split, evaluate(LOSSES[name], x, mask, mode, everything(mask)), atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("micro_batches", [2, 4, 8])
    def test_one_two_four_and_eight_micro_batches_are_the_same(self, name, mode, micro_batches):
        x, mask = inputs_of(8, 5, seed=1), torch.rand(8, 5, generator=torch.Generator().manual_seed(1)) < 0.7
        parts = [list(range(start, 8, micro_batches)) for start in range(micro_batches)]
        split = evaluate(LOSSES[name], x, mask, mode, parts)
        torch.testing.assert_close(split, evaluate(LOSSES[name], x, mask, mode, everything(mask)), atol=1e-6, rtol=1e-5)

    @quick
    @given(inputs=loss_inputs(), left=st.integers(0, 3), right=st.integers(0, 3))
    def test_extra_padding_changes_nothing_whatever_it_holds(self, name, inputs, left, right):
        x, mask, mode = inputs
        width = mask.shape[1]
        pad = torch.nn.functional.pad
        padded = {key: pad(torch.where(mask, value, NAN), (left, right), value=NAN) for key, value in x.items()}
        padded_mask = pad(mask, (left, right))
        result = evaluate(LOSSES[name], padded, padded_mask, mode, everything(mask))
        assert bool(result["gradient"].isfinite().all())
        assert result["gradient"][~padded_mask].abs().sum() == 0
        result["gradient"] = result["gradient"][:, left : left + width]
        expected = evaluate(LOSSES[name], x, mask, mode, everything(mask))
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)

    @quick
    @given(inputs=loss_inputs())
    def test_the_mask_may_be_bool_int_or_float(self, name, inputs):
        x, mask, mode = inputs
        expected = evaluate(LOSSES[name], x, mask, mode, everything(mask))
        for dtype in (torch.int64, torch.float32):
            result = evaluate(LOSSES[name], x, mask.to(dtype), mode, everything(mask))
            torch.testing.assert_close(result, expected, atol=0, rtol=0)

    @pytest.mark.parametrize("mode", MODES)
    def test_a_batch_of_nothing_but_masked_rows_costs_nothing(self, name, mode):
        x = {key: torch.full((2, 3), NAN) for key in ("old", "new", "other", "weights", "draws")}
        for key, value in evaluate(LOSSES[name], x, torch.zeros(2, 3), mode, everything(x["old"])).items():
            assert value.abs().sum().item() == 0, key

    @pytest.mark.parametrize("mode", MODES)
    def test_every_mode_weighs_tokens_its_own_way(self, name, mode):
        x = inputs_of(3, 4, seed=5)
        mask = torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 1, 0, 0]])
        others = [evaluate(LOSSES[name], x, mask, other, everything(mask))["loss"] for other in MODES if other != mode]
        loss = evaluate(LOSSES[name], x, mask, mode, everything(mask))["loss"]
        assert all(abs(loss - other) > 1e-6 for other in others)

    def test_policies_that_are_far_apart_stay_finite(self, name):
        far = torch.tensor([[-1e4, -1e-3, -30.0, -1e4]])
        x = {
            "old": far.flip(1),
            "new": far,
            "other": torch.tensor([[1.0, -1.0, -1.0, 1.0]]),
            "weights": torch.ones(1, 4),
            "draws": torch.rand(1, 4),
        }
        for value in evaluate(LOSSES[name], x, torch.ones(1, 4), "token-mean", [[0]]).values():
            assert bool(value.isfinite().all())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in LOSSES if not name.endswith("+") and name not in STOPPED_GRADIENT])
def test_the_gradient_is_that_of_the_loss(name, mode):
    x = inputs_of(3, 4, seed=3, dtype=torch.float64)
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(3)) < 0.7
    whole = denominators_of(mask, horizon=11)

    def loss(new):
        return LOSSES[name]({**x, "new": new}, torch.arange(3), mask, mode, whole)[0]

    assert torch.autograd.gradcheck(loss, x["new"].requires_grad_())


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", names.POLICY_LOSSES)
def test_one_clamp_bounds_the_log_ratio_of_every_loss(name, sign, advantage):
    new, mask = torch.full((1, 2), -1.0 if sign > 0 else -30.0), torch.ones(1, 2)
    losses = [
        get_policy_loss_fn(name)(
            new - sign * distance, new, torch.full((1, 2), advantage), mask, "token-mean", LossConfig()
        )[0]
        for distance in (LOG_RATIO_CLAMP, LOG_RATIO_CLAMP + 5)
    ]
    assert bool(losses[0].isfinite())
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", names.POLICY_LOSSES)
def test_at_the_old_policy_every_loss_has_the_gradient_of_the_policy_gradient(name):
    """Before the first step the ratio is 1: there each of them raises log-probabilities in proportion to advantages."""
    old, advantages = torch.full((2, 3), -1.0), torch.tensor([[1.0], [-2.0]]).expand(2, 3)
    new = old.clone().requires_grad_()
    get_policy_loss_fn(name)(old, new, advantages, torch.ones(2, 3), "token-sum", LossConfig())[0].backward()
    torch.testing.assert_close(new.grad, -advantages.contiguous())
