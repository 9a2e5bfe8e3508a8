"""What a mistake in a configuration says: the key, what stands there, where, and the nearest right thing."""

from __future__ import annotations

import pytest

from ppo_lib.config import PPOConfig, load_config
from ppo_lib.errors import ConfigError


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        # unknown section and key, with the nearest right one
        ("trainr.seed=1", "unknown key trainr (override trainr.seed=1); did you mean trainer?"),
        (
            "trainer.total_epoch=1",
            "unknown key trainer.total_epoch (override trainer.total_epoch=1); did you mean trainer.total_epochs?",
        ),
        ("total_epochs=1", "did you mean trainer.total_epochs?"),
        ("actor_rollout_ref.actor.lr=1", "did you mean actor_rollout_ref.actor.optim.lr?"),
        ("trainer.xyzzy=1", "unknown key trainer.xyzzy (override trainer.xyzzy=1)"),
        # unknown value
        (
            "data.truncation=lef",
            "data.truncation: 'lef' is not one of error, left, right, middle (override data.truncation=lef);"
            " did you mean left?",
        ),
        ("trainer.resume_mode=path", "'path' is not one of disable, auto, resume_path"),
        ("actor_rollout_ref.rollout.name=vllm", "'vllm' is not one of auto, hf, sglang"),
        ("trainer.logger=[console,swanlab]", "'swanlab' is not one of console, tensorboard, file, wandb, mlflow"),
        (
            "algorithm.adv_estimator=grop",
            "algorithm.adv_estimator: unknown advantage estimator 'grop': did you mean 'grpo'?",
        ),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanila", "did you mean 'vanilla'?"),
        (
            "actor_rollout_ref.actor.loss_agg_mode=token-men",
            "unknown loss aggregation mode 'token-men': did you mean 'token-mean'?",
        ),
        ("actor_rollout_ref.actor.kl_loss_type=k9", "actor_rollout_ref.actor.kl_loss_type: unknown KL estimator 'k9'"),
        ("algorithm.kl_penalty=low_var_k", "did you mean 'low_var_kl'?"),
        # wrong type
        ("trainer.total_epochs=many", "trainer.total_epochs: expected an integer, got 'many'"),
        ("trainer.total_epochs=1.5", "trainer.total_epochs: expected an integer, got 1.5"),
        ("trainer.total_epochs=true", "trainer.total_epochs: expected a number, got True"),
        ("trainer.total_training_steps=true", "trainer.total_training_steps: expected a number, got True"),
        ("trainer.total_epochs=null", "trainer.total_epochs: expected an integer, got None"),
        ("trainer.total_epochs=", "trainer.total_epochs: expected an integer, got ''"),
        ("trainer.total_epochs=[1]", "trainer.total_epochs: expected an integer, got [1]"),
        ("trainer.val_only=3", "trainer.val_only: expected true or false, got 3"),
        ("actor_rollout_ref.actor.optim.lr=fast", "expected a number, got 'fast'"),
        ("actor_rollout_ref.actor.optim.betas=[0.9]", "actor_rollout_ref.actor.optim.betas"),
        ("trainer.experiment_name={a: 1}", "trainer.experiment_name: expected text, got {'a': 1}"),
        ("trainer=3", "trainer: expected a section, got 3"),
        # negative and zero sizes
        ("data.train_batch_size=0", "data.train_batch_size: input should be greater than or equal to 1, got 0"),
        ("data.train_batch_size=-8", "got -8"),
        ("actor_rollout_ref.rollout.n=0", "actor_rollout_ref.rollout.n"),
        (
            "actor_rollout_ref.rollout.temperature=0",
            "actor_rollout_ref.rollout.temperature: input should be greater than 0",
        ),
        ("trainer.n_gpus_per_node=0", "trainer.n_gpus_per_node"),
        ("trainer.save_freq=-5", "trainer.save_freq"),
        ("critic.optim.lr=-1e-5", "critic.optim.lr"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=0", "ppo_micro_batch_size_per_gpu"),
        ("actor_rollout_ref.model.path=", "actor_rollout_ref.model.path"),
        # not an override
        ("trainer.seed", "'trainer.seed' is not an override"),
        ("~trainer.seed=1", "is not an override"),
        ("trainer..seed=1", "is not an override"),
        ("trainer.seed=[1", "override 'trainer.seed=[1':1:3: not valid YAML"),
        ("data.max_prompt_length.x=1", "data.max_prompt_length: expected an integer, got {'x': 1}"),
    ],
)
def test_one_mistake_one_sentence(override, says):
    text = message(override)
    assert says in text
    assert len(text.splitlines()) == 1


def test_every_mistake_is_listed():
    text = message("trainer.sed=1", "trainer.nnodes=x", "data.truncation=lef", "algorithm.adv_estimator=grop")
    assert [line.split(":")[0].split(" (")[0] for line in text.splitlines()] == [
        "data.truncation",
        "algorithm.adv_estimator",
        "trainer.nnodes",
        "unknown key trainer.sed",
    ]


def test_an_override_below_a_value_says_so():
    text = message("trainer.logger=console", "trainer.logger.file=true")
    assert "trainer.logger is the value 'console' (override trainer.logger=console), no section" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainer:\n  seed: 1\n   nnodes: 2\n", ":3:10: not valid YAML"),
        ("trainer: {seed: 1\n", ":2:1: not valid YAML"),
        ("trainer:\n\tseed: 1\n", ":2:1: not valid YAML: found character '\\t'"),
        ("trainer:\n  seed: 1\n\ntrainer:\n  nnodes: 1\n", ":4: trainer is given twice, first in line 1"),
        ("- trainer\n", "expected sections such as"),
        ("data:\n  seed: 1\n  shufle: true\n", "unknown key data.shufle ({file}:3); did you mean data.shuffle?"),
        ("data:\n  seed: one\n", "data.seed: expected an integer, got 'one' ({file}:2)"),
        ("data:\n  seed: 1\nalgorithm:\n  adv_estimator: grop\n", "known are gae, gdpo, gpg, grpo"),
        ("datas:\n  seed: 1\n", "unknown key datas ({file}:1); did you mean data?"),
    ],
)
def test_a_mistake_in_a_file_names_file_and_line(tmp_path, text, says):
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert str(file) in str(caught.value)
    assert says.format(file=file) in str(caught.value)


def test_a_mistake_in_a_base_names_the_base(tmp_path):
    (tmp_path / "base.yaml").write_text("trainer:\n  seed: x\n")
    (tmp_path / "run.yaml").write_text("base: base.yaml\ntrainer:\n  nnodes: y\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    assert f"trainer.seed: expected an integer, got 'x' ({tmp_path}/base.yaml:2)" in str(caught.value)
    assert f"trainer.nnodes: expected an integer, got 'y' ({tmp_path}/run.yaml:3)" in str(caught.value)


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"no such configuration file: .*gone\.yaml"):
        load_config(tmp_path / "gone.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "noise.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config(tmp_path / "noise.yaml")


def test_an_empty_file_is_the_defaults(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "empty.yaml") == load_config()


def test_validating_a_dict_raises_a_value_error():
    with pytest.raises(ValueError, match="train_batch_size"):
        PPOConfig.model_validate({"data": {"train_batch_size": 0}})


@pytest.mark.parametrize(
    ("text", "says"),
    [("data: &a\n  x: *a\n", "an alias refers to what it stands in"), ("data: !!int foo\n", "not valid YAML")],
)
def test_yaml_that_parses_to_no_value_is_named(tmp_path, text, says):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(file)
