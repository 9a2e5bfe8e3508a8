"""Keys that launch scripts bring along: renamed, divided, ignored with a line, or refused with a reason."""

from __future__ import annotations

import shlex

import pytest
from launch_line import LAUNCH_LINE

from ppo_lib.config import load_config
from ppo_lib.errors import ConfigError


def at(config, key):
    for name in key.split("."):
        config = getattr(config, name)
    return config


def test_a_launch_line_loads_as_it_stands():
    config = load_config(overrides=shlex.split(LAUNCH_LINE))
    assert config.actor_rollout_ref.actor.optim.lr == 1e-6
    assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 4
    assert config.critic.ppo_micro_batch_size_per_gpu == 32
    assert config.trainer.logger == ("console", "wandb")
    assert len(config.notices) == 3  # two renamed, one (named twice) ignored


def test_a_launch_line_fits_a_small_machine_with_a_few_replacements():
    small = [
        "actor_rollout_ref.rollout.name=hf",
        "trainer.n_gpus_per_node=1",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=4",
    ]
    notices = load_config(overrides=[*shlex.split(LAUNCH_LINE), *small]).notices
    assert any("tensor_model_parallel_size has no effect" in line for line in notices)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("critic.model.fsdp_config.param_offload=True", "critic.fsdp.param_offload", True),
        (
            "actor_rollout_ref.actor.optim.warmup_style=cosine",
            "actor_rollout_ref.actor.optim.lr_scheduler_type",
            "cosine",
        ),
        ("critic.optim.warmup_style=cosine", "critic.optim.lr_scheduler_type", "cosine"),
        ("custom_reward_function.path=r.py", "reward.custom_reward_function.path", "r.py"),
        ("custom_reward_function.name=f", "reward.custom_reward_function.name", "f"),
        ("custom_reward_function.reward_kwargs.a=1", "reward.custom_reward_function.reward_kwargs", {"a": 1}),
        ("reward_model.num_workers=3", "reward.num_workers", 3),
        ("reward_model.reward_manager=naive", "reward.reward_manager.name", "naive"),
        (
            "reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
            "reward.reward_kwargs",
            {"overlong_buffer_cfg": {"len": 4}},
        ),
        ("actor_rollout_ref.actor.rollout_n=4", "actor_rollout_ref.rollout.n", 4),
        ("critic.rollout_n=4", "actor_rollout_ref.rollout.n", 4),
        ("actor_rollout_ref.model.torch_dtype=bfloat16", "actor_rollout_ref.actor.fsdp_config.model_dtype", "bfloat16"),
        ("data.tokenizer=t", "actor_rollout_ref.model.tokenizer_path", "t"),
        ("data.trust_remote_code=True", "actor_rollout_ref.model.trust_remote_code", True),
    ],
)
def test_an_older_spelling_reaches_the_same_place(override, key, value):
    config = load_config(overrides=[override])
    assert at(config, key) == value
    assert any(line.startswith(override.split("=")[0]) and key in line for line in config.notices)


def test_an_older_spelling_left_null_is_dropped():
    config = load_config(overrides=["actor_rollout_ref.actor.optim.warmup_style=null", "reward_model.enable=null"])
    assert config == load_config()


def test_both_spellings_must_agree():
    both = ["critic.rollout_n=4", "actor_rollout_ref.rollout.n={}"]
    assert load_config(overrides=[both[0], both[1].format(4)]).actor_rollout_ref.rollout.n == 4
    with pytest.raises(
        ConfigError, match=r"critic\.rollout_n is an older name of actor_rollout_ref\.rollout\.n.*4 .*and 5"
    ):
        load_config(overrides=[both[0], both[1].format(5)])


def test_a_wrong_value_under_an_older_name_is_placed():
    with pytest.raises(
        ConfigError, match=r"critic\.fsdp\.param_offload: .*override critic\.model\.fsdp_config\.param_offload"
    ):
        load_config(overrides=["critic.model.fsdp_config.param_offload=maybe"])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("actor_rollout_ref.actor.ppo_micro_batch_size", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.ref.log_prob_micro_batch_size", "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"),
        (
            "actor_rollout_ref.rollout.log_prob_micro_batch_size",
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
        ),
        ("critic.ppo_micro_batch_size", "critic.ppo_micro_batch_size_per_gpu"),
        ("critic.forward_micro_batch_size", "critic.forward_micro_batch_size_per_gpu"),
    ],
)
def test_rows_over_all_ranks_become_rows_per_rank(old, new):
    ranks = ["trainer.n_gpus_per_node=4", "trainer.nnodes=2"]
    config = load_config(overrides=[*ranks, f"{old}=64"])
    assert at(config, new) == 8
    assert f"{old}=64 over 8 ranks is read as {new}=8" in config.notices
    with pytest.raises(ConfigError, match="are both set"):
        load_config(overrides=[*ranks, f"{old}=64", f"{new}=8"])
    with pytest.raises(ConfigError, match="expected an integer, got 'x'"):
        load_config(overrides=[f"{old}=x"])


@pytest.mark.parametrize(
    "override",
    [
        "actor_rollout_ref.model.use_remove_padding=True",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.rollout.multi_turn.format=hermes",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.ref.profiler.tool_config.x=1",
        "global_profiler.steps=[1]",
        "trainer.v1.x=1",
        "reward_model.micro_batch_size_per_gpu=4",
        "data.return_multi_modal_inputs=true",
        "actor_rollout_ref.actor.freeze_vision_tower=true",
        "reward_model.rollout.name=x",
        "hydra.run.dir=x",
    ],
)
def test_an_ignored_key_gets_one_line(override):
    config = load_config(overrides=[override])
    key = override.split("=")[0]
    assert len(config.notices) == 1
    assert config.notices[0].startswith(f"{key} is ignored: ")
    assert config == load_config()


@pytest.mark.parametrize(
    ("override", "harmless"),
    [
        ("actor_rollout_ref.model.lora.type=canonical_lora", "lora"),
        ("critic.model.lora.dropout=0.1", "0.0"),
        ("actor_rollout_ref.actor.strategy=megatron", "fsdp2"),
        ("critic.strategy=megatron", "fsdp"),
        ("actor_rollout_ref.rollout.mode=other", "async"),
        ("actor_rollout_ref.rollout.multi_turn.enable=True", "False"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path=t.yaml", "null"),
        ("actor_rollout_ref.rollout.data_parallel_size=2", "1"),
        ("actor_rollout_ref.rollout.over_sample_rate=0.1", "0.0"),
        ("actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.x=1", "null"),
        ("actor_rollout_ref.hybrid_engine=False", "True"),
        ("actor_rollout_ref.actor.checkpoint.async_save=True", "False"),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32", "null"),
        ("algorithm.filter_groups.max_inflight_gen_batches=2", "1"),
        ("algorithm.use_pf_ppo=True", "False"),
        ("reward_model.enable=True", "False"),
        ("reward.reward_model.enable=True", "False"),
        ("reward.sandbox_fusion.url=http://x", "null"),
        ("distillation.enabled=True", "False"),
        ("trainer.use_v1=True", "False"),
        ("trainer.default_hdfs_dir=hdfs://x", "null"),
        ("trainer.checkpoint_callback_class=x", "null"),
        ("defaults=[x]", "null"),
    ],
)
def test_a_refused_key_says_why_unless_it_asks_for_nothing(override, harmless):
    key = override.partition("=")[0]
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=[override])
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert "not there yet" in text or len(text.partition(": ")[2]) > 10
    assert f"(override {override})" in text
    config = load_config(overrides=[f"{key}={harmless}"])
    assert config == load_config()
    assert len([line for line in config.notices if "change" in line]) == 1


def test_true_does_not_stand_for_one():
    with pytest.raises(ConfigError, match="data_parallel_size=True"):
        load_config(overrides=["actor_rollout_ref.rollout.data_parallel_size=true"])


def test_gen_batch_size_may_say_what_the_batch_size_says():
    load_config(overrides=["data.train_batch_size=512", "data.gen_batch_size=512"])


def test_every_refused_key_is_listed():
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=["trainer.use_v1=true", "actor_rollout_ref.model.lora.type=x"])
    assert len(str(caught.value).splitlines()) == 2


def test_keys_of_one_kind_share_a_line():
    notices = load_config(overrides=["reward_model.rollout.a=1", "reward_model.rollout.b=2"]).notices
    assert notices == (
        "reward_model.rollout.a, reward_model.rollout.b are ignored: scoring with a reward model is not there yet",
    )


def test_open_dictionaries_pass_through_whatever_the_table_says():
    config = load_config(
        overrides=[
            "actor_rollout_ref.rollout.engine_kwargs.sglang.use_torch_compile=true",
            "actor_rollout_ref.rollout.name=sglang",
            "actor_rollout_ref.model.override_config.strategy=x",
            "actor_rollout_ref.actor.optim.override_optimizer_config={fused: true}",
            "critic.optim.override_optimizer_config=null",
            "reward.reward_kwargs.use_liger=1",
            "ray_kwargs.ray_init.runtime_env.py_executable=python3",
            "ray_kwargs.ray_init.log_to_driver=false",
        ]
    )
    assert config.actor_rollout_ref.rollout.engine_kwargs.sglang == {"use_torch_compile": True}
    assert config.actor_rollout_ref.model.override_config == {"strategy": "x"}
    assert config.actor_rollout_ref.actor.optim.override_optimizer_config == {"fused": True}
    assert config.critic.optim.override_optimizer_config == {}
    assert config.reward.reward_kwargs == {"use_liger": 1}
    assert config.ray_kwargs.ray_init.model_extra == {
        "runtime_env": {"py_executable": "python3"},
        "log_to_driver": False,
    }
    assert config.notices == ()
