"""Rollout correction inside a step: which numbers it makes, and that ranks and micro-batches have no part in them."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from runs import GRPO, run, tiny_trainer
from test_exactness import assert_same, train, varied

from ppo_lib.config import load_config, need_old_log_probs
from ppo_lib.errors import ConfigError

BYPASS = ("algorithm.rollout_correction.bypass_mode=true",)
CORRECTED = (
    *GRPO,
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_is_batch_normalize=true",
    "algorithm.rollout_correction.rollout_rs='token_k1,seq_mean_k3'",
    "algorithm.rollout_correction.rollout_rs_threshold='1.5,0.05'",
)


def step(folder, *overrides, edit=None):
    """One step; `edit(rollouts)` changes what the engine gave. The batch after each stage, and the metrics."""
    trainer = tiny_trainer(folder, "trainer.total_training_steps=1", *overrides, reward_fn=varied)
    try:
        trainer.init_workers()
        trainer.checkpoint_manager.update_weights(0)
        real = trainer.async_rollout_manager.generate_sequences
        if edit is not None:
            trainer.async_rollout_manager.generate_sequences = lambda gen_batch: edited(real(gen_batch), edit)
        stages = trainer.step_through(next(iter(trainer.train_dataloader)))
        batches = {stage: (copy.deepcopy(batch), metrics) for stage, batch, metrics in stages}
    finally:
        trainer.close()
    return {stage: batch for stage, (batch, _) in batches.items()}, batches["update_weights"][1]


def edited(rollouts, edit):
    edit(rollouts.batch)
    return rollouts


def shift(*changes):
    """An engine whose log-prob of token (row, column) is off by so much."""

    def edit(batch):
        for row, column, by in changes:
            if batch["response_mask"][row, column]:
                batch["rollout_log_probs"][row, column] -= by

    return edit


def test_weights_are_those_of_the_actor_over_the_engine(tmp_path):
    batches, metrics = step(
        tmp_path,
        *GRPO,
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=3",
        edit=shift((0, 0, math.log(2)), (1, 0, math.log(9))),
    )
    batch = batches["adv"].batch
    kept = batch["response_mask"].bool()
    expected = kept.float()
    expected[0, 0], expected[1, 0] = 2.0, 3.0
    torch.testing.assert_close(batch["rollout_is_weights"], expected, atol=1e-3, rtol=0)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(9, rel=1e-3)
    assert "rollout_corr/rollout_rs_masked_fraction" not in metrics


def test_the_mismatch_is_reported_where_nothing_is_corrected(tmp_path):
    batches, metrics = step(tmp_path, *GRPO)
    assert "rollout_is_weights" not in batches["adv"].tensor_keys()
    names = ("kl", "k3_kl", "training_ppl", "rollout_ppl", "log_ppl_diff", "chi2_token", "chi2_seq")
    assert {f"rollout_corr/{name}" for name in names} == {name for name in metrics if name.startswith("rollout_corr")}
    assert abs(metrics["rollout_corr/kl"]) < 1e-4


def test_a_fully_rejected_row_leaves_its_siblings_baseline(tmp_path):
    rejecting = (
        *GRPO,
        "algorithm.norm_adv_by_std_in_grpo=false",
        "algorithm.rollout_correction.rollout_rs=seq_max_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2",
    )
    batches, metrics = step(tmp_path, *rejecting, edit=shift((0, 0, 1.0)))
    before, after = batches["old_log_prob"].batch, batches["adv"].batch
    assert after["response_mask"][0].sum() == 0
    assert torch.equal(after["response_mask"][1:], before["response_mask"][1:])
    scores = before["token_level_scores"].sum(1)
    baseline = scores[1:3].mean()  # of the two siblings that are left
    for row in (1, 2):
        kept = after["response_mask"][row].bool()
        torch.testing.assert_close(after["advantages"][row][kept], (scores[row] - baseline).expand(int(kept.sum())))
    tokens, rows = before["response_mask"].sum(), len(scores)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(
        float(before["response_mask"][0].sum() / tokens)
    )
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / rows)


def test_the_denominators_of_the_loss_are_counted_after_rejection(tmp_path):
    one_step = "actor_rollout_ref.actor.ppo_mini_batch_size=4"  # on policy: the loss is minus the mean advantage
    no_kl = "actor_rollout_ref.actor.use_kl_loss=false"
    rules = ("algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=2")
    batches, metrics = step(tmp_path, *GRPO, one_step, no_kl, *rules, edit=shift((0, 0, 1.0), (5, 1, 1.0)))
    kept, advantages = batches["adv"].batch["response_mask"].bool(), batches["adv"].batch["advantages"]
    assert int(kept.sum()) == int(batches["old_log_prob"].batch["response_mask"].sum()) - 2
    assert metrics["actor/pg_loss"] == pytest.approx(-float(advantages[kept].mean()), abs=1e-6)


def test_the_score_of_a_row_survives_the_rejection_of_its_last_token(tmp_path):
    def last_tokens(batch):
        last = batch["response_mask"].sum(1) - 1
        batch["rollout_log_probs"][torch.arange(len(last)), last] -= 2.0

    settings = (
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=3",
    )
    batches, _ = step(tmp_path / "rejecting", *GRPO, *settings, edit=last_tokens)
    plain, _ = step(tmp_path / "plain", *GRPO)
    after, expected = batches["adv"].batch, plain["adv"].batch
    assert (expected["response_mask"].sum(1) - after["response_mask"].sum(1)).tolist() == [1] * 12
    left = after["response_mask"].bool()
    torch.testing.assert_close(after["advantages"][left], expected["advantages"][left])
    assert (after["advantages"][~left] == 0).all()
    assert after["advantages"].abs().sum() > 0


def test_a_mini_batch_emptied_by_rejection_takes_no_step(tmp_path):
    reject_all = (
        *GRPO,
        "algorithm.rollout_correction.rollout_rs=seq_sum_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=1.01",
    )

    def off(batch):
        batch["rollout_log_probs"][:6] -= 1.0  # the first mini-batch: two prompts of three rollouts

    batches, metrics = step(tmp_path, *reject_all, edit=off)
    counts = batches["adv"].batch["response_mask"].sum(1).tolist()
    assert counts[:6] == [0] * 6
    assert all(counts[6:])
    assert metrics["actor/grad_norm"] > 0  # of the second mini-batch: the first had nothing to learn from
    assert metrics["actor/empty_mini_batches"] == 1
    kept = batches["adv"].batch["response_mask"].bool()
    mean = batches["adv"].batch["advantages"][kept].mean()
    assert metrics["actor/pg_loss"] == pytest.approx(-float(mean), abs=1e-5)  # not half of it
    assert all(math.isfinite(value) for value in metrics.values())


def test_micro_batches_do_not_change_corrected_numbers(tmp_path):
    _, recorded = train(tmp_path / "generates", *GRPO, steps=2)
    recorded = perturbed(recorded)
    expected, _ = train(tmp_path / "packed", *CORRECTED, recorded=recorded, steps=2)
    size = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    found, _ = train(tmp_path / "micro", *CORRECTED, size, recorded=recorded, steps=2)
    assert_same(found, expected, steps=2)


def test_two_ranks_over_ray_give_the_corrected_numbers_of_one_local_rank(tmp_path, ray_cluster):
    _, recorded = train(tmp_path / "generates", *GRPO, steps=2)
    recorded = perturbed(recorded)
    expected, _ = train(tmp_path / "local", *CORRECTED, recorded=recorded, steps=2, first=1)
    ray = ("trainer.worker_group=ray", "trainer.n_gpus_per_node=2")
    found, _ = train(tmp_path / "two", *CORRECTED, *ray, recorded=recorded, steps=2, first=1)
    assert_same(found, expected, steps=2)


def perturbed(recorded):
    """The same generations by an engine that is a little off everywhere: ratios of about 0.7 to 1.4."""
    recorded = copy.deepcopy(recorded)
    generator = torch.Generator().manual_seed(0)
    for output in recorded:
        log_probs = output.batch["rollout_log_probs"]
        log_probs += 0.2 * torch.randn(log_probs.shape, generator=generator)
    return recorded


def test_bypass_mode_takes_the_rollouts_log_probs_and_saves_the_pass(tmp_path):
    config = load_config(overrides=[*GRPO, *BYPASS, "actor_rollout_ref.rollout.n=2"])
    assert not need_old_log_probs(config)
    one_step = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    batches, metrics = step(tmp_path, *GRPO, *BYPASS, one_step, edit=shift((0, 0, 0.5)))
    batch = batches["old_log_prob"].batch
    kept = batch["response_mask"].bool()
    assert torch.equal(batch["old_log_probs"][kept], batch["rollout_log_probs"][kept])
    assert metrics["actor/entropy"] > 0  # measured by the update, since no pass came before it
    assert metrics["actor/ppo_kl"] != 0
    assert metrics["rollout_corr/kl"] == pytest.approx(-0.5 / float(kept.sum()), abs=1e-5)
    assert "rollout_corr/rollout_is_mean" not in metrics
    assert "rollout_corr/rollout_rs_masked_fraction" not in metrics


REJECTING = (
    *BYPASS,
    "actor_rollout_ref.actor.use_kl_loss=false",
    "algorithm.rollout_correction.rollout_rs='token_k1,seq_mean_k3'",
    "algorithm.rollout_correction.rollout_rs_threshold='1.5,0.05'",
)
WEIGHING = (
    *REJECTING,
    "algorithm.rollout_correction.loss_type=reinforce",
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_is_batch_normalize=true",
)


def test_bypass_mode_rejects_in_the_update_and_divides_by_what_is_left(tmp_path):
    one_step = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    rules = (
        "actor_rollout_ref.actor.use_kl_loss=false",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2",
    )
    batches, metrics = step(tmp_path, *GRPO, *BYPASS, one_step, *rules, edit=shift((0, 0, 1.0), (5, 1, 1.0)))
    mask, advantages = batches["adv"].batch["response_mask"].bool(), batches["adv"].batch["advantages"]
    tokens = int(mask.sum())
    left = mask.clone()
    left[0, 0] = left[5, 1] = False
    # the ratio of what is left is 1: the loss is minus the mean advantage
    assert metrics["actor/pg_loss"] == pytest.approx(-float(advantages[left].mean()), abs=1e-5)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(2 / tokens)
    assert metrics["rollout_corr/kl"] == pytest.approx(-2 / tokens, abs=1e-5)


def test_a_mini_batch_that_bypass_mode_rejects_takes_no_step(tmp_path):
    def off(batch):
        batch["rollout_log_probs"] -= 1.0

    rules = (
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=2",
    )
    trainer = tiny_trainer(tmp_path, "trainer.total_training_steps=1", *GRPO, *BYPASS, *rules, reward_fn=varied)
    try:
        trainer.init_workers()
        before = trainer.actor_rollout_wg.get_fingerprint()
        trainer.checkpoint_manager.update_weights(0)
        real = trainer.async_rollout_manager.generate_sequences
        trainer.async_rollout_manager.generate_sequences = lambda gen_batch: edited(real(gen_batch), off)
        *_, (_, _, metrics) = trainer.step_through(next(iter(trainer.train_dataloader)))
        assert trainer.actor_rollout_wg.get_fingerprint() == before
    finally:
        trainer.close()
    assert metrics["actor/empty_mini_batches"] == 2
    assert metrics["actor/pg_loss"] == metrics["actor/grad_norm"] == 0
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 1


def test_a_run_in_bypass_mode_corrects_to_the_end_and_reports_it(tmp_path):
    lines = run(tmp_path, *GRPO, *WEIGHING, reward_fn=varied)
    assert len(lines) == 2
    names = ("kl", "k3_kl", "training_ppl", "rollout_ppl", "log_ppl_diff", "chi2_token", "chi2_seq")
    weights = ("mean", "max", "min", "std", "eff_sample_size", "bounded_fraction")
    expected = {*names, *(f"rollout_is_{name}" for name in weights)}
    expected |= {"rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction"}
    for line in lines:
        reported = {name: value for name, value in line.items() if name.startswith("rollout_corr/")}
        assert reported.keys() == {f"rollout_corr/{name}" for name in expected}
        assert all(math.isfinite(value) for value in reported.values())
        assert reported["rollout_corr/rollout_is_max"] > 1 > reported["rollout_corr/rollout_is_min"]  # the second step


@pytest.mark.parametrize("settings", [REJECTING, WEIGHING], ids=["ppo_clip", "reinforce"])
def test_micro_batches_do_not_change_the_numbers_of_bypass_mode(tmp_path, settings):
    _, recorded = train(tmp_path / "generates", *GRPO, steps=2)
    recorded = perturbed(recorded)
    expected, _ = train(tmp_path / "packed", *GRPO, *settings, recorded=recorded, steps=2)
    size = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    found, _ = train(tmp_path / "micro", *GRPO, *settings, size, recorded=recorded, steps=2)
    assert_same(found, expected, steps=2)


def test_two_ranks_over_ray_give_the_numbers_of_bypass_mode_on_one(tmp_path, ray_cluster):
    _, recorded = train(tmp_path / "generates", *GRPO, steps=2)
    recorded = perturbed(recorded)
    expected, _ = train(tmp_path / "local", *GRPO, *WEIGHING, recorded=recorded, steps=2, first=1)
    ray = ("trainer.worker_group=ray", "trainer.n_gpus_per_node=2")
    found, _ = train(tmp_path / "two", *GRPO, *WEIGHING, *ray, recorded=recorded, steps=2, first=1)
    assert_same(found, expected, steps=2)


def test_reinforce_in_bypass_mode_is_weighed_by_the_policy_over_the_rollout(tmp_path):
    """On policy L = -w A log pi, so that one token with weight 2 counts twice."""
    common = (
        *GRPO,
        *BYPASS,
        "actor_rollout_ref.actor.use_kl_loss=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "algorithm.rollout_correction.loss_type=reinforce",
        "algorithm.rollout_correction.rollout_is=token",
    )
    loss = {}
    for threshold in (3.0, 1.5):
        limit = f"algorithm.rollout_correction.rollout_is_threshold={threshold}"
        batches, metrics = step(tmp_path / str(threshold), *common, limit, edit=shift((0, 0, math.log(2))))
        batch = batches["adv"].batch
        kept = batch["response_mask"].bool()
        log_probs = batch["rollout_log_probs"].clone()
        log_probs[0, 0] += math.log(2)  # what the policy says
        weights = torch.ones_like(log_probs)
        weights[0, 0] = min(2.0, threshold)
        expected = -(weights * batch["advantages"] * log_probs)[kept].mean()
        loss[threshold] = metrics["actor/pg_loss"]
        assert loss[threshold] == pytest.approx(float(expected), abs=2e-5)
    assert loss[3.0] != loss[1.5]


def test_an_estimator_gets_the_sum_of_squared_probabilities_it_reads(tmp_path):
    batches, _ = step(tmp_path, "algorithm.adv_estimator=optimal_token_baseline", "trainer.checks=true")
    batch = batches["old_log_prob"].batch
    kept = batch["response_mask"].bool()
    squared = batch["sum_pi_squared"]
    assert (squared[~kept] == 0).all()
    assert (squared[kept] >= batch["old_log_probs"][kept].exp().square() - 1e-6).all()
    assert (squared[kept] <= 1).all()
    plain, _ = step(tmp_path / "plain", *GRPO)
    assert "sum_pi_squared" not in plain["old_log_prob"].tensor_keys()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.rollout_correction.rollout_is_threshold=2_1"], "lower bound 2 is not below 1"),
        (["algorithm.rollout_correction.rollout_rs=token_k9"], "unknown 'token_k9'"),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], "rollout_rs_threshold is not set"),
        (
            ["algorithm.rollout_correction.rollout_is=token", "actor_rollout_ref.rollout.calculate_log_probs=false"],
            "set actor_rollout_ref.rollout.calculate_log_probs=true",
        ),
        ([*BYPASS, "actor_rollout_ref.rollout.calculate_log_probs=false"], "bypass_mode=true compares"),
        ([*BYPASS, "algorithm.adv_estimator=optimal_token_baseline"], "needs the pass over the old log-probs"),
        ([*BYPASS, "actor_rollout_ref.actor.calculate_sum_pi_squared=true"], "calculate_sum_pi_squared=true needs"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=reinforce"], "bypass_mode=true, or loss_mode=vanilla"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=ppo_clip"], "bypass_mode=true, or loss_mode=vanilla"),
    ],
)
def test_what_cannot_work_is_told_at_load(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config(overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.rollout_correction.rollout_is_threshold=3"], "rollout_is_threshold has no effect"),
        (["algorithm.rollout_correction.loss_type=reinforce"], "bypass_mode is false"),
        ([*BYPASS, "algorithm.rollout_correction.rollout_is=token"], "the policy loss is ppo_clip"),
        (
            [
                *BYPASS,
                "algorithm.rollout_correction.loss_type=reinforce",
                "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
            ],
            "loss_mode is gspo",
        ),
    ],
)
def test_settings_of_a_correction_that_is_not_made_are_told_to_have_no_effect(overrides, said):
    assert any(said in line for line in load_config(overrides=overrides).notices)


def test_two_bounds_are_no_number_with_an_underscore():
    config = load_config(overrides=["algorithm.rollout_correction.rollout_is_threshold=0.5_2"])
    assert config.algorithm.rollout_correction.rollout_is_threshold == "0.5_2"
    assert load_config(overrides=["data.train_batch_size=1_024"]).data.train_batch_size == 1024


def test_rejection_needs_the_pass_that_auto_would_leave_out():
    auto = ("actor_rollout_ref.actor.recompute_old_log_probs=auto", "data.train_batch_size=256")
    assert not need_old_log_probs(load_config(overrides=auto))
    assert need_old_log_probs(load_config(overrides=[*auto, "algorithm.rollout_correction.rollout_is=token"]))
    assert need_old_log_probs(load_config(overrides=[*auto, "actor_rollout_ref.actor.calculate_sum_pi_squared=true"]))
