from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lib.algorithms import names
from ppo_lib.algorithms.aggregate import agg_loss, denominators_of
from ppo_lib.algorithms.kl import kl_penalty
from ppo_lib.algorithms.loss_config import LossConfig
from ppo_lib.algorithms.policy_losses.vanilla import compute_policy_loss_vanilla
from ppo_lib.algorithms.registry import get_policy_loss_fn
from ppo_lib.algorithms.value_loss import compute_value_loss
from ppo_lib.errors import BatchMismatchError, ConfigError

NAN = float("nan")
MODES = sorted(names.LOSS_AGG_MODES)
quick = settings(max_examples=25, deadline=None)


# ---------------------------------------------------------------- literal arrays


def test_vanilla_golden(golden):
    old, new, advantages, mask = (torch.tensor(golden["loss_inputs"][key]) for key in ("old", "new", "adv", "mask"))
    config = LossConfig(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    loss, metrics = compute_policy_loss_vanilla(old, new, advantages, mask, "token-mean", config)
    assert loss.item() == pytest.approx(golden["loss vanilla"]["loss"], abs=1e-5)
    expected = {key.removeprefix("actor/"): value for key, value in golden["loss vanilla"]["metrics"].items()}
    assert {key: value.item() for key, value in metrics.items()} == pytest.approx(expected, abs=1e-5)


def test_vanilla_by_hand():
    # ratio 2 for a good token: clipped at 1.2. Ratio 5 for a bad one: bounded at 3. Ratio 1/2 for a bad one: clipped at
    # 0.8. Ratio 1.1 for a good one: free
    log_prob = torch.tensor([[2.0, 5.0], [0.5, 1.1]]).log().requires_grad_()
    advantages = torch.tensor([[1.0, -1.0], [-2.0, 2.0]])
    ones = torch.ones(2, 2)
    loss, metrics = compute_policy_loss_vanilla(
        torch.zeros(2, 2), log_prob, advantages, ones, "token-mean", LossConfig()
    )
    assert loss.item() == pytest.approx((-1.2 + 3 + 2 * 0.8 - 2 * 1.1) / 4)
    loss.backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([[0, 0], [0, -2 * 1.1 / 4]]))
    assert metrics["pg_clipfrac"].item() == 2 / 4
    assert metrics["pg_clipfrac_lower"].item() == 1 / 4
    assert metrics["ppo_kl"].item() == pytest.approx(-(math.log(2) + math.log(5) - math.log(2) + math.log(1.1)) / 4)


def test_importance_weights_multiply_each_token():
    log_prob, weights = torch.zeros(1, 3), torch.tensor([[2.0, 0.5, NAN]])
    loss, _ = compute_policy_loss_vanilla(
        log_prob, log_prob, torch.ones(1, 3), torch.tensor([[1, 1, 0]]), "token-sum", LossConfig(), weights
    )
    assert loss.item() == -2.5


def test_a_ratio_beyond_float32_stays_finite():
    log_prob = torch.tensor([[1000.0, -1000.0]], requires_grad=True)
    loss, metrics = compute_policy_loss_vanilla(
        torch.zeros(1, 2), log_prob, -torch.ones(1, 2), torch.ones(1, 2), "token-sum", LossConfig()
    )
    loss.backward()
    assert loss.item() == pytest.approx(3 + 0.8)
    assert metrics["ppo_kl"].item() == 0  # +20 and -20
    assert log_prob.grad.tolist() == [[0, 0]]


def test_the_old_policy_gets_no_gradient():
    old, new = torch.zeros(1, 2, requires_grad=True), torch.zeros(1, 2, requires_grad=True)
    loss, _ = compute_policy_loss_vanilla(old, new, torch.ones(1, 2), torch.ones(1, 2), "token-mean", LossConfig())
    loss.backward()
    assert old.grad is None
    assert new.grad.tolist() == [[-0.5, -0.5]]


def test_value_loss_by_hand():
    # not moved: (1 - 0)^2; moved from 0 to 2, clipped at 0.5: max((2 - 3)^2, (0.5 - 3)^2); past the return: max(1, .25)
    vpreds = torch.tensor([[1.0, 2.0, 2.0, NAN]], requires_grad=True)
    returns, values = torch.tensor([[0.0, 3.0, 1.0, NAN]]), torch.tensor([[1.0, 0.0, 0.0, NAN]])
    loss, metrics = compute_value_loss(vpreds, returns, values, torch.tensor([[1, 1, 1, 0]]), cliprange_value=0.5)
    assert loss.item() == pytest.approx(0.5 * (1 + 6.25 + 1) / 3)
    assert metrics["vf_clipfrac"].item() == pytest.approx(1 / 3)
    assert metrics["vpred_mean"].item() == pytest.approx(5 / 3)
    loss.backward()
    torch.testing.assert_close(vpreds.grad, torch.tensor([[1 / 3, 0, 1 / 3, 0]]))


# ---------------------------------------------------------------- settings


def test_settings_are_read_from_an_actor_section():
    actor = SimpleNamespace(
        clip_ratio=0.1,
        clip_ratio_low=None,
        clip_ratio_high=0.3,
        clip_ratio_c=4.0,
        loss_scale_factor=16,
        policy_loss=SimpleNamespace(loss_mode="vanilla"),
    )
    whole = denominators_of(torch.ones(2, 3), horizon=8)
    config = LossConfig.from_actor(actor, whole)
    assert config.clip_bounds == (0.9, 1.3)
    assert config.clip_ratio_c == 4.0
    assert config.policy_loss.loss_mode == "vanilla"
    assert config.denominators_for(torch.ones(1, 3)).num_tokens == 6
    assert config.denominators_for(torch.ones(1, 3)).horizon == 16
    assert LossConfig(denominators=whole).denominators_for(torch.ones(1, 3)).horizon == 8
    assert LossConfig().denominators_for(torch.ones(1, 3)).num_tokens == 3


def test_a_dual_clip_that_would_flip_the_loss_is_refused():
    with pytest.raises(ConfigError, match="clip_ratio_c must be above 1"):
        LossConfig(clip_ratio_c=1.0)


def test_shapes_that_differ_are_refused():
    two, three = torch.zeros(1, 2), torch.zeros(1, 3)
    with pytest.raises(BatchMismatchError, match=r"advantages \(1, 3\)"):
        compute_policy_loss_vanilla(two, two, three, two, "token-mean", LossConfig())
    with pytest.raises(BatchMismatchError, match=r"returns \(1, 3\)"):
        compute_value_loss(two, three, two, two, 0.5)


# ---------------------------------------------------------------- properties of every loss


def _policy_loss(name):
    def loss(x, rows, mask, mode, whole):
        config = LossConfig(denominators=whole)
        return get_policy_loss_fn(name)(x["old"][rows], x["new"][rows], x["other"][rows], mask[rows], mode, config)

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


@st.composite
def loss_inputs(draw):
    rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = {name: torch.randn(rows, width, generator=generator) for name in ("old", "new", "other")}
    mask = torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return x, mask, draw(st.sampled_from(MODES))


def evaluate(loss, x, mask, mode, parts, whole=None):
    """The sums over `parts` (lists of rows) of loss and metrics, and the gradient of the loss."""
    whole = whole or denominators_of(mask, horizon=11)
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
    def test_any_split_into_micro_batches_gives_the_same_loss_gradient_and_metrics(self, name, inputs, data):
        x, mask, mode = inputs
        order = data.draw(st.permutations(range(len(mask))))
        cuts = sorted(data.draw(st.sets(st.integers(0, len(mask)), max_size=3)) | {0, len(mask)})
        parts = [order[start:end] for start, end in itertools.pairwise(cuts)]
        split = evaluate(LOSSES[name], x, mask, mode, parts)
        torch.testing.assert_close(split, evaluate(LOSSES[name], x, mask, mode, everything(mask)), atol=1e-5, rtol=1e-5)

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
@pytest.mark.parametrize("name", [name for name in LOSSES if not name.endswith("+")])  # straight-through: see test_kl
def test_the_gradient_is_that_of_the_loss(name, mode):
    generator = torch.Generator().manual_seed(3)
    x = {key: torch.randn(3, 4, generator=generator, dtype=torch.float64) for key in ("old", "new", "other")}
    mask = torch.rand(3, 4, generator=generator) < 0.7
    whole = denominators_of(mask, horizon=11)

    def loss(new):
        return LOSSES[name]({**x, "new": new}, torch.arange(3), mask, mode, whole)[0]

    assert torch.autograd.gradcheck(loss, x["new"].requires_grad_())
