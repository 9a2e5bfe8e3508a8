"""What `fit()` promises: the order of a step, the names of its metrics, repeatability, resuming, the exported model."""

from __future__ import annotations

import json

import pytest
import torch
from runs import GRPO, PPO, metrics_of, run, tiny_trainer

from ppo_lib.errors import CheckpointCorruptError, ConfigError, PPOLibError

PPO_STAGES = [
    "dataloader", "gen", "balance", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor",
    "save_checkpoint", "update_weights", "testing",
]  # fmt: skip


def test_a_step_runs_its_stages_in_order_and_logs_the_names_dashboards_know(tmp_path):
    stages, rows = [], []
    trainer = tiny_trainer(
        tmp_path,
        *PPO,
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=true",
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
    )
    try:
        trainer.init_workers()
        trainer.fit(on_stage=lambda stage, batch, metrics: (stages.append(stage), rows.append(len(batch))))
    finally:
        trainer.close()
    assert stages == PPO_STAGES
    assert rows == [4] + [12] * 12  # P prompts, then B = P * n rows
    before, step = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert before["step"] == 0
    assert step["step"] == 1
    source = next(name for name in before if name.startswith("val-core/"))
    assert source in step  # validation in the same line as the step
    expected = (
        [f"timing_s/{s}" for s in PPO_STAGES if s not in ("dataloader", "balance")]
        + [
            f"critic/{v}/{s}"
            for v in ("score", "rewards", "advantages", "returns", "values")
            for s in ("mean", "max", "min")
        ]
        + ["critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr"]
        + ["critic/vf_explained_var", "actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff"]
        + [
            f"actor/{n}"
            for n in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm", "lr")
        ]
        + [f"{w}_length/{s}" for w in ("response", "prompt") for s in ("mean", "max", "min", "clip_ratio")]
        + ["response/aborted_ratio", "num_turns/mean", "training/global_step", "training/epoch"]
        + [f"perf/{n}" for n in ("total_num_tokens", "time_per_step", "throughput", "cpu_memory_used_gb")]
        + [f"global_seqlen/{n}" for n in ("min", "max", "minmax_diff", "balanced_min", "balanced_max", "mean")]
        + [f"training/rollout_probs_diff_{n}" for n in ("max", "mean", "std")]
        + ["timing_per_token_ms/gen", "timing_per_token_ms/update_actor"]
    )
    assert [name for name in expected if name not in step] == []
    assert step["training/rollout_probs_diff_max"] < 1e-4  # the engine and the trainer agree in fp32
    assert len((tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()) == 12


def test_two_runs_with_one_seed_give_the_same_metrics_and_another_seed_does_not(tmp_path):
    first = run(tmp_path / "a", *GRPO)
    assert run(tmp_path / "b", *GRPO) == first
    assert run(tmp_path / "c", *GRPO, "trainer.seed=7") != first


@pytest.mark.parametrize("algorithm", [PPO, GRPO], ids=["ppo", "grpo"])
def test_a_resumed_run_gives_the_metrics_of_the_uninterrupted_one(tmp_path, algorithm):
    # 3 steps an epoch: the save at step 3 is one at an epoch's end
    schedule = (
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=2",
    )
    common = (
        *algorithm,
        *schedule,
        "data.train_max_samples=12",
        "trainer.total_training_steps=5",
        "trainer.save_freq=1",
    )
    whole = run(tmp_path / "whole", *common)
    assert [line["step"] for line in whole] == [1, 2, 3, 4, 5]
    for stop in (2, 3):
        folder = tmp_path / f"stopped{stop}"
        trainer = tiny_trainer(folder, *common)
        try:
            trainer.init_workers()
            with pytest.raises(KeyboardInterrupt):
                trainer.fit(on_stage=stop_after(stop))
        finally:
            trainer.close()
        resumed = run(folder, *common, "trainer.resume_mode=auto")
        assert resumed == whole


def test_two_ranks_over_ray_resume_with_the_metrics_of_the_uninterrupted_run(tmp_path, ray_cluster):
    common = (*PPO, "trainer.worker_group=ray", "trainer.n_gpus_per_node=2", "trainer.total_training_steps=3")
    whole = run(tmp_path, *common, "trainer.save_freq=2")
    again = run(
        tmp_path, *common, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'global_step_2'}"
    )
    assert [line["step"] for line in again] == [1, 2, 3]
    assert again == whole


def test_a_validation_reward_of_its_own_takes_the_place_of_the_configured_scorer(tmp_path):
    def always_half(data_source, solution_str, ground_truth, extra_info=None):
        return 0.5

    (line,) = run(tmp_path, *GRPO, "trainer.val_only=true", "reward.timeout_s=30", val_reward_fn=always_half)
    assert line["val-core/repeat-digit/reward/mean@1"] == 0.5
    assert not any("/acc/" in name for name in line)  # what the configured scorer would have added


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("trainer.critic_warmup=2",), "leaves the policy none to learn in"),
        (("actor_rollout_ref.model.override_config.max_position_embeddings=8",), "positions; lower one of them by"),
    ],
)
def test_what_only_model_and_data_can_tell_is_told_before_workers_start(tmp_path, overrides, says):
    with pytest.raises(ConfigError, match=says):
        tiny_trainer(tmp_path, *PPO, *overrides)


def stop_after(step):
    """A stage hook that interrupts the run in the middle of the step after `step`."""

    def hook(stage, batch, metrics):
        if stage == "update_actor" and metrics["training/global_step"] == step + 1:
            raise KeyboardInterrupt

    return hook


def test_resuming_at_the_last_step_trains_nothing(tmp_path):
    run(tmp_path, *GRPO, "trainer.save_freq=1")
    before = metrics_of(tmp_path)
    again = run(tmp_path, *GRPO, "trainer.save_freq=1", "trainer.resume_mode=auto")
    assert again == before


def test_a_damaged_checkpoint_is_refused_before_workers_start(tmp_path):
    run(tmp_path, *GRPO, "trainer.save_freq=2")
    victim = next((tmp_path / "global_step_2" / "actor").rglob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-10])
    with pytest.raises(CheckpointCorruptError, match=victim.name):
        tiny_trainer(tmp_path, *GRPO, "trainer.resume_mode=auto")


@pytest.mark.parametrize("file", ["data.pt", "trainer_state.json"])
def test_damage_that_keeps_a_file_s_size_is_named_when_it_is_read(tmp_path, file):
    run(tmp_path, *GRPO, "trainer.save_freq=2")
    victim = tmp_path / "global_step_2" / file
    size = victim.stat().st_size
    victim.write_bytes(b"{}".ljust(size) if file.endswith("json") else bytes(size))
    assert_refused(tmp_path, "global_step_2")


def test_a_model_with_fewer_layers_than_the_checkpoint_is_refused(tmp_path):
    run(tmp_path, *GRPO, "trainer.save_freq=2")
    shallow = "actor_rollout_ref.model.override_config.num_hidden_layers=1"
    assert_refused(tmp_path, r"holds \d+ tensors that this model does not have", shallow)


def assert_refused(folder, says, *overrides):
    """Resuming ends in a `CheckpointCorruptError` with this message."""
    resume = ("trainer.resume_mode=auto", "trainer.total_training_steps=3")
    trainer = tiny_trainer(folder, *GRPO, *resume, *overrides)
    try:
        trainer.init_workers()
        with pytest.raises(CheckpointCorruptError, match=says):
            trainer.fit()
    finally:
        trainer.close()


def test_fit_before_init_workers_says_what_to_call(tmp_path):
    with pytest.raises(PPOLibError, match="call init_workers"):
        tiny_trainer(tmp_path, *GRPO).fit()


def test_the_exported_model_loads_in_transformers_with_the_same_logits(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = tiny_trainer(tmp_path, *GRPO, "trainer.save_freq=2")
    try:
        trainer.init_workers()
        trainer.fit()
        ours = trainer.actor_rollout_wg.full_state_dict()[0]
    finally:
        trainer.close()
    folder = tmp_path / "global_step_2" / "actor" / "huggingface"
    model, fresh = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    missing, unexpected = fresh.load_state_dict(ours, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == "<eos>"
    ids = torch.tensor([tokenizer("7:7777", add_special_tokens=False).input_ids])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, fresh(ids).logits)


def test_val_only_validates_and_stops_whatever_the_other_switches_say(tmp_path):
    lines = run(tmp_path, *GRPO, "trainer.val_only=true", "trainer.val_before_train=false")
    assert [line["step"] for line in lines] == [0]
    assert all(name == "step" or name.startswith("val-") for name in lines[0])


def test_critic_warmup_trains_the_critic_alone(tmp_path):
    lines = run(tmp_path, *PPO, "trainer.critic_warmup=1", "trainer.save_freq=1")
    assert [("actor/pg_loss" in line, "critic/vf_loss" in line) for line in lines] == [(False, True), (True, True)]
    assert (tmp_path / "global_step_1" / "actor").is_dir()  # a checkpoint during warm-up too


def test_auto_leaves_out_the_pass_that_one_optimizer_step_makes_redundant(tmp_path):
    one_step = (*GRPO, "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    always = run(tmp_path / "always", *one_step)
    auto = run(tmp_path / "auto", *one_step, "actor_rollout_ref.actor.recompute_old_log_probs=auto")
    for ours, theirs in zip(auto, always):
        assert not any(name.startswith("training/rollout_probs_diff") for name in ours)
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7)


def test_a_reward_function_given_to_the_trainer_is_used_instead_of_the_configured_one(tmp_path):
    def shorter_is_better(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": -float(len(solution_str)), "chars": len(solution_str)}

    def batch_at_once(data, return_dict=False):
        lengths = data.batch["response_mask"].sum(-1)
        scores = torch.zeros(data.batch["responses"].shape)
        scores[:, -1] = -lengths.float()  # on padding: the trainer moves it to the last policy token
        return {"reward_tensor": scores, "reward_extra_info": {"chars": lengths.tolist()}} if return_dict else scores

    for name, reward_fn in {"sample": shorter_is_better, "batch": batch_at_once}.items():
        lines = run(tmp_path / name, *GRPO, "trainer.test_freq=2", reward_fn=reward_fn)
        assert all(line["critic/score/mean"] < 0 for line in lines)
        assert lines[-1]["val-core/repeat-digit/reward/mean@1"] < 0
        assert "val-aux/repeat-digit/chars/mean@1" in lines[-1]


def test_kl_in_the_reward_and_in_the_loss_act_together(tmp_path):
    both = (*PPO, "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=k3+")
    first, second = run(tmp_path / "both", *both)
    assert first["actor/reward_kl_penalty_coeff"] == 0.01
    assert second["actor/reward_kl_penalty"] != 0  # the policy has left the reference
    assert second["critic/rewards/mean"] != second["critic/score/mean"]
    assert second["actor/kl_loss"] > 0
    reward_only = run(tmp_path / "reward", *PPO)
    assert "actor/kl_loss" not in reward_only[-1]
    assert reward_only[-1]["actor/pg_loss"] != second["actor/pg_loss"]  # the loss's KL moved the policy elsewhere
