"""The page of all keys and the JSON Schema say what the models and tables say."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import yaml

from ppo_lib.cli import main
from ppo_lib.config import PPOConfig, load_config
from ppo_lib.config.references import fields_of
from ppo_lib.config.schema import json_schema
from ppo_lib.config.tree import dotted, put
from ppo_lib.config.yaml_text import parse_value, read_yaml
from ppo_lib.errors import ConfigError

ROOT = Path(__file__).parents[2]
SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)


GENERATOR = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "generate_configuration.py")))


def tree_of(*overrides: str) -> dict:
    tree: dict = {}
    for override in overrides:
        key, _, text = override.partition("=")
        put(tree, tuple(key.split(".")), parse_value(text))
    return tree


# ------------------------------------------------------------------------------------------------- the page


def test_the_page_is_current():
    current = GENERATOR.PAGE.read_text(encoding="utf-8") == GENERATOR.page()
    assert current, f"docs/configuration.md is stale; run: {GENERATOR.COMMAND}"


def test_every_key_has_a_line_of_its_section():
    text = GENERATOR.page()
    for path in fields_of(PPOConfig):
        section = text.partition(f"## `{dotted(path[:-1])}`\n")[2].partition("\n## ")[0]
        assert f"\n| `{path[-1]}` |" in section, dotted(path)


def test_no_key_means_nothing():
    short = [dotted(path) for path, field in fields_of(PPOConfig).items() if len(field.description or "") < 12]
    assert short == []


def test_the_fates_add_up():
    fates = GENERATOR.customary_fates()
    keys = [line.split("\t")[0] for line in GENERATOR.CUSTOMARY.read_text().splitlines() if line[0] != "#"]
    assert [each.key for each in fates] == keys
    assert {each.fate for each in fates} == set(GENERATOR.FATES)
    text = GENERATOR.page()
    counts = [int(number) for number in re.findall(r"^\| \[\w+\]\(#\w+\) \| .* \| (\d+) \| \d+ \|$", text, re.M)]
    assert len(counts) == 4
    assert sum(counts) == len(keys)


@pytest.mark.parametrize(
    ("key", "fate", "words"),
    [
        ("trainer.seed", "acts", ""),
        ("reward_model.reward_kwargs.max_resp_len", "renamed", "reward.reward_kwargs.max_resp_len"),
        ("critic.ppo_micro_batch_size", "renamed", "critic.ppo_micro_batch_size_per_gpu`, divided by the number of"),
        ("reward_model.enable", "refused", "as `reward.reward_model.enable`: "),
        ("actor_rollout_ref.model.use_liger", "ignored", "log-probs"),
        ("distillation.*", "ignored", "`distillation.enabled` is refused"),
    ],
)
def test_a_fate_is_what_loading_does(key, fate, words):
    found = GENERATOR.fate_of(key, 0)
    assert found.fate == fate
    assert words in found.words


def test_a_key_without_a_fate_stops_the_page():
    with pytest.raises(SystemExit, match=r"trainer\.xyzzy has no fate"):
        GENERATOR.fate_of("trainer.xyzzy", 0)


# ------------------------------------------------------------------------------------------------- the schema


def test_the_schema_is_one():
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", sorted((ROOT / "yaml_configs").glob("*.yaml")), ids=lambda file: file.name)
def test_shipped_files_are_valid(file):
    assert [error.message for error in VALIDATOR.iter_errors(read_yaml(file)[0])] == []
    assert [error.message for error in VALIDATOR.iter_errors(load_config(file).to_dict())] == []


@pytest.mark.parametrize("fate", ["acts", "renamed", "ignored", "refused"])
def test_every_customary_key_is_one_the_schema_knows(fate):
    texts = dict(line.split("\t")[:2] for line in GENERATOR.CUSTOMARY.read_text().splitlines() if line[0] != "#")
    for each in GENERATOR.customary_fates():
        if each.fate != fate or each.key in ("actor_rollout_ref.*.megatron.*", "*.veomni.*"):
            continue
        value = texts[each.key].replace('"{}"', "{}").replace('"???"', "hf") or "null"
        tree = tree_of(f"{each.key.replace('*', 'x')}={value}")
        assert [error.message for error in VALIDATOR.iter_errors(tree)] == [], each.key


VALID = [
    "base=other.yaml",
    "base=[a.yaml, b.yaml]",
    "critic=null",
    "data.seed=null",
    "data.train_files=[a, b]",
    "data.train_files=a",
    "trainer.logger=console",
    "trainer.total_epochs=${trainer.seed}",
    "algorithm.adv_estimator=my.module:estimator",
    "actor_rollout_ref.actor.optim.override_optimizer_config={fused: true}",
    "actor_rollout_ref.rollout.engine_kwargs.sglang.x.y=1",
    "actor_rollout_ref.rollout.stop_token_ids=3",
    "ray_kwargs.ray_init.runtime_env.py_executable=python3",
]
INVALID = [
    "trainr.seed=1",
    "trainer.sed=1",
    "trainer.seed=one",
    "trainer.total_epochs=0",
    "trainer.total_epochs=null",
    "data.truncation=lef",
    "trainer.logger=[console, swanlab]",
    "algorithm.adv_estimator=grop",
    "actor_rollout_ref.actor.optim.betas=[0.9]",
    "actor_rollout_ref.rollout.top_p=0",
    "critic=3",
    "trainer.val_only=3",
]


@pytest.mark.parametrize("override", VALID)
def test_what_loads_is_valid(override):
    assert [error.message for error in VALIDATOR.iter_errors(tree_of(override))] == []
    if not override.startswith("base"):
        load_config(overrides=[override])


@pytest.mark.parametrize("override", INVALID)
def test_what_does_not_load_is_invalid(override):
    assert list(VALIDATOR.iter_errors(tree_of(override)))
    with pytest.raises(ConfigError):
        load_config(overrides=[override])


def test_every_key_has_a_hover_text_and_older_names_are_marked_and_not_proposed():
    def at(key):
        found = SCHEMA
        for name in key.split("."):
            found = found["properties"][name]
        return found

    for path, field in fields_of(PPOConfig).items():
        assert at(dotted(path))["description"].startswith(" ".join(field.description.split()))
    assert at("data.seed")["description"].endswith("Follows `trainer.seed`.")
    assert at("critic.optim.clip_grad")["description"].endswith("Follows `critic.grad_clip`.")
    assert at("trainer.total_epochs")["default"] == 30
    older = at("critic.model.fsdp_config")["additionalProperties"]
    assert older["doNotSuggest"] is True
    assert older["deprecationMessage"].startswith("read as critic.fsdp.*")


# ------------------------------------------------------------------------------------------------- the commands


def test_config_writes_the_schema_and_the_resolved_file(tmp_path, capsys):
    assert main(["config", "--schema", "-o", str(tmp_path / "s.json")]) == 0
    assert json.loads((tmp_path / "s.json").read_text()) == json.loads(json.dumps(SCHEMA))
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(SCHEMA))
    assert main(["config", "trainer.seed=9", "-o", str(tmp_path / "r.yaml")]) == 0
    assert yaml.safe_load((tmp_path / "r.yaml").read_text())["trainer"]["seed"] == 9
    assert capsys.readouterr().out == ""


def test_resolving_a_resolved_file_changes_no_letter(tmp_path):
    first = load_config(overrides=["trainer.experiment_name=1e-6", "reward.timeout_s=3"]).to_yaml()
    (tmp_path / "r.yaml").write_text(first)
    assert load_config(tmp_path / "r.yaml").to_yaml() == first


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--schema", "x.yaml"], "leave out x.yaml"), (["-o", "/gone/x.yaml"], "cannot write /gone/x.yaml: No such file")],
)
def test_a_command_that_cannot_work_says_why(words, says, capsys):
    assert main(["config", *words]) == 2
    assert says in capsys.readouterr().err
