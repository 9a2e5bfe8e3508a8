"""Groups that teach nothing are replaced, greedy rollouts become baselines, reward columns become components."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from runs import GRPO, run, tiny_trainer

from ppo_lib.config import load_config
from ppo_lib.errors import ConfigError, RewardError, RolloutError, TooFewGroupsError
from ppo_lib.trainer.groups import join_generated, reward_column, take_baselines, varied_groups
from protocol import DataProto

FILTERED = (*GRPO, "algorithm.filter_groups.enable=true")


def only_odd_digits_differ(data_source, solution_str, ground_truth, extra_info=None):
    """All rollouts of an even digit score the same."""
    varies = sum(map(ord, solution_str)) % 17 / 17
    return {"score": varies if int(ground_truth[0]) % 2 else 0.5, "length": len(solution_str), "never": 1.0}


def stages_of(trainer, steps=1):
    """The batch after each stage of the last of some steps, and its metrics."""
    trainer.init_workers()
    trainer.checkpoint_manager.update_weights(0)
    for _ in range(steps):
        batches, metrics = {}, {}
        for stage, batch, so_far in trainer.step_through(next(iter(trainer.train_dataloader))):
            batches[stage], metrics = copy.deepcopy(batch), so_far
    return batches, metrics


@pytest.fixture
def closing():
    trainers = []

    def make(*args, **kwargs):
        trainers.append(tiny_trainer(*args, **kwargs))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


@pytest.mark.parametrize("gen_batch_size", [3, 4, 7])
def test_a_step_is_filled_with_prompts_whose_rollouts_differ(tmp_path, closing, gen_batch_size):
    size = f"data.gen_batch_size={gen_batch_size}"
    trainer = closing(tmp_path, *FILTERED, size, reward_fn=only_odd_digits_differ)
    batches, metrics = stages_of(trainer)
    assert list(batches)[:5] == ["dataloader", "gen", "balance", "reward", "old_log_prob"]
    assert len(batches["dataloader"]) == gen_batch_size
    batch = batches["adv"]
    assert len(batch) == 12
    assert batch.batch["prompt_row"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    digits = [int(rule["ground_truth"][0]) for rule in batch.non_tensor_batch["reward_model"]]
    assert all(digit % 2 for digit in digits)
    scores = batch.batch["token_level_scores"].sum(1).view(4, 3)
    assert (scores.max(1).values > scores.min(1).values).all()
    consumed = metrics["train/num_gen_batches"] * gen_batch_size
    assert trainer.train_dataloader.state_dict()["rows_seen"] == consumed
    kept = 4 + metrics["train/unused_groups"]
    assert metrics["train/constant_group_fraction"] == pytest.approx(1 - kept / consumed)
    assert metrics["train/num_gen_batches"] >= 2 or gen_batch_size == 7


def test_a_reward_function_of_the_whole_batch_scores_within_the_loop(tmp_path, closing):
    def of_the_batch(data):
        scores = torch.zeros(data.batch["responses"].shape)
        varies = [int(rule["ground_truth"][0]) % 2 for rule in data.non_tensor_batch["reward_model"]]
        scores[:, 0] = torch.tensor(varies) * data.batch["responses"].sum(1) % 13
        return scores

    batches, _ = stages_of(closing(tmp_path, *FILTERED, reward_fn=of_the_batch))
    digits = [int(rule["ground_truth"][0]) for rule in batches["adv"].non_tensor_batch["reward_model"]]
    assert all(digit % 2 for digit in digits)


def test_stepping_through_gives_the_numbers_of_fit_with_several_generation_batches_a_step(tmp_path, closing):
    settings = (*FILTERED, "trainer.total_training_steps=3")
    fitted = run(tmp_path / "fit", *settings, reward_fn=only_odd_digits_differ)
    trainer = closing(tmp_path / "stepped", *settings, reward_fn=only_odd_digits_differ)
    _, metrics = stages_of(trainer, steps=3)
    last = {name: value for name, value in fitted[-1].items() if name != "step"}
    assert {name: metrics[name] for name in last} == last
    assert sum(line["train/num_gen_batches"] for line in fitted) > 3


def test_a_resumed_run_goes_on_behind_the_last_generation_batch(tmp_path):
    # 5 generation batches an epoch, so that one is crossed within a step
    common = (
        *FILTERED,
        "data.gen_batch_size=3",
        "data.train_max_samples=15",
        "trainer.total_training_steps=4",
        "trainer.save_freq=2",
    )
    whole = run(tmp_path, *common, reward_fn=only_odd_digits_differ)
    assert whole[-1]["training/epoch"] > 0
    again = run(
        tmp_path,
        *common,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path / 'global_step_2'}",
        reward_fn=only_odd_digits_differ,
    )
    assert again == whole


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["algorithm.filter_groups.max_num_gen_batches=2", "data.gen_batch_size=2", "data.shuffle=false"],
            r"2 of 4 prompts .* 'reward', and a step needs 4: raise algorithm\.filter_groups\.max_num_gen_batches=2",
        ),
        (
            ["algorithm.filter_groups.metric=never", "data.train_max_samples=8"],  # no limit but the data
            r"0 of 8 prompts .* 'never', and a step needs 4: raise rollout\.n",
        ),
    ],
)
def test_too_few_groups_stop_the_run_with_what_to_change(tmp_path, closing, settings, said):
    trainer = closing(tmp_path, *FILTERED, *settings, reward_fn=only_odd_digits_differ)
    with pytest.raises(TooFewGroupsError, match=said):
        stages_of(trainer)


def test_a_metric_that_the_scorer_does_not_report_is_named(tmp_path, closing):
    trainer = closing(tmp_path, *FILTERED, "algorithm.filter_groups.metric=acc", reward_fn=only_odd_digits_differ)
    with pytest.raises(RewardError, match=r"filter_groups.metric names 'acc'.*reports length, never"):
        stages_of(trainer)


def generated(uids, scores, mask=None, **columns):
    mask = torch.ones(len(uids), 1, dtype=torch.int64) if mask is None else torch.tensor(mask)[:, None]
    order = list(dict.fromkeys(uids))
    return DataProto.from_dict(
        {
            "rm_scores": torch.tensor(scores, dtype=torch.float32)[:, None],
            "response_mask": mask,
            "prompt_row": torch.tensor([order.index(uid) for uid in uids]),
        },
        {"uid": np.array(uids, dtype=object), **{k: np.array(v, dtype=object) for k, v in columns.items()}},
        meta_info={"reward_extra_keys": list(columns), "epoch": 0},
    )


def test_groups_are_compared_by_uid_and_without_rollouts_that_say_nothing():
    data = generated(
        ["a", "b", "a", "b", "c", "c"], [1, 0, 1, 1, 0, 1], mask=[1, 1, 1, 1, 0, 1], acc=[0, 1, 1, 1, 0, 0]
    )
    assert varied_groups(data, "reward").tolist() == [False, True, False, True, False, False]
    assert varied_groups(data, "acc").tolist() == [True, False, True, False, False, False]
    data.non_tensor_batch["acc"][3] = None
    with pytest.raises(RewardError, match="None for row 3"):
        reward_column(data, "acc", "x")


def test_parts_are_joined_to_whole_prompts_counted_through():
    first = generated(["a", "a", "b", "b"], [1, 0, 1, 0], acc=[1, 0, 1, 0])
    second = generated(["d", "d", "c", "c"], [1, 0, 1, 0])
    second.meta_info["epoch"] = 1
    joined = join_generated([first, second], prompts=3)
    assert joined.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b", "d", "d"]
    assert joined.batch["prompt_row"].tolist() == [0, 0, 1, 1, 2, 2]
    assert joined.non_tensor_batch["acc"].tolist() == [1, 0, 1, 0, None, None]
    assert joined.meta_info["reward_extra_keys"] == ["acc"]


def test_parts_join_whatever_the_engine_says_of_its_work_on_each_and_one_may_be_empty():
    said = [{"rollout/spec_accept_rate": 0.5, "rollout/once": 2.0}, {"rollout/spec_accept_rate": 0.25}, {}]
    parts = [generated(list(uids), [1, 0, 1, 0]) for uids in ("aabb", "ccdd", "eeff")]
    for part, stats in zip(parts, said, strict=True):
        part.meta_info["rollout_stats"] = stats
        part.meta_info["timing"] = {"agent_loop/slowest/prompt_length": len(stats)}
    parts[1] = parts[1][torch.zeros(4, dtype=torch.bool)]
    joined = join_generated(parts, prompts=3)
    assert joined.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b", "e", "e"]
    assert joined.meta_info["rollout_stats"] == {"rollout/spec_accept_rate": 0.375, "rollout/once": 2.0}


# ---------------------------------------------------------------- remax


def test_greedy_scores_become_baselines_and_their_rows_leave():
    data = generated(["a", "a", "b", "b", "a", "b"], [1, 2, 3, 4, 5, 6])
    data.batch["greedy"] = torch.tensor([False, False, False, False, True, True])
    sampled = take_baselines(data)
    assert sampled.batch["reward_baselines"].tolist() == [5, 5, 6, 6]
    assert sampled.batch["reward_baselines"].dtype is torch.float32
    assert sampled.batch["rm_scores"][:, 0].tolist() == [1, 2, 3, 4]
    assert "greedy" not in sampled.tensor_keys()
    data.batch["greedy"][5] = False
    with pytest.raises(RolloutError, match="prompt 1 of the batch came back without its greedy response"):
        take_baselines(data)


def test_remax_compares_with_one_greedy_rollout_of_the_same_request(tmp_path, closing):
    remax = ("algorithm.adv_estimator=remax", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    trainer = closing(tmp_path, *remax, reward_fn=only_odd_digits_differ)
    requested = []
    trainer.init_workers()
    real = trainer.async_rollout_manager.generate_sequences

    def recording(gen_batch):
        requested.append(real(gen_batch))
        return copy.deepcopy(requested[-1])

    trainer.async_rollout_manager.generate_sequences = recording
    trainer.checkpoint_manager.update_weights(0)
    batches = {
        stage: copy.deepcopy(batch) for stage, batch, _ in trainer.step_through(next(iter(trainer.train_dataloader)))
    }
    (request,) = requested
    assert request.batch["greedy"].tolist() == [False] * 12 + [True] * 4
    assert len(batches["gen"]) == 12
    batch = batches["adv"].batch
    greedy_scores = request.batch["rm_scores"][12:].sum(1)
    torch.testing.assert_close(batch["reward_baselines"], greedy_scores.repeat_interleave(3))
    scores, kept = batch["token_level_scores"].sum(1), batch["response_mask"].bool()
    expected = torch.where(kept, (scores - batch["reward_baselines"])[:, None], 0)
    torch.testing.assert_close(batch["advantages"], expected)
    # greedy: the same prompt again gives the same tokens, whatever its seed
    again = trainer._rollouts(trainer._get_gen_batch(again_batch(trainer)))
    greedy = again.batch["greedy"]
    rows = greedy.nonzero().flatten()[:2]
    assert torch.equal(again.batch["responses"][rows[0]], again.batch["responses"][rows[1]])


def of_the_batch(data):
    """The scorer above as a function of the whole batch, in whose steps the greedy rows are scored with the rest."""
    scores = torch.zeros(data.batch["responses"].shape)
    digits = [int(rule["ground_truth"][0]) for rule in data.non_tensor_batch["reward_model"]]
    varies = data.batch["responses"].sum(1) % 17 / 17
    last = data.batch["response_mask"].sum(1) - 1
    scores[torch.arange(len(data)), last] = torch.where(torch.tensor(digits) % 2 == 1, varies, 0.5)
    return scores


@pytest.mark.parametrize("reward_fn", [only_odd_digits_differ, of_the_batch])
def test_remax_keeps_the_baselines_of_the_groups_that_a_filter_keeps(tmp_path, closing, reward_fn):
    settings = ("algorithm.adv_estimator=remax", "algorithm.filter_groups.enable=true", "data.gen_batch_size=3")
    trainer = closing(tmp_path, *settings, "trainer.checks=true", reward_fn=reward_fn)
    scored = []
    trainer.init_workers()
    real = trainer._scored

    def recording(batch):
        scored.append(copy.deepcopy(real(batch)))
        return copy.deepcopy(scored[-1])

    trainer._scored = recording
    trainer.checkpoint_manager.update_weights(0)
    stages = trainer.step_through(next(iter(trainer.train_dataloader)))
    batches = {stage: (copy.deepcopy(batch), metrics) for stage, batch, metrics in stages}
    greedy = [rows[rows.batch["greedy"]] for rows in scored if "greedy" in rows.tensor_keys()]
    assert len(greedy) == batches["gen"][1]["train/num_gen_batches"] >= 2
    baselines = {
        uid: score
        for rows in greedy
        for uid, score in zip(rows.non_tensor_batch["uid"], rows.batch["rm_scores"].sum(1).tolist(), strict=True)
    }
    assert len(baselines) == 3 * len(greedy)
    data = batches["adv"][0]
    batch, uids = data.batch, data.non_tensor_batch["uid"]
    assert len(batch) == 12
    assert "greedy" not in data.tensor_keys()
    assert batch["reward_baselines"].tolist() == [baselines[uid] for uid in uids]
    assert batch["reward_baselines"].view(4, 3).std() > 0  # prompts have baselines of their own
    scores, kept = batch["token_level_scores"].sum(1), batch["response_mask"].bool()
    assert (scores.view(4, 3).std(dim=1) > 0).all()
    torch.testing.assert_close(batch["advantages"], torch.where(kept, (scores - batch["reward_baselines"])[:, None], 0))


def test_a_run_of_remax_with_a_filter_reaches_its_end_and_is_resumed(tmp_path):
    settings = (
        "algorithm.adv_estimator=remax",
        "algorithm.filter_groups.enable=true",
        "data.gen_batch_size=3",
        "trainer.total_training_steps=3",
        "trainer.save_freq=2",
    )
    whole = run(tmp_path, *settings, reward_fn=only_odd_digits_differ)
    assert len(whole) == 3
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'global_step_2'}")
    assert run(tmp_path, *settings, *resume, reward_fn=only_odd_digits_differ) == whole


def again_batch(trainer):
    """A batch with its first prompt twice, as rows of different seeds."""
    trainer.checkpoint_manager.update_weights(1)
    batch_dict = trainer.train_dataloader.next_batch()
    for key in ("input_ids", "attention_mask", "position_ids"):
        batch_dict[key][1] = batch_dict[key][0]
    return trainer._load_batch(batch_dict, 0, 1)


# ---------------------------------------------------------------- gdpo


def parts(data_source, solution_str, ground_truth, extra_info=None):
    first = float(ord(solution_str[0]) % 5 if solution_str else 0)
    return {"score": first + len(solution_str), "first": first, "length": float(len(solution_str))}


def test_gdpo_normalises_the_named_columns_and_weighs_them(tmp_path, closing):
    keys = "algorithm.gdpo_reward_keys=[first,length]"
    settings = ("algorithm.adv_estimator=gdpo", keys)
    even = stages_of(closing(tmp_path / "even", *settings, reward_fn=parts))[0]["adv"]
    weighed = "algorithm.gdpo_reward_weights=[1.0,0.0]"
    first = stages_of(closing(tmp_path / "first", *settings, weighed, reward_fn=parts))[0]["adv"]
    values = torch.tensor([float(value) for value in first.non_tensor_batch["first"]]).view(4, 3)
    centred = (values - values.mean(1, keepdim=True)).flatten()
    advantages, kept = first.batch["advantages"], first.batch["response_mask"].bool()
    last = (kept.long().sum(1) - 1).clamp(min=0)
    of_rows = advantages[torch.arange(12), last]
    differing = centred != 0
    assert differing.any()
    # whitening shifts by the mean over tokens and keeps the order within a group
    for group in range(4):
        at = slice(3 * group, 3 * group + 3)
        if differing[at].any():
            assert torch.equal(of_rows[at].argsort(stable=True), centred[at].argsort(stable=True))
    assert not torch.allclose(even.batch["advantages"], advantages)


def test_a_component_that_the_scorer_does_not_report_is_named(tmp_path, closing):
    settings = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[first,format]")
    with pytest.raises(RewardError, match=r"gdpo_reward_keys names 'format'.*reports first, length"):
        stages_of(closing(tmp_path, *settings, reward_fn=parts))


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.gen_batch_size=8"], "leave gen_batch_size out"),
        (["algorithm.filter_groups.enable=true"], "set actor_rollout_ref.rollout.n to 2"),
        (
            [
                "algorithm.filter_groups.enable=true",
                "actor_rollout_ref.rollout.n=2",
                "data.train_batch_size=8",
                "actor_rollout_ref.actor.ppo_mini_batch_size=8",
                "data.gen_batch_size=3",
                "algorithm.filter_groups.max_num_gen_batches=2",
            ],
            "set max_num_gen_batches to 3",
        ),
        (
            [
                *("algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=2"),
                *("algorithm.filter_groups.metric=seq_final_reward", "algorithm.use_kl_in_reward=true"),
            ],
            "set metric=seq_reward",
        ),
        (
            [
                "algorithm.adv_estimator=gdpo",
                "algorithm.gdpo_reward_keys=[a,b]",
                "algorithm.gdpo_reward_weights=[1]",
            ],
            "give one for each",
        ),
        (["algorithm.kl_penalty=full"], "logits of policy and reference"),
        (
            ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full+"],
            "logits of policy and reference",
        ),
    ],
)
def test_what_cannot_work_is_told_at_load(overrides, said):
    with pytest.raises(ConfigError, match=said):
        load_config(overrides=overrides)


def test_gdpo_without_columns_is_told_that_it_has_one_reward():
    assert any(
        "gdpo_reward_keys is empty" in line for line in load_config(overrides=["algorithm.adv_estimator=gdpo"]).notices
    )
    assert not any("gdpo" in line for line in load_config(overrides=["algorithm.adv_estimator=grpo"]).notices)


def test_filter_settings_without_the_filter_are_told_to_have_no_effect():
    config = load_config(overrides=["algorithm.filter_groups.metric=acc"])
    assert any("filter_groups.metric has no effect" in line for line in config.notices)
