"""Every shipped configuration loads, says nothing, and is what its file name promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppo_lib.config import load_config, need_critic, need_reference_policy, step_arithmetic

FOLDER = Path(__file__).parents[2] / "yaml_configs"
FILES = sorted(FOLDER.glob("*.yaml"))


def test_they_are_there():
    names = {file.name for file in FILES}
    assert {"quickstart.yaml", "ppo_gae_tiny.yaml", "grpo_gsm8k_sglang.yaml", "ppo_gsm8k_sglang.yaml"} <= names


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_it_loads_without_a_notice_and_again_from_its_resolved_form(file, tmp_path):
    config = load_config(file)
    assert config.notices == ()
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(resolved) == config
    assert step_arithmetic(config).table()


def test_the_quickstart_updates_once_a_step_on_one_rank():
    config = load_config(FOLDER / "quickstart.yaml")
    numbers = step_arithmetic(config)
    assert (numbers.world_size, numbers.prompts_per_step, numbers.rollouts_per_prompt) == (1, 8, 6)
    assert numbers.optimizer_steps_per_rollout == 1
    assert not need_critic(config)


def test_the_tiny_run_has_critic_and_reference():
    config = load_config(FOLDER / "ppo_gae_tiny.yaml")
    assert need_critic(config)
    assert need_reference_policy(config)


def test_eight_gpus_hold_the_large_ones():
    for name, critic in (("grpo_gsm8k_sglang.yaml", False), ("ppo_gsm8k_sglang.yaml", True)):
        config = load_config(FOLDER / name)
        assert step_arithmetic(config).world_size == 8
        assert config.actor_rollout_ref.rollout.name == "sglang"
        assert need_critic(config) is critic
