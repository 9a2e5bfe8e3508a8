"""Faults in the arithmetic of a step that people met in pipelines like this one, each with the behaviour that is right.

Those of the envelope stand in tests/protocol/test_known_faults.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from runs import TINY, tiny_trainer

from ppo_lib.algorithms import (
    Denominators,
    LossConfig,
    agg_loss,
    compute_value_loss,
    denominators_of,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    kl_penalty,
)
from ppo_lib.algorithms.correction_names import Bounds
from ppo_lib.algorithms.loss_config import PolicyLossSettings
from ppo_lib.algorithms.masked import LOG_RATIO_CLAMP, log_ratio, masked_mean
from ppo_lib.algorithms.metric import Metric
from ppo_lib.algorithms.names import ADV_ESTIMATORS, KL_FROM_LOGITS, KL_PENALTIES, LOSS_AGG_MODES, POLICY_LOSSES
from ppo_lib.algorithms.rollout_correction import bounded, correct_rollouts, importance_ratios
from ppo_lib.config import load_config
from ppo_lib.config.arithmetic import step_arithmetic
from ppo_lib.errors import ConfigError
from ppo_lib.reward.batch import place_scores
from ppo_lib.trainer.balance import balanced_partitions
from ppo_lib.trainer.batch_math import mini_batch_of, mini_batch_sizes, rank_major_order
from ppo_lib.trainer.metrics import compute_data_metrics
from ppo_lib.workers.metrics import StepMetrics
from protocol import DataProto

NAN = float("nan")
COMPARING = sorted(name for name, row in ADV_ESTIMATORS.items() if row.compares_rollouts)
SETTINGS = PolicyLossSettings(clip_cov_ratio=0.3, clip_cov_lb=-0.5, kl_cov_ratio=0.3, dro_beta=0.5)
SPLITS = [[8], [4, 4], [2, 2, 2, 2], [1] * 8, [5, 3], [7, 1]]


def eight_rows(seed=0):
    """Old and new log-probs, advantages and a mask of rows of very different lengths, (8, 6) each."""
    generator = torch.Generator().manual_seed(seed)
    old, noise, advantages = torch.randn(3, 8, 6, generator=generator)
    mask = torch.arange(6) < torch.tensor([6, 1, 5, 1, 1, 2, 6, 3])[:, None]
    return -old.abs(), -old.abs() + 0.2 * noise, advantages, mask


def estimate(name, rewards, mask, index=None, **fields):
    rows, width = mask.shape
    probabilities = torch.rand(rows, width, generator=torch.Generator().manual_seed(0))
    given = {
        "values": torch.zeros(rows, width),
        "old_log_probs": probabilities.log(),
        "sum_pi_squared": probabilities.square(),
        "reward_baselines": torch.zeros(rows),
        "gamma": 1.0,
        "lam": 1.0,
    }
    uid = np.array(["x"] * rows if index is None else index, dtype=object)
    return get_adv_estimator_fn(name)(
        token_level_rewards=rewards, response_mask=mask, index=uid, config=None, **{**given, **fields}
    )


def test_the_mini_batch_size_counts_prompts_and_stays_as_it_was_written(tmp_path):
    config = load_config(overrides=TINY)
    actor = config.actor_rollout_ref.actor
    with pytest.raises(ValidationError):
        actor.ppo_mini_batch_size = 6
    trainer = tiny_trainer(tmp_path)
    try:
        trainer.init_workers()
        arithmetic = trainer.arithmetic
        kept = trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size
    finally:
        trainer.close()
    assert kept == arithmetic.prompts_per_mini_batch == 2
    assert arithmetic.rows_per_mini_batch == 6  # three rollouts a prompt
    assert "2 prompts = 6 rows, 6 a rank" in arithmetic.table()
    two = load_config(overrides=[*TINY, "trainer.n_gpus_per_node=2", "trainer.worker_group=ray"])
    assert two.actor_rollout_ref.actor.ppo_mini_batch_size == 2


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_a_token_mean_does_not_depend_on_the_number_of_micro_batches(split):
    old, new, advantages, mask = eight_rows()
    ratio = torch.exp(new - old)
    pessimistic = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    whole = pessimistic[mask].sum() / mask.sum()
    config = LossConfig(denominators=denominators_of(mask))
    parts = [
        get_policy_loss_fn("vanilla")(old[rows], new[rows], advantages[rows], mask[rows], "token-mean", config)[0]
        for rows in torch.arange(8).split(split)
    ]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_the_critics_loss_does_not_grow_with_micro_batches_and_a_short_last_one_counts_as_much(mode, split):
    values, returns, noise, mask = eight_rows()
    predictions = values + noise
    denominators = denominators_of(mask, horizon=6)

    def loss(rows):
        given = predictions[rows], returns[rows], values[rows], mask[rows]
        return compute_value_loss(*given, 0.5, mode, denominators)[0]

    assert float(sum(loss(rows) for rows in torch.arange(8).split(split))) == pytest.approx(
        float(loss(torch.arange(8))), rel=1e-5
    )


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_no_loss_ignores_the_aggregation_mode(name):
    old, new, advantages, mask = eight_rows()
    draws = torch.rand(8, 6, generator=torch.Generator().manual_seed(0))  # clip_cov's, the same for every mode
    config = LossConfig(policy_loss=SETTINGS, denominators=denominators_of(mask, horizon=6), draws=draws)
    losses = {
        mode: float(get_policy_loss_fn(name)(old, new, advantages, mask, mode, config)[0]) for mode in LOSS_AGG_MODES
    }
    tokens, rows = int(mask.sum()), 8
    assert losses["token-sum"] == pytest.approx(losses["token-mean"] * tokens, rel=1e-5)
    assert losses["token-sum"] == pytest.approx(losses["seq-mean-token-sum"] * rows, rel=1e-5)
    assert losses["token-sum"] == pytest.approx(losses["seq-mean-token-sum-norm"] * rows * 6, rel=1e-5)
    assert losses["seq-mean-token-mean"] != pytest.approx(losses["token-mean"], rel=1e-3)


def test_rejection_shrinks_the_denominator_with_the_mask():
    rules = load_config(
        overrides=[
            "algorithm.rollout_correction.rollout_rs=seq_max_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=2",
        ]
    ).algorithm.rollout_correction
    old, mask = torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.int64)
    rollout = torch.tensor([[0.0, 0], [0, -1], [0, 0]])  # a ratio of e in the second row
    left = correct_rollouts(old, rollout, mask, rules).response_mask
    mini_batch = mini_batch_of(torch.tensor([0, 1, 2]), prompts_per_mini_batch=3)
    tokens, rows = mini_batch_sizes(mini_batch, left)
    assert (tokens, rows) == ([4.0], [2.0])
    ones = agg_loss(torch.ones(3, 2), left, "token-mean", Denominators(tokens[0], rows[0]))
    assert float(ones) == 1.0


def test_dr_grpo_divides_by_a_constant_and_not_by_the_padded_width():
    losses = []
    for width in (3, 3000):
        mask = torch.zeros(2, width)
        mask[0, :3] = mask[1, :1] = 1
        per_token = torch.full((2, width), 6.0)
        losses.append(float(agg_loss(per_token, mask, "seq-mean-token-sum-norm", denominators_of(mask, horizon=8))))
    assert losses == [4 * 6 / (2 * 8)] * 2
    config = load_config(overrides=["data.max_response_length=77"])
    assert config.actor_rollout_ref.rollout.response_length == 77  # what the actor divides by unless told otherwise


def test_a_metric_is_reduced_as_it_declares_and_not_by_its_name():
    metrics = StepMetrics()
    for value in (1.0, 3.0):
        metrics.add("mean", {"min_p_share": value, "domain_max_score": value})
        metrics.add("max", {"minimum_distance": value})
    assert metrics.reduce("actor") == {
        "actor/min_p_share": 2.0,
        "actor/domain_max_score": 2.0,
        "actor/minimum_distance": 3.0,
    }
    assert Metric(1.0, "sum").with_part(Metric(3.0, "sum")).value == 4.0


@pytest.mark.parametrize("name", COMPARING)
def test_a_group_of_one_has_advantage_zero_in_every_estimator_and_is_warned_about(name):
    one_alone = estimate(name, torch.tensor([[7.0], [1.0], [0.0]]), torch.ones(3, 1), index=["alone", "x", "x"])[0]
    assert one_alone[0].item() == 0
    with pytest.warns(UserWarning, match="every prompt has one rollout"):
        assert estimate(name, torch.tensor([[7.0], [1.0]]), torch.ones(2, 1), index=["a", "b"])[0].abs().sum() == 0
    if f"{name}_vectorized" in ADV_ESTIMATORS:
        twin = ADV_ESTIMATORS[f"{name}_vectorized"]
        assert twin.function == ADV_ESTIMATORS[name].function
    settings = [f"algorithm.adv_estimator={name}", "actor_rollout_ref.rollout.n=1"]
    assert any("compares the rollouts of one prompt" in line for line in load_config(overrides=settings).notices)


@pytest.mark.parametrize("name", COMPARING)
def test_a_fully_masked_row_is_no_sibling(name):
    rewards = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 100.0]])
    mask = torch.tensor([[1, 0], [1, 1], [0, 0]])
    ours, alone = estimate(name, rewards, mask)[0], estimate(name, rewards[:2], mask[:2])[0]
    torch.testing.assert_close(ours[:2], alone)
    assert ours[2].abs().sum() == 0


def test_a_score_goes_to_the_last_policy_token_and_an_empty_response_carries_none_and_is_counted():
    #                     a tool answer at the end, padding behind it | no response | a full one
    response_mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    attended = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    placed = place_scores([5.0, 7.0, 9.0], response_mask)
    assert placed.tolist() == [[0, 5, 0, 0], [0, 0, 0, 0], [0, 0, 0, 9]]
    returns = estimate("gae", placed, response_mask)[1]
    assert returns.tolist() == [[5, 5, 0, 0], [0, 0, 0, 0], [9, 9, 9, 9]]
    batch = DataProto.from_dict(
        {
            "attention_mask": torch.cat([torch.ones(3, 1, dtype=torch.int64), attended], 1),
            "response_mask": response_mask,
            "token_level_scores": placed,
            "token_level_rewards": placed,
            "advantages": returns,
            "returns": returns,
        }
    )
    metrics = compute_data_metrics(batch, use_critic=False)
    assert metrics["response/aborted_ratio"] == pytest.approx(1 / 3)
    assert metrics["critic/score/mean"] == 7  # of the two that answered


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax", "optimal_token_baseline"])
def test_returns_are_carried_over_a_tool_span(name):
    mask = torch.tensor([[1, 0, 0, 1, 0], [1, 0, 0, 1, 0]])
    rewards = torch.tensor([[0.0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    returns = estimate(name, rewards, mask)[1]
    assert returns.tolist() == [[1, 0, 0, 1, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_nan_in_padding_reaches_nothing_and_an_all_masked_batch_costs_zero(dtype):
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).to(dtype)
    x = torch.tensor([[1.0, 3.0, NAN], [5.0, NAN, NAN]])
    assert masked_mean(x, mask, dim=1).tolist() == [2.0, 5.0]
    for name in sorted(POLICY_LOSSES):
        config = LossConfig(policy_loss=SETTINGS)
        new = x.clone().requires_grad_()
        loss, metrics = get_policy_loss_fn(name)(x, new, x, mask, "seq-mean-token-mean", config)
        loss.backward()
        assert all(bool(value.isfinite()) for value in (loss, *metrics.values()))
        assert bool(new.grad.isfinite().all())
        assert new.grad[~mask.bool()].abs().sum() == 0
        loss, metrics = get_policy_loss_fn(name)(x, new, x, torch.zeros_like(mask), "token-mean", config)
        assert loss.item() == 0
        assert all(value.item() == 0 for value in metrics.values())


def test_one_constant_bounds_the_log_ratio_everywhere():
    far, mask = torch.full((1, 1), 500.0), torch.ones(1, 1)
    assert log_ratio(far, -far).item() == LOG_RATIO_CLAMP == 20
    for name in sorted(POLICY_LOSSES):
        _, metrics = get_policy_loss_fn(name)(-far, far, mask, mask, "token-mean", LossConfig(policy_loss=SETTINGS))
        assert abs(metrics["ppo_kl"].item()) == LOG_RATIO_CLAMP, name
    assert kl_penalty(far, -far, "k1").item() == LOG_RATIO_CLAMP
    assert kl_penalty(far, -far, "k2").item() == LOG_RATIO_CLAMP**2 / 2
    for level in ("token", "sequence"):
        ratios = importance_ratios(log_ratio(far, -far), mask.bool(), level)
        assert bounded(ratios, Bounds(None, math.inf)).item() == pytest.approx(math.exp(LOG_RATIO_CLAMP))


@pytest.mark.parametrize("key", ["algorithm.kl_penalty", "actor_rollout_ref.actor.kl_loss_type"])
def test_names_of_kl_forms_are_checked_at_load_and_every_one_that_passes_can_be_computed(key):
    use = "actor_rollout_ref.actor.use_kl_loss=true"
    for name in KL_PENALTIES:
        load_config(overrides=[f"{key}={name}", use])
        assert kl_penalty(torch.zeros(1, 1), torch.ones(1, 1), name).shape == (1, 1)
    assert {"k3+", "low_var_kl+", "kl+", "abs+", "mse+"} <= KL_PENALTIES.keys()
    for name in ("k4", "k3++", "+", *KL_FROM_LOGITS):
        with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
            load_config(overrides=[f"{key}={name}", use])


def test_balancing_divides_by_the_ranks_that_train_and_takes_lists():
    lengths = [9, 1, 8, 2, 7, 3, 6, 4]
    for given in (lengths, np.array(lengths), torch.tensor(lengths)):
        parts = balanced_partitions(given, 2, equal_size=True)
        assert all(type(index) is int for part in parts for index in part)
        assert [sum(lengths[index] for index in part) for part in parts] == [20, 20]
    config = load_config(
        overrides=[
            *TINY,
            "trainer.worker_group=ray",
            "trainer.n_gpus_per_node=4",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.name=sglang",
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        ]
    )
    numbers = step_arithmetic(config)  # two ranks share a replica, and each of the four trains rows of its own
    assert (numbers.replicas, numbers.rows_per_rank, numbers.rows_per_rank_per_mini_batch) == (2, 2, 1)
    order, padding = rank_major_order(
        [0] * 4 + [1] * 4, lengths, 2, lambda given, ranks: balanced_partitions(given, ranks, equal_size=True)
    )
    assert padding == []
    assert [sum(lengths[row] for row in order[rank * 4 : rank * 4 + 4]) for rank in (0, 1)] == [20, 20]
    assert all(sum(row < 4 for row in order[rank * 4 : rank * 4 + 4]) == 2 for rank in (0, 1))
