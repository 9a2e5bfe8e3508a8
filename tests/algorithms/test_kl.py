from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from ppo_lib.algorithms.kl import (
    K3_MAX,
    AdaptiveKLController,
    FixedKLController,
    get_kl_controller,
    kl_penalty,
)
from ppo_lib.algorithms.names import KL_FROM_LOGITS, KL_PENALTIES, check_kl_penalty
from ppo_lib.errors import BatchMismatchError, ConfigError

D = math.log(2)
BY_HAND = {"k1": D, "kl": D, "abs": D, "k2": D * D / 2, "mse": D * D / 2, "k3": 0.5 - 1 + D, "low_var_kl": 0.5 - 1 + D}


@pytest.mark.parametrize("name", KL_PENALTIES)
def test_each_form_by_hand(name):
    result = kl_penalty(torch.tensor([[-1.0]]), torch.tensor([[-1.0 - D]]), name)
    assert result.item() == pytest.approx(BY_HAND[name.removesuffix("+")], abs=1e-6)


@pytest.mark.parametrize("name", ["kl", "abs", "mse", "low_var_kl", "k3+"])
def test_golden(golden, name):
    inputs = golden["loss_inputs"]
    result = kl_penalty(torch.tensor(inputs["new"]), torch.tensor(inputs["old"]), name)
    torch.testing.assert_close(result, torch.tensor(golden[f"kl {name}"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in KL_PENALTIES if name.endswith("+")])
def test_straight_through_has_its_own_value_and_the_gradient_of_k2(name):
    ref = torch.tensor([[-2.0, -0.5, -1.0]])
    straight = torch.tensor([[-1.0, -1.5, -1.0]], requires_grad=True)
    plain = straight.detach().clone().requires_grad_()
    result = kl_penalty(straight, ref, name)
    torch.testing.assert_close(result, kl_penalty(plain, ref, name.removesuffix("+")))
    result.sum().backward()
    kl_penalty(plain, ref, "k2").sum().backward()
    torch.testing.assert_close(straight.grad, plain.grad)
    assert plain.grad.tolist() == [[1, -1, 0]]


@pytest.mark.parametrize("name", KL_PENALTIES)
def test_far_apart_policies_stay_finite(name):
    logprob = torch.tensor([[-1e4, 1e4, -25.0]], requires_grad=True)
    result = kl_penalty(logprob, torch.zeros(1, 3), name)
    result.sum().backward()
    assert bool(result.isfinite().all())
    assert bool(logprob.grad.isfinite().all())
    if name.startswith(("k3", "low_var_kl")):
        assert result.tolist() == [[K3_MAX] * 3]


def test_a_mask_stops_values_and_gradients():
    logprob = torch.tensor([[float("nan"), -1.0]], requires_grad=True)
    result = kl_penalty(logprob, torch.zeros(1, 2), "k3", mask=torch.tensor([[0, 1]]))
    result.sum().backward()
    assert result[0, 0].item() == 0
    assert logprob.grad[0, 0].item() == 0


@pytest.mark.parametrize("name", KL_FROM_LOGITS)
class TestFromLogits:
    def test_by_hand(self, name):
        p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
        result = kl_penalty(p.log()[None, None] + 3, q.log()[None, None] - 1, name)  # logits are known up to a constant
        assert result.tolist() == [[pytest.approx(0.5 * D - 0.25 * D, abs=1e-6)]]

    def test_it_is_the_mean_of_the_estimates_over_the_vocabulary(self, name):
        logits, ref = 0.3 * torch.randn(2, 2, 3, 7, generator=torch.Generator().manual_seed(0))
        log_p, log_q = logits.log_softmax(-1), ref.log_softmax(-1)
        for form in ("k1", "k3"):
            mean = (log_p.exp() * kl_penalty(log_p.view(2, -1), log_q.view(2, -1), form).view(2, 3, 7)).sum(-1)
            torch.testing.assert_close(kl_penalty(logits, ref, name), mean)

    def test_a_mask_stops_values_and_gradients(self, name):
        logits = torch.tensor([[[float("nan"), 0.0], [1.0, 2.0]]], requires_grad=True)
        result = kl_penalty(logits, torch.full((1, 2, 2), 0.5), name, torch.tensor([[0, 1]]))
        result.sum().backward()
        assert result[0, 0].item() == 0 < result[0, 1].item()
        assert logits.grad[0, 0].tolist() == [0, 0]
        assert bool((logits.grad[0, 1] != 0).all())

    def test_its_gradient_is_that_of_the_kl(self, name):
        logits, ref = torch.randn(2, 1, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert torch.autograd.gradcheck(lambda x: kl_penalty(x, ref, name), logits.clone().requires_grad_())

    def test_log_probs_of_sampled_tokens_are_refused(self, name):
        with pytest.raises(BatchMismatchError, match="takes logits"):
            kl_penalty(torch.zeros(1, 2), torch.zeros(1, 2), name)

    def test_a_configuration_may_not_ask_for_it(self, name):
        with pytest.raises(ConfigError, match="use low_var_kl"):
            check_kl_penalty(name)


@pytest.mark.parametrize("name", KL_PENALTIES)
def test_every_form_that_a_configuration_may_name_can_be_computed(name):
    check_kl_penalty(name)
    assert kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name).item() == 0


@pytest.mark.parametrize("name", ["k4", "k3++", "+", "low_var", "kl_low_var"])
def test_an_unknown_form_is_refused(name):
    with pytest.raises(ConfigError, match="unknown kl_penalty"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), name)


def test_adaptive_golden(golden):
    controller = AdaptiveKLController(init_kl_coef=0.2, target_kl=0.1, horizon=10000)
    controller.update(current_kl=1.0, n_steps=1024)  # far above: clipped to + 0.2
    first = controller.value
    controller.update(current_kl=0.0, n_steps=1024)  # far below: clipped to - 0.2
    assert [first, controller.value] == pytest.approx(golden["adaptive_kl"])


def test_adaptive_stays_at_its_target_and_moves_in_proportion_near_it():
    controller = AdaptiveKLController(init_kl_coef=0.5, target_kl=0.1, horizon=1000)
    controller.update(current_kl=0.1, n_steps=1000)
    assert controller.value == pytest.approx(0.5)
    controller.update(current_kl=0.11, n_steps=500)
    assert controller.value == pytest.approx(0.5 * (1 + 0.1 * 0.5))


def test_a_resumed_adaptive_controller_goes_on_from_its_coefficient():
    controller = AdaptiveKLController(0.2, 0.1, 100)
    controller.update(1.0, 64)
    resumed = AdaptiveKLController(0.2, 0.1, 100)
    resumed.load_state_dict(controller.state_dict())
    for each in (controller, resumed):
        each.update(0.0, 32)
    assert resumed.value == controller.value != 0.2


def test_a_fixed_controller_stays_and_a_resumed_run_takes_the_configured_coefficient():
    controller = FixedKLController(0.3)
    controller.update(100.0, 10**6)
    assert controller.value == 0.3
    resumed = FixedKLController(0.1)
    resumed.load_state_dict(controller.state_dict())
    assert resumed.value == 0.1


def test_what_would_break_the_coefficient_is_refused():
    with pytest.raises(ConfigError, match="above 0"):
        AdaptiveKLController(0.2, target_kl=0.0, horizon=10)
    controller = AdaptiveKLController(0.2, target_kl=0.1, horizon=10)
    with pytest.raises(ConfigError, match="use 64 or more"):
        controller.update(current_kl=0.0, n_steps=64)
    with pytest.raises(ValueError, match="is nan"):
        controller.update(current_kl=float("nan"), n_steps=1)
    assert controller.value == 0.2


def test_the_controller_follows_its_section():
    section = SimpleNamespace(type="fixed", kl_coef=0.01, horizon=10, target_kl=0.1)
    assert isinstance(get_kl_controller(section), FixedKLController)
    section.type = "adaptive"
    adaptive = get_kl_controller(section)
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.horizon, adaptive.target_kl) == (0.01, 10, 0.1)
    section.type = "adaptiv"
    with pytest.raises(ConfigError, match="did you mean 'adaptive'"):
        get_kl_controller(section)
