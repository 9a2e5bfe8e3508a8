"""load_config: files, bases, overrides, references, keys that follow others, and what comes out."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import ValidationError

from ppo_lib.config import PPOConfig, as_config, load_config
from ppo_lib.errors import ConfigError


def write(folder, name, text):
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_a_config_error_needs_no_torch_no_ray_no_transformers():
    code = (
        "import sys, ppo_lib.cli, ppo_lib.config; from ppo_lib.config import load_config; load_config();"
        "print([m for m in ('torch', 'ray', 'transformers', 'tensordict', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("1E6", 1e6), ("2e+3", 2000.0), (".5", 0.5), ("1.", 1.0), ("-1.5e-3", -0.0015), ("3", 3.0)],
)
def test_numbers_as_people_write_them(text, value):
    assert (
        load_config(overrides=[f"actor_rollout_ref.actor.entropy_coeff={text}"]).actor_rollout_ref.actor.entropy_coeff
        == value
    )


def test_overrides_have_yaml_values_and_may_carry_pluses():
    config = load_config(
        overrides=[
            "+trainer.total_epochs=3",
            "++trainer.logger=['console','file']",
            "trainer.val_only=True",
            "trainer.experiment_name=a=b",
            "trainer.project_name='1'",
            "data.train_files='[a.parquet, b.parquet]'".replace("'", ""),
            "trainer.rollout_data_dir=null",
            "+data.apply_chat_template_kwargs={enable_thinking:False}",
        ]
    )
    assert config.trainer.total_epochs == 3
    assert config.trainer.logger == ("console", "file")
    assert config.trainer.val_only is True
    assert config.trainer.experiment_name == "a=b"
    assert config.trainer.project_name == "1"
    assert config.data.train_files == ("a.parquet", "b.parquet")
    assert config.trainer.rollout_data_dir is None
    assert config.data.apply_chat_template_kwargs == {"enable_thinking": False}


def test_no_is_a_word_and_a_number_may_be_a_name():
    config = load_config(overrides=["trainer.experiment_name=no", "trainer.project_name=123"])
    assert (config.trainer.experiment_name, config.trainer.project_name) == ("no", "123")


def test_the_last_override_wins_over_the_file(tmp_path):
    file = write(tmp_path, "run.yaml", "trainer:\n  seed: 1\n  total_epochs: 2\ncritic:\n")
    config = load_config(file, ["trainer.seed=2", "trainer.seed=3"])
    assert (config.trainer.seed, config.trainer.total_epochs) == (3, 2)


def test_base_files_are_found_beside_the_file_and_later_ones_win(tmp_path):
    (tmp_path / "bases").mkdir()
    write(tmp_path, "bases/deep.yaml", "trainer:\n  seed: 1\n  total_epochs: 1\n  nnodes: 1\n  experiment_name: deep\n")
    write(tmp_path, "bases/one.yaml", "base: deep.yaml\ntrainer:\n  total_epochs: 2\n  logger: [console, file]\n")
    write(tmp_path, "two.yaml", "trainer:\n  experiment_name: two\n")
    file = write(tmp_path, "run.yaml", "base: [bases/one.yaml, two.yaml]\ntrainer:\n  logger: [file]\n")
    trainer = load_config(file).trainer
    assert (trainer.seed, trainer.total_epochs, trainer.experiment_name, trainer.logger) == (1, 2, "two", ("file",))


def test_base_files_in_a_circle_are_an_error(tmp_path):
    write(tmp_path, "a.yaml", "base: b.yaml\n")
    write(tmp_path, "b.yaml", "base: a.yaml\n")
    with pytest.raises(ConfigError, match=r"circle: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_config(tmp_path / "a.yaml")


def test_one_base_may_be_reached_twice(tmp_path):
    write(tmp_path, "root.yaml", "trainer:\n  seed: 5\n")
    write(tmp_path, "a.yaml", "base: root.yaml\n")
    write(tmp_path, "b.yaml", "base: root.yaml\n")
    file = write(tmp_path, "run.yaml", "base: [a.yaml, b.yaml]\n")
    assert load_config(file).trainer.seed == 5


def test_a_missing_base_names_the_line(tmp_path):
    file = write(tmp_path, "run.yaml", "trainer:\n  seed: 1\nbase: gone.yaml\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:3: no such base file: .*gone\.yaml"):
        load_config(file)


def test_references_copy_values_and_fill_texts(tmp_path):
    file = write(
        tmp_path,
        "run.yaml",
        "trainer:\n  seed: 9\n  experiment_name: s${trainer.seed}-${actor_rollout_ref.rollout.n}\n"
        "actor_rollout_ref:\n  rollout:\n    n: ${data.max_prompt_length}\n    val_kwargs: {n: '${..n}'}\n"
        "data: {max_prompt_length: 24}\n",
    )
    config = load_config(file)
    assert config.actor_rollout_ref.rollout.n == 24
    assert config.actor_rollout_ref.rollout.val_kwargs.n == 24
    assert config.trainer.experiment_name == "s9-24"
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/s9-24"


def test_a_reference_to_a_key_with_a_default_gives_the_default():
    assert load_config(overrides=["trainer.experiment_name=${trainer.device}"]).trainer.experiment_name == "auto"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trainer.experiment_name=${trainer.sed}",
            r"refers to \$\{trainer\.sed\}: there is no such key; did you mean trainer\.seed",
        ),
        ("trainer.experiment_name=${oc.env:HOME}", r"only plain references"),
        ("trainer.experiment_name=${trainer.experiment_name}", r"circle: trainer\.experiment_name -> trainer\.exp"),
    ],
)
def test_a_reference_that_leads_nowhere(override, message):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides=[override])


def test_seeds_left_null_follow_the_trainers():
    config = load_config(overrides=["trainer.seed=7", "data.seed=null", "actor_rollout_ref.rollout.seed=3"])
    assert config.data.seed == 7
    assert config.actor_rollout_ref.actor.data_loader_seed == 7
    assert config.actor_rollout_ref.actor.fsdp_config.seed == 7
    assert config.critic.fsdp.seed == 7
    assert config.actor_rollout_ref.rollout.seed == 3


def test_the_critic_follows_the_actor_until_told_otherwise():
    config = load_config(
        overrides=[
            "actor_rollout_ref.actor.ppo_epochs=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=512",
            "actor_rollout_ref.actor.shuffle=true",
            "critic.ppo_epochs=3",
            "critic.ppo_max_token_len_per_gpu=5000",
            "actor_rollout_ref.model.path=some/model",
        ]
    )
    critic = config.critic
    assert (critic.ppo_epochs, critic.ppo_mini_batch_size, critic.shuffle) == (3, 512, True)
    assert critic.forward_max_token_len_per_gpu == 5000
    assert critic.model.path == config.actor_rollout_ref.model.tokenizer_path == "some/model"


def test_the_reference_and_the_log_prob_pass_follow_the_actors_packing():
    config = load_config(
        overrides=[
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        ]
    )
    for section in (config.actor_rollout_ref.ref, config.actor_rollout_ref.rollout):
        assert section.log_prob_use_dynamic_bsz is True
        assert section.log_prob_max_token_len_per_gpu == 4096


def test_clip_and_gradient_limits_follow_one_key():
    config = load_config(
        overrides=[
            "actor_rollout_ref.actor.clip_ratio=0.3",
            "actor_rollout_ref.actor.clip_ratio_high=0.4",
            "critic.grad_clip=0.5",
        ]
    )
    actor = config.actor_rollout_ref.actor
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.4)
    assert (actor.optim.clip_grad, config.critic.optim.clip_grad) == (1.0, 0.5)


def test_the_configuration_cannot_be_changed():
    config = load_config()
    with pytest.raises(ValidationError, match="frozen"):
        config.trainer.seed = 1


@pytest.mark.parametrize("form", ["dict", "yaml", "pickle"])
def test_a_configuration_survives_a_round_trip(form, tmp_path):
    config = load_config(overrides=["trainer.seed=7", 'actor_rollout_ref.rollout.stop=["\\n"]', "critic.optim.lr=3e-7"])
    if form == "dict":
        again = PPOConfig.model_validate(config.to_dict())
    elif form == "yaml":
        again = load_config(write(tmp_path, "again.yaml", config.to_yaml()))
    else:
        again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.notices == config.notices == ()


def test_as_config_takes_what_people_have():
    config = load_config(overrides=["trainer.seed=7"])
    assert as_config(config) is config
    assert as_config({"trainer": {"seed": 7}}) == config
    with pytest.raises(ConfigError, match="got int"):
        as_config(3)


def test_as_config_takes_an_omegaconf_object():
    given = OmegaConf.create(
        {
            "trainer": {"seed": 7, "experiment_name": "e${trainer.seed}"},
            "actor_rollout_ref": {"rollout": {"name": "hf"}, "actor": {"megatron": {"path": "???"}}},
            "data": {"train_files": ["a", "b"]},
        }
    )
    config = as_config(given)
    assert config.trainer.experiment_name == "e7"
    assert config.actor_rollout_ref.rollout.name == "hf"
    assert config.data.train_files == ("a", "b")


@pytest.mark.parametrize(
    ("seed", "says"),
    [
        ("???", "trainer.seed is ???, left open; set it"),
        ("${x.y}", "the OmegaConf object cannot be resolved: trainer.seed: Interpolation key 'x.y' not found"),
        ("${oc.env:PPO_LIB_GONE}", "trainer.seed: .*'PPO_LIB_GONE' not found"),
        ("${what:1}", "trainer.seed: Unsupported interpolation type what"),
    ],
)
def test_an_omegaconf_object_with_holes_says_where(seed, says):
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        as_config(OmegaConf.create({"trainer": {"seed": seed}}))


def test_a_value_left_open_is_told_with_its_place(tmp_path):
    file = write(tmp_path, "run.yaml", "trainer:\n  seed: ???\ndata:\n  custom_cls: {path: '???'}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["critic.model.override_config.x=???"])
    assert sorted(str(caught.value).splitlines()) == [
        "critic.model.override_config.x is ???, left open (override critic.model.override_config.x=???); set it",
        f"data.custom_cls.path is ???, left open ({file}:4); set it",
        f"trainer.seed is ???, left open ({file}:2); set it",
    ]
    assert load_config(file, ["trainer.seed=1", "data.custom_cls.path=null"]).trainer.seed == 1


def test_validating_a_dict_leaves_it_alone():
    given = {"trainer": {"seed": 7}, "critic": None, "custom_reward_function": {"path": "r.py"}}
    before = yaml.safe_dump(given)
    as_config(given)
    assert yaml.safe_dump(given) == before
