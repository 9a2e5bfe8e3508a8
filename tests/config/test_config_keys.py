"""Every key that people type has a fate, and no row of the compatibility table is a dead letter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_lib.config import PPOConfig, load_config
from ppo_lib.config.base import follows
from ppo_lib.config.compat import compat_row, compat_rows
from ppo_lib.config.references import fields_of, sections_of
from ppo_lib.config.tree import dotted

ACTING = {dotted(path): field for path, field in fields_of(PPOConfig).items()}
SECTIONS = {dotted(path) for path in sections_of(PPOConfig)}
OPEN = ("ray_kwargs.ray_init",)  # sections that pass on whatever they are given

# Where our default is not the customary one, and why
OTHER_DEFAULTS = {
    "actor_rollout_ref.actor.entropy_from_logits_chunk_size": "null: as many as fit 64 MiB",
    "actor_rollout_ref.ref.entropy_from_logits_chunk_size": "follows the actor's",
    "actor_rollout_ref.actor.use_torch_compile": "false: compiling costs minutes and pays only in long runs",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": "follows the key one level up",
    "actor_rollout_ref.ref.fsdp_config.use_torch_compile": "follows the key one level up",
    "critic.fsdp.use_torch_compile": "false, as the actor's",
    "actor_rollout_ref.actor.clip_ratio_low": "follows clip_ratio",
    "actor_rollout_ref.actor.clip_ratio_high": "follows clip_ratio",
    "actor_rollout_ref.rollout.name": "auto",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "1",
    "actor_rollout_ref.rollout.agent.num_workers": "null is min(8, cores)",
    "actor_rollout_ref.model.tokenizer_path": "follows the model",
    **{
        f"{section}.wrap_policy.min_num_params": "a small model is faster in one unit; 0 is every layer one"
        for section in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
    },
    "critic.model.path": "follows the actor's",
    "critic.model.trust_remote_code": "follows the actor's",
    "data.dataloader_num_workers": "null is min(8, cores)",
    "reward.num_workers": "null is min(8, cores)",
    "trainer.logger": "no account is needed for the default loggers",
    "trainer.device": "auto",
}


def customary() -> list[tuple[str, str]]:
    lines = Path(__file__).with_name("customary_keys.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines if line and not line.startswith("#")]
    return [(row[0], row[1]) for row in rows]


def acts(key: str) -> bool:
    parts = key.split(".")
    above = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
    return bool(above & ACTING.keys()) or any(key.startswith(f"{section}.") for section in OPEN)


def test_every_customary_key_acts_or_has_a_row():
    without = [key for key, _ in customary() if not acts(key.replace(".*", ".x")) and not compat_row(key)]
    assert without == []
    assert len(customary()) > 400


def test_no_row_is_about_a_key_that_acts():
    shadowed = [(row.key, key) for row in compat_rows() for key in ACTING if row.fits(key)]
    # a pattern with a star may cover acting keys only where it says nothing about them: none does today
    assert shadowed == []


@pytest.mark.parametrize(
    "row", [row for row in compat_rows() if row.fate in ("renamed", "per_rank")], ids=lambda row: row.key
)
def test_a_newer_name_leads_somewhere(row):
    target = dotted(row.target(row.key.replace("*", "param_offload")))
    section = target.rpartition(".")[0]
    assert acts(target) or compat_row(target) or section in SECTIONS, target


def test_rows_have_a_known_fate_and_a_reason():
    for row in compat_rows():
        assert row.fate in ("renamed", "per_rank", "ignored", "refused"), row
        assert row.why, row


def test_defaults_are_the_customary_ones():
    config = load_config()
    different = set()
    for key, text in customary():
        if key not in ACTING or "${" in text or not text:
            continue
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        value = list(value) if isinstance(value, tuple) else value
        customary_value = json.loads(text)
        if customary_value == "{}":
            customary_value = {}
        if key in ("data.train_files", "data.val_files"):
            customary_value = [customary_value]
        if customary_value is None and (value == {} or follows(ACTING[key])):
            continue
        if value != customary_value:
            different.add(key)
    assert different <= OTHER_DEFAULTS.keys()


def test_every_key_is_documented():
    assert [key for key, field in ACTING.items() if not field.description] == []
