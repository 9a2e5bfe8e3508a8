from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from ppo_lib.algorithms import names
from ppo_lib.algorithms.aggregate import denominators_of
from ppo_lib.algorithms.loss_config import LossConfig, PolicyLossSettings
from ppo_lib.algorithms.policy_losses.vanilla import compute_policy_loss_vanilla
from ppo_lib.algorithms.registry import get_policy_loss_fn
from ppo_lib.algorithms.value_loss import compute_value_loss
from ppo_lib.config.actor import ActorConfig
from ppo_lib.errors import BatchMismatchError, ConfigError

NAN = float("nan")


# ---------------------------------------------------------------- literal arrays


# The losses published with a mean over sequences give that with every mode's equal, `seq-mean-token-mean`.
GOLDEN_MODE = {"sapo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean"}


@pytest.mark.parametrize(
    "name", ["vanilla", "gspo", "sapo", "gpg", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "kl_cov"]
)
def test_golden(golden, name):
    old, new, advantages, mask = (torch.tensor(golden["loss_inputs"][key]) for key in ("old", "new", "adv", "mask"))
    config = LossConfig(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    loss, metrics = get_policy_loss_fn(name)(old, new, advantages, mask, GOLDEN_MODE.get(name, "token-mean"), config)
    assert loss.item() == pytest.approx(golden[f"loss {name}"]["loss"], abs=1e-5)
    for key, value in golden[f"loss {name}"]["metrics"].items():
        assert metrics[key.removeprefix("actor/")].item() == pytest.approx(value, abs=1e-5)


def run(name, ratios, advantages, mask=None, mode="token-sum", config=None, old=None, weights=None):
    """(loss, gradient of log_prob, metrics) of tokens with these ratios to the old policy."""
    ratios = torch.tensor(ratios)
    old = torch.zeros(ratios.shape) if old is None else torch.tensor(old).log()
    log_prob = (old + ratios.log()).requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old,
        log_prob,
        torch.tensor(advantages),
        torch.ones(ratios.shape) if mask is None else torch.tensor(mask),
        mode,
        config or LossConfig(),
        None if weights is None else torch.tensor(weights),
    )
    loss.backward()
    return loss.item(), log_prob.grad.tolist(), {key: value.item() for key, value in metrics.items()}


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


def test_ppo_clip_is_vanilla_without_further_weights():
    ratios, advantages = [[2.0, 0.5]], [[1.0, -1.0]]
    expected = run("vanilla", ratios, advantages)
    assert run("ppo_clip", ratios, advantages, weights=[[7.0, 7.0]]) == expected
    assert expected[0] == pytest.approx(-1.2 + 0.8)


def test_gspo_by_hand():
    # the sequence's ratio is the geometric mean: sqrt(4 * 1) = 2, clipped at 1.2; sqrt(0.5 * 1.62) = 0.9, free
    loss, gradient, metrics = run("gspo", [[4.0, 1.0], [0.5, 1.62]], [[1.0, 1.0], [2.0, -1.0]])
    assert loss == pytest.approx(2 * -1.2 - 2 * 0.9 + 0.9)
    assert gradient == [[0, 0], pytest.approx([-2 * 0.9, 0.9])]  # of each token: s A
    assert metrics["pg_clipfrac"] == 2 / 4


def test_gspo_has_the_gradient_of_the_mean_over_sequences():
    loss, gradient, _ = run("gspo", [[1.1, 1.1, 9.0]], [[1.0, 1.0, 1.0]], [[1, 1, 0]], mode="seq-mean-token-mean")
    assert loss == pytest.approx(-1.1)
    assert gradient == [pytest.approx([-1.1 / 2, -1.1 / 2, 0])]


def test_sapo_by_hand():
    config = LossConfig(tau_pos=1.0, tau_neg=2.0)
    loss, gradient, metrics = run("sapo", [[1.0, 1.0, 2.0, 2.0]], [[1.0, -1.0, 1.0, -3.0]], config=config)
    gates = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))]
    assert loss == pytest.approx(-4 / 2 + (4 / 2) / 2 - 4 * gates[0] + 3 * 2 * gates[1])
    slopes = [2 * 4 * gate * (1 - gate) for gate in gates]  # by log_prob: ratio times 4 sigmoid'
    assert gradient == [pytest.approx([-1, 1, -slopes[0], 3 * slopes[1]], abs=1e-5)]
    assert metrics["pg_clipfrac"] == 0


@pytest.mark.parametrize("name", ["gpg", "reinforce"])
def test_the_plain_policy_gradient_by_hand(name):
    loss, gradient, metrics = run(name, [[0.5, 0.25]], [[2.0, -1.0]], weights=[[1.0, 3.0]])
    assert loss == pytest.approx(2 * math.log(2) - 3 * math.log(4))
    assert gradient == [[-2, 3]]
    assert metrics["ppo_kl"] == pytest.approx((math.log(2) + math.log(4)) / 2)


def test_geo_mean_by_hand():
    # low and high bound the log ratio. A good sequence: +1 cut to 0.4, -1 stays. A bad one: -1 cut to -0.2, +1 stays
    ratios = [[math.e, 1 / math.e], [1 / math.e, math.e]]
    config = LossConfig(clip_ratio_low=0.2, clip_ratio_high=0.4)
    loss, gradient, metrics = run("geo_mean", ratios, [[2.0, 2.0], [-1.0, -1.0]], config=config)
    good, bad = math.exp((0.4 - 1) / 2), math.exp((-0.2 + 1) / 2)
    assert loss == pytest.approx(2 * -2 * good + 2 * bad, abs=1e-6)  # each token stands for its sequence
    assert gradient == [pytest.approx([0, -2 * good]), pytest.approx([0, bad])]
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_lower"]) == (2 / 4, 2 / 4)


def test_geo_mean_takes_the_geometric_mean_of_the_weights():
    loss, _, _ = run("geo_mean", [[1.0, 1.0]], [[1.0, 1.0]], mode="seq-mean-token-mean", weights=[[4.0, 1.0]])
    assert loss == pytest.approx(-2)
    zero, _, _ = run("geo_mean", [[1.0, 1.0]], [[1.0, 1.0]], mode="seq-mean-token-mean", weights=[[4.0, 0.0]])
    assert zero == pytest.approx(0, abs=1e-15)


def test_cispo_by_hand():
    # the ratio 2 counts as 1.2 and the ratio 0.5 as 0.8, for good and bad tokens, and no token loses its gradient
    loss, gradient, metrics = run("cispo", [[2.0, 2.0, 0.5, 1.0]], [[1.0, -1.0, 1.0, 1.0]], old=[[0.25] * 4])
    assert loss == pytest.approx(1.2 * math.log(2) - 1.2 * math.log(2) + 0.8 * math.log(8) + math.log(4))
    assert gradient == [pytest.approx([-1.2, 1.2, -0.8, -1])]
    assert metrics["pg_clipfrac"] == 3 / 4


def test_dppo_tv_by_hand():
    # moved by .3 up: dropped if good, kept if bad; .3 down: the other way round; .05 * 8 = .4: cut at 3 where bad;
    # a ratio of 5 that moves no more than .04 is kept, though the ratio is far out
    old = [[0.3, 0.3, 0.6, 0.6, 0.05, 0.01]]
    ratios = [[2.0, 2.0, 0.5, 0.5, 8.0, 5.0]]
    loss, gradient, metrics = run("dppo_tv", ratios, [[1.0, -1.0, 1.0, -1.0, -1.0, 1.0]], old=old)
    assert gradient == [pytest.approx([0, 2, -0.5, 0, 3, -3])]
    assert loss == pytest.approx(2 * math.log(0.6) - 0.5 * math.log(0.3) + 3 * math.log(0.4) - 3 * math.log(0.05))
    assert metrics["pg_clipfrac"] == pytest.approx(2 / 6)
    assert metrics["pg_clipfrac_lower"] == pytest.approx(2 / 6)


def test_dppo_kl_by_hand():
    # from .5 to .9: .5 log(5/9) + .5 log 5 = .511; from .5 to .6: .0204
    old, ratios = [[0.5, 0.5, 0.5]], [[1.8, 1.2, 1.8]]
    config = LossConfig(clip_ratio=0.1)
    _, gradient, metrics = run("dppo_kl", ratios, [[1.0, 1.0, -1.0]], old=old, config=config)
    assert gradient == [pytest.approx([0, -1.2, 1.8])]
    assert metrics["pg_clipfrac"] == pytest.approx(1 / 3)
    above = 0.5 * math.log(5 / 9) + 0.5 * math.log(5)
    for bound, kept in ((above - 1e-4, False), (above + 1e-4, True)):
        _, gradient, _ = run("dppo_kl", [[1.8]], [[1.0]], old=[[0.5]], config=LossConfig(clip_ratio=bound))
        assert (gradient[0][0] != 0) == kept


def test_dro_by_hand():
    settings = PolicyLossSettings(dro_beta=0.5)
    loss, gradient, _ = run("dro", [[math.e, 1.0]], [[2.0, -1.0]], config=LossConfig(policy_loss=settings))
    assert loss == pytest.approx(-(2 * 1 - 0.5 * 0.5 * 1))
    assert gradient == [pytest.approx([-(2 - 0.5), 1])]
    assert run("dro", [[math.e]], [[2.0]])[0] == pytest.approx(-(2 - 0.5 * 0.05))  # no beta set


# log-probs 0, -1, -2, -5 with mean -2, advantages 2, 1, 0, -3 with mean 0: covariances 4, 1, 0, 9
COV_OLD, COV_ADVANTAGES = [[1.0, math.exp(-1), math.exp(-2), math.exp(-5)]], [[2.0, 1.0, 0.0, -3.0]]


def test_clip_cov_by_hand():
    settings = PolicyLossSettings(clip_cov_ratio=0.25, clip_cov_lb=0.5, clip_cov_ub=8.0)
    ones = [[1.0] * 4]
    # covariance 9 is out of range and 0 too: of 4 and 1 the one with the larger draw is held back
    config = LossConfig(policy_loss=settings, draws=torch.tensor([[0.6, 0.5, 0.9, 0.9]]))
    loss, gradient, metrics = run("clip_cov", ones, COV_ADVANTAGES, old=COV_OLD, config=config)
    assert gradient == [pytest.approx([0, -1, 0, 3])]
    assert loss == pytest.approx(-1 + 3)
    assert metrics["pg_clipfrac"] == 1 / 4
    other = LossConfig(policy_loss=settings, draws=torch.tensor([[0.4, 0.5, 0.9, 0.9]]))
    assert run("clip_cov", ones, COV_ADVANTAGES, old=COV_OLD, config=other)[1] == [pytest.approx([-2, 0, 0, 3])]
    two = LossConfig(policy_loss=PolicyLossSettings(clip_cov_ratio=0.5, clip_cov_lb=0.5, clip_cov_ub=8.0))
    assert run("clip_cov", ones, COV_ADVANTAGES, old=COV_OLD, config=two)[1] == [pytest.approx([0, 0, 0, 3])]


def test_clip_cov_draws_each_candidate_as_often_as_any_other():
    settings = PolicyLossSettings(clip_cov_ratio=0.25, clip_cov_lb=0.5, clip_cov_ub=99.0)  # 4, 1 and 9
    torch.manual_seed(0)
    held = torch.zeros(4)
    for _ in range(600):
        config = LossConfig(policy_loss=settings)
        gradient = run("clip_cov", [[1.0] * 4], COV_ADVANTAGES, old=COV_OLD, config=config)[1]
        held += torch.tensor(gradient[0]) == 0
    assert held[2] == 600  # which has no advantage
    assert all(160 < count < 240 for count in held[[0, 1, 3]].tolist())


def test_clip_cov_does_not_spend_its_share_on_tokens_that_are_clipped_anyway():
    settings = PolicyLossSettings(clip_cov_ratio=0.25, clip_cov_lb=0.5, clip_cov_ub=8.0)
    # the same log-probs, but the first token doubled its probability and is clipped
    old = [[0.5, *COV_OLD[0][1:]]]
    config = LossConfig(policy_loss=settings)
    loss, gradient, metrics = run("clip_cov", [[2.0, 1.0, 1.0, 1.0]], COV_ADVANTAGES, old=old, config=config)
    assert gradient == [pytest.approx([0, 0, 0, 3])]
    assert loss == pytest.approx(-1.2 * 2 + 3)
    assert (metrics["pg_clipfrac"], metrics["pg_clipfrac_lower"]) == (1 / 4, 1 / 4)


def test_kl_cov_by_hand():
    settings = PolicyLossSettings(kl_cov_ratio=0.25, ppo_kl_coef=0.5)
    ratio = math.exp(-1)  # of the last token, which has the largest covariance
    old = [[*COV_OLD[0][:3], math.exp(-4)]]
    config = LossConfig(policy_loss=settings)
    loss, gradient, metrics = run("kl_cov", [[1.0, 1.0, 1.0, ratio]], COV_ADVANTAGES, old=old, config=config)
    assert loss == pytest.approx(-2 - 1 + 3 * ratio + 0.5 * 1)
    assert gradient == [pytest.approx([-2, -1, 0, 3 * ratio - 0.5])]
    assert metrics == {"ppo_kl": pytest.approx(1 / 4)}


def test_kl_cov_before_the_first_update_is_the_policy_gradient_whatever_the_rounding():
    config = LossConfig(policy_loss=PolicyLossSettings(kl_cov_ratio=1, ppo_kl_coef=0.5))
    ratios = [[1.0, 1 + 2e-6, 1 - 2e-6, 1 + 1e-6]]
    _, gradient, _ = run("kl_cov", ratios, COV_ADVANTAGES, old=COV_OLD, config=config)
    assert gradient == [pytest.approx([-advantage for advantage in COV_ADVANTAGES[0]], rel=1e-5)]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_even_a_small_share_holds_back_one_token(name):
    settings = PolicyLossSettings(clip_cov_lb=-99.0, clip_cov_ub=99.0, ppo_kl_coef=7.0)
    config = LossConfig(policy_loss=settings, draws=torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    old = [COV_OLD[0]]
    moved = [[1.0, 1.0, 1.0, 1.1]]
    _, gradient, _ = run(name, moved, COV_ADVANTAGES, old=old, config=config)
    assert gradient[0][3] == pytest.approx(0 if name == "clip_cov" else 3 * 1.1 + 7)


@pytest.mark.parametrize("name", sorted(set(names.POLICY_LOSSES) - {"dro"}))  # dro pulls back wherever it stands
def test_without_an_advantage_no_loss_moves_the_policy_however_far_it_went(name):
    loss, gradient, _ = run(name, [[2.0, 0.5, 1.0, 1.1]], [[0.0] * 4], old=COV_OLD)
    assert loss == 0
    assert gradient == [[0] * 4]


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
        tau_pos=2.0,
        tau_neg=3.0,
        policy_loss=SimpleNamespace(loss_mode="vanilla"),
    )
    whole = denominators_of(torch.ones(2, 3), horizon=8)
    config = LossConfig.from_actor(actor, whole)
    assert config.clip_bounds == (0.9, 1.3)
    assert config.clip_ratio_c == 4.0
    assert (config.tau_pos, config.tau_neg) == (2.0, 3.0)
    assert config.policy_loss.loss_mode == "vanilla"
    assert config.denominators_for(torch.ones(1, 3)).num_tokens == 6
    assert config.denominators_for(torch.ones(1, 3)).horizon == 16
    assert LossConfig(denominators=whole).denominators_for(torch.ones(1, 3)).horizon == 8
    assert LossConfig().denominators_for(torch.ones(1, 3)).num_tokens == 3


def test_defaults_are_those_of_the_configuration():
    actor = ActorConfig()
    section = actor.policy_loss.model_dump(exclude={"loss_mode"})
    assert section == dataclasses.asdict(PolicyLossSettings())
    for name in ("clip_ratio", "clip_ratio_c", "tau_pos", "tau_neg", "loss_scale_factor"):
        assert getattr(actor, name) == getattr(LossConfig(), name)


def test_every_setting_of_a_loss_is_a_key_of_the_actor():
    for setting in names.POLICY_LOSS_SETTINGS:
        section, actor = setting.rpartition(".")[0], ActorConfig()
        assert hasattr(actor.policy_loss if section else actor, setting.removeprefix("policy_loss."))


def test_a_dual_clip_that_would_flip_the_loss_is_refused():
    with pytest.raises(ConfigError, match="clip_ratio_c must be above 1"):
        LossConfig(clip_ratio_c=1.0)


def test_shapes_that_differ_are_refused():
    two, three = torch.zeros(1, 2), torch.zeros(1, 3)
    with pytest.raises(BatchMismatchError, match=r"advantages \(1, 3\)"):
        compute_policy_loss_vanilla(two, two, three, two, "token-mean", LossConfig())
    with pytest.raises(BatchMismatchError, match=r"returns \(1, 3\)"):
        compute_value_loss(two, three, two, two, 0.5)
