"""Rollout correction inside the update, against values worked by hand; under any split, with one rank and with two."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from workers_ranks import train_off_policy, with_old
from workers_testing import Gradients, config, new_actor, padded_batch, run_ranks, worker_batch

from ppo_lib.algorithms import Denominators
from ppo_lib.config import load_config
from ppo_lib.workers.losses import observe_correction, of_mini_batch, policy_loss
from ppo_lib.workers.metrics import StepMetrics
from ppo_lib.workers.training_worker import Tokens

ACTOR = "actor_rollout_ref.actor."
CORRECTION = "algorithm.rollout_correction."
BYPASS = f"{CORRECTION}bypass_mode=true"
REJECTING = (BYPASS, f"{CORRECTION}rollout_rs='token_k1,seq_mean_k3'", f"{CORRECTION}rollout_rs_threshold='1.4,0.06'")
NORMALIZING = (
    BYPASS,
    f"{CORRECTION}loss_type=reinforce",
    f"{CORRECTION}rollout_is=sequence",
    f"{CORRECTION}rollout_is_threshold=1.2",
    f"{CORRECTION}rollout_is_batch_normalize=true",
)
COVARIANCE = (f"{ACTOR}policy_loss.loss_mode=kl_cov", f"{ACTOR}policy_loss.kl_cov_ratio=0.2")

# two rows: ratios 2, 4 | 1/2, a tool token, 1
LOG2 = math.log(2.0)
ROLLOUT = torch.tensor([[-1.0, -2.0, 0.0], [-1.0, 9.0, -3.0]])
LOG_PROBS = ROLLOUT + torch.tensor([[LOG2, 2 * LOG2, 0.0], [-LOG2, 5.0, 0.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 1]])
ADVANTAGES = torch.tensor([[1.0, 2.0, 0.0], [3.0, 0.0, -1.0]])


def corrected(*overrides: str, rows_each: int, mode: str = "token-mean") -> tuple[float, dict[str, float]]:
    """The loss of the two rows above in micro-batches of `rows_each`, and its metrics."""
    cfg = load_config(overrides=["actor_rollout_ref.model.path=m", BYPASS, f"{ACTOR}loss_agg_mode={mode}", *overrides])
    actor, correction = cfg.actor_rollout_ref.actor, cfg.algorithm.rollout_correction
    kept, metrics = MASK.bool(), StepMetrics()
    columns = {"response_mask": MASK, "advantages": ADVANTAGES, "old_log_probs": ROLLOUT}
    tokens = Tokens({"log_probs": LOG_PROBS[kept]}, {name: x[kept] for name, x in columns.items()}, kept.sum(1))
    denominators, found = Denominators(4.0, 2.0), None
    if (look := of_mini_batch(actor, correction)) is not None:
        found, denominators = look(tokens, denominators)
    observe = observe_correction(actor, correction, metrics)
    assert observe is not None
    observe(tokens)
    loss_fn, total = policy_loss(actor, correction), 0.0
    for rows in torch.arange(2).split(rows_each):
        part = {name: x[rows] for name, x in columns.items()}
        loss, _ = loss_fn({"log_probs": LOG_PROBS[rows]}, part, denominators, found)
        total += loss.item()
    return total, metrics.reduce()


def rejection(rule: str, threshold: str) -> tuple[str, str]:
    return f"{CORRECTION}rollout_rs='{rule}'", f"{CORRECTION}rollout_rs_threshold='{threshold}'"


# PPO with clips 0.8 and 1.2: -1.2 and -2 * 1.2 of the first row's tokens, -3 * 0.5 and +1 of the second's
@pytest.mark.parametrize("rows_each", [1, 2])
@pytest.mark.parametrize(
    ("rule", "threshold", "mode", "expected", "rejected", "rows_rejected"),
    [
        ("token_k1", "2.5", "token-mean", (-1.2 - 1.5 + 1) / 3, 1 / 4, 0),
        ("token_k1", "2.5", "seq-mean-token-mean", (-1.2 + (-1.5 + 1) / 2) / 2, 1 / 4, 0),
        ("token_k2", "0.3", "token-mean", (-1.2 - 1.5 + 1) / 3, 1 / 4, 0),  # .24, .96 | .24, 0
        ("token_k3", "0.25", "token-mean", (-1.5 + 1) / 2, 2 / 4, 1 / 2),  # .307, 1.61 | .193, 0
        ("token_k3", "0.25", "seq-mean-token-sum", -1.5 + 1, 2 / 4, 1 / 2),
        ("seq_sum_k1", "0.4_7", "token-mean", (-1.5 + 1) / 2, 2 / 4, 1 / 2),  # product 8 | .5
        ("seq_mean_k1", "0.8_3", "seq-mean-token-sum", -1.2 - 2.4, 2 / 4, 1 / 2),  # geometric mean 2.83 | .707
        ("seq_max_k1", "0.4_3", "token-mean", (-1.5 + 1) / 2, 2 / 4, 1 / 2),
        ("seq_sum_k2", "1.0", "token-mean", (-1.5 + 1) / 2, 2 / 4, 1 / 2),  # 1.2 | .24
        ("seq_mean_k2", "0.7", "token-mean", (-1.2 - 2.4 - 1.5 + 1) / 4, 0, 0),  # .6 | .12
        ("seq_max_k2", "0.7", "token-mean", (-1.5 + 1) / 2, 2 / 4, 1 / 2),
        ("seq_sum_k3", "1.9", "token-mean", (-1.5 + 1) / 2, 2 / 4, 1 / 2),  # 1.92 | .193
        ("seq_mean_k3", "0.97", "token-mean", (-1.2 - 2.4 - 1.5 + 1) / 4, 0, 0),
        ("seq_max_k3", "1.5", "token-mean", (-1.5 + 1) / 2, 2 / 4, 1 / 2),
        ("token_k1,seq_mean_k3", "1.5,0.5", "token-mean", 1.0, 3 / 4, 1 / 2),  # what is left is the last token
        ("token_k1,seq_mean_k3", "1.5,0.05", "token-mean", 0.0, 1, 1),
    ],
)
def test_rejection_leaves_losses_and_denominators(
    rule: str, threshold: str, mode: str, expected: float, rejected: float, rows_rejected: float, rows_each: int
) -> None:
    loss, metrics = corrected(*rejection(rule, threshold), rows_each=rows_each, mode=mode)
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(rejected)
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(rows_rejected)
    assert metrics["rollout_corr/kl"] == pytest.approx(-2 * LOG2 / 4)  # of all tokens, also those rejected


# reinforce is the sum over tokens of -w A log pi over 4, with A log pi as here
TERMS = [1 * (-1 + LOG2), 2 * (-2 + 2 * LOG2), 3 * (-1 - LOG2), -1 * -3.0]


@pytest.mark.parametrize("rows_each", [1, 2])
@pytest.mark.parametrize(
    ("level", "threshold", "normalize", "weights"),
    [
        ("token", "3", "false", [2, 3, 0.5, 1]),
        ("token", "3", "true", [2 / 1.625, 3 / 1.625, 0.5 / 1.625, 1 / 1.625]),  # mean of the tokens' weights
        ("token", "0.75_3", "true", [2 / 0.75, 0, 0, 1 / 0.75]),
        ("sequence", "100", "true", [8 / 4.25, 8 / 4.25, 0.5 / 4.25, 0.5 / 4.25]),  # mean of the responses' weights
    ],
)
def test_weights_are_those_of_the_policy_now_over_their_mean(
    level: str, threshold: str, normalize: str, weights: list[float], rows_each: int
) -> None:
    settings = (
        f"{CORRECTION}loss_type=reinforce",
        f"{CORRECTION}rollout_is={level}",
        f"{CORRECTION}rollout_is_threshold={threshold}",
        f"{CORRECTION}rollout_is_batch_normalize={normalize}",
    )
    loss, metrics = corrected(*settings, rows_each=rows_each)
    assert loss == pytest.approx(-sum(w * term for w, term in zip(weights, TERMS)) / 4, rel=1e-5)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(4 if level == "token" else 8)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(7.5 / 4 if level == "token" else 4.25)


def test_ratios_that_weigh_already_are_not_reported_as_weights() -> None:
    _, metrics = corrected(f"{CORRECTION}rollout_is=token", rows_each=2)  # ppo_clip: a notice says that it is not read
    assert "rollout_corr/rollout_is_mean" not in metrics


CASES: dict[str, tuple[str, ...]] = {
    "rejecting": REJECTING,
    "normalizing": NORMALIZING,
    "both": (*REJECTING, *NORMALIZING[1:], f"{ACTOR}entropy_coeff=0.05"),
    "kl_cov": (*REJECTING, *COVARIANCE),
    "clip_cov": (
        *REJECTING,
        f"{ACTOR}policy_loss.loss_mode=clip_cov",
        f"{ACTOR}policy_loss.clip_cov_ratio=0.2",
        f"{ACTOR}policy_loss.clip_cov_lb=-1",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_no_correction_depends_on_micro_batches(case: str, tiny_model: str) -> None:
    no_step = (f"{ACTOR}optim.lr=0", f"{ACTOR}grad_clip=null", f"{ACTOR}optim.weight_decay=0")
    results: list[tuple[dict[str, Any], torch.Tensor]] = []
    for rows in (8, 4, 1):
        overrides = (*CASES[case], *no_step, f"{ACTOR}ppo_micro_batch_size_per_gpu={rows}")
        actor = new_actor(config(tiny_model, *overrides), role="actor")
        td = with_old(actor, worker_batch(padded_batch(8), mini_batches=1))
        recorded = Gradients(actor.actor.engine)
        results.append((actor.update_actor(td), recorded.seen[0]))
    metrics, gradient = results[0]
    assert gradient.norm() > 0.01
    if case != "normalizing":
        assert 0.05 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 0.95
    for other_metrics, other in results[1:]:
        assert (other - gradient).norm() <= 1e-5 * gradient.norm()
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", ["both", "kl_cov", "clip_cov"])
def test_two_ranks_correct_as_one_does(case: str, tiny_model: str) -> None:
    cfg = config(tiny_model, *CASES[case], f"{ACTOR}ppo_micro_batch_size_per_gpu=1")
    alone = train_off_policy(0, 1, cfg)
    together = run_ranks(train_off_policy, 2, cfg)
    assert together[0]["metrics"] == together[1]["metrics"]
    for ours, theirs in zip(together[0]["metrics"], alone["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    for name, tensor in together[0]["actor"].items():
        assert (tensor - alone["actor"][name]).norm() <= 1e-4 * tensor.norm(), name
