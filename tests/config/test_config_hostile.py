"""Values that people type by accident or on purpose: each is taken as meant, or refused in one sentence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ppo_lib.config import as_config, load_config
from ppo_lib.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    return text


@pytest.mark.parametrize(
    ("override", "says"),
    [
        # numbers that are none, or no number a seed or a token can be
        (f"{ACTOR}.optim.lr=.inf", "optim.lr: input should be a finite number, got inf"),
        (f"{ACTOR}.optim.lr=nan", "optim.lr: input should be"),
        ("actor_rollout_ref.rollout.temperature=inf", "temperature: input should be a finite number"),
        ("trainer.seed=-1", "trainer.seed: input should be greater than or equal to 0, got -1"),
        ("trainer.seed=18446744073709551616", "trainer.seed: input should be less than 9223372036854775808"),
        ("actor_rollout_ref.rollout.stop_token_ids=[-1]", "stop_token_ids.0: input should be greater than or equal to"),
        (f"{ACTOR}.ppo_micro_batch_size=true", "ppo_micro_batch_size_per_gpu: expected a number, got True"),
        (f"{ACTOR}.optim.betas=[0.9,0.95,0.99]", "optim.betas: expected at most 2 values, got [0.9, 0.95, 0.99]"),
        # Python's None, and a shell variable that is not set
        ("trainer.resume_from_path=None", "resume_from_path: None is a word in YAML; write null for none"),
        ("critic.enable=none", "critic.enable: none is a word in YAML; write null for none"),
        ("trainer.rollout_data_dir=", "rollout_data_dir: expected text, got nothing; write null for none"),
        ("trainer.default_local_dir=", "trainer.default_local_dir: expected text, got nothing (override"),
        ("data.train_files=", "data.train_files.0: string should have at least 1 character, got ''"),
        ("data.train_files=[]", "data.train_files: expected at least 1 values, got []"),
        # sections and references
        ("trainer=true", "trainer: expected a section, got True"),
        ("trainer.experiment_name=${data}", "refers to ${data}, a section; only the value of a single key"),
        ("~trainer.seed", "is not an override; write section.key=value, such as trainer.seed=1; to give a key its"),
    ],
)
def test_a_slip_is_told(override, says):
    assert says in refusal(override)


@pytest.mark.parametrize("name", ["010", "1.10", "1e-6", "1_000", "0x1F", "none", "2024-01-01", "a=b", "héllo 世界"])
def test_a_name_stays_as_it_was_written(tmp_path, name):
    config = load_config(overrides=[f"trainer.experiment_name={name}"])
    assert config.trainer.experiment_name == name
    assert config.trainer.default_local_dir == f"checkpoints/verl_examples/{name}"
    file = tmp_path / "run.yaml"
    file.write_text(f"trainer: {{experiment_name: {name}}}\n", encoding="utf-8")
    assert load_config(file).trainer.experiment_name == name
    file.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(file) == config


def test_a_number_after_a_name_is_the_last_word(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("trainer: {experiment_name: 010}\n")
    assert load_config(file, ["trainer.experiment_name=7.0"]).trainer.experiment_name == "7.0"
    assert load_config(file, ["trainer.experiment_name='007'"]).trainer.experiment_name == "007"


def test_a_line_break_that_yaml_left_as_two_letters_is_noticed():
    rollout = "actor_rollout_ref.rollout"
    (line,) = load_config(overrides=[rf"{rollout}.stop=['\n']", f"{rollout}.name=hf"]).notices
    assert line == (
        f"{rollout}.stop holds \\n, a backslash and a letter; a line break is written in double quotes,"
        """ as ["\\n"] in a file and 'stop=["\\n"]' in a shell"""
    )
    config = load_config(overrides=[rf'{rollout}.stop=["\n"]', f"{rollout}.name=hf"])
    assert (config.notices, config.actor_rollout_ref.rollout.stop) == ((), ("\n",))


def test_a_logger_named_twice_is_one():
    assert load_config(overrides=["trainer.logger=[console,file,console]"]).trainer.logger == ("console", "file")


def test_huge_batches_are_answered_at_once():
    text = refusal("data.train_batch_size=1000000000000000007", f"{ACTOR}.ppo_mini_batch_size=1000000000000000007")
    assert "which 8 ranks" in text


def test_select_takes_a_key_or_what_stands_beside_it():
    load = load_config(
        overrides=["trainer.total_epochs=${oc.select:data.seed,3}", "critic.ppo_epochs=${oc.select:a.b,3}"]
    )
    assert (load.trainer.total_epochs, load.critic.ppo_epochs) == (42, 3)
    assert load_config(overrides=["trainer.resume_from_path=${oc.select:a.b}"]).trainer.resume_from_path is None


def test_what_a_composed_file_of_classes_brings_is_ignored():
    (line,) = load_config(overrides=[f"{ACTOR}._target_=some.Class"]).notices
    assert "_target_ is ignored" in line


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{under}'] * 9)}]\n" for under, name in zip("abcdefgh", "bcdefghi")
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "its aliases stand for more than 100000 values"),
        ("data: {train_files: &x [*x]}\n", "an alias refers to what it stands in"),
        ("a: " + "[" * 5000 + "]" * 5000, "the nesting is too deep"),
        ("trainer: {seed: \0}\n", "not valid YAML: unacceptable character #x0000"),
        ("trainer: {seed: 1}\n---\ntrainer: {seed: 2}\n", ":2:1: not valid YAML: but found another document"),
        ("trainer: {seed: 1, seed: 2}\n", "run.yaml:1: trainer.seed is given twice, first in line 1"),
        ("trainer.seed: 3\n", "unknown key 'trainer.seed' ({file}:1): in a file each key stands under its section"),
        ("1: 2\n", "keys should be strings, got 1"),
        ("data: {train_files: !!set {a, b}}\n", "data.train_files: expected a list; a set has no order"),
        ('trainer: {experiment_name: "\\uD83D"}\n', "trainer.experiment_name: '\\ud83d' is no text"),
        ("trainer: !!python/object:os.system {}\n", "could not determine a constructor"),
    ],
)
def test_a_hostile_file_is_one_sentence(tmp_path, text, says):
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert says.format(file=file) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert str(caught.value).count(str(file)) == 1


@pytest.mark.parametrize(
    "text", ["\ufefftrainer:\n  seed: 3\n", "trainer:\r\n  seed: 3\r\n", "trainer: {<<: {seed: 3}}\n"]
)
def test_an_odd_file_is_read(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8", newline="")
    assert load_config(file).trainer.seed == 3


def test_values_of_python_are_taken_as_what_they_are():
    config = as_config(
        {
            "data": {"train_files": [Path("/x/a.parquet")], "seed": np.int64(3)},
            "actor_rollout_ref": {
                "actor": {"optim": {"lr": np.float32(0.5), "betas": np.array([0.5, 0.25])}},
                "model": {"override_config": {"sizes": np.arange(2)}},
            },
            "trainer": {"val_only": np.bool_(True), "logger": ("console",)},
        }
    )
    assert config.data.train_files == ("/x/a.parquet",)
    assert (type(config.data.seed), config.data.seed) == (int, 3)
    assert config.actor_rollout_ref.actor.optim.betas == (0.5, 0.25)
    assert config.actor_rollout_ref.model.override_config == {"sizes": [0, 1]}
    assert config.trainer.val_only is True
    assert "sizes" in config.to_yaml()


def test_dictionaries_that_cannot_be_a_configuration():
    holds_itself: dict = {}
    holds_itself["trainer"] = holds_itself
    for tree, says in (
        (holds_itself, "holds itself"),
        ({"trainer": {"logger": {"console"}}}, "a set has no order"),
        ({1: 2}, "keys should be strings"),
    ):
        with pytest.raises(ConfigError, match=says):
            as_config(tree)
    config = as_config({"actor_rollout_ref": {"model": {"override_config": {"f": object()}}}})
    with pytest.raises(ConfigError, match="cannot be written as YAML"):
        config.to_yaml()
