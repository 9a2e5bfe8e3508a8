"""Reward managers of the user's own, by name or by file."""

from __future__ import annotations

import asyncio

import pytest
from reward_testing import reward_config, sample

from ppo_lib.errors import ConfigError, RewardError
from ppo_lib.reward import RewardLoopManager, RewardManager, RewardResult, register_reward_manager
from ppo_lib.reward.managers import MANAGERS

MINE = """
from ppo_lib.reward import RewardManager, RewardResult

class Halved(RewardManager):
    def __init__(self, tokenizer, scorer, factor=0.5):
        super().__init__(tokenizer, scorer)
        self.factor = factor

    async def run_single(self, sample):
        first = await self.scorer(sample, sample.solution_str)
        second = await self.scorer(sample, "8")
        return RewardResult(self.factor * (first.score + second.score), {"index": sample.extra_info["index"]})

class Wrong(RewardManager):
    async def run_single(self, sample):
        return 1.0

class Raises(RewardManager):
    async def run_single(self, sample):
        raise LookupError("no such thing")

def not_a_manager(): ...
"""

SCORER = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return float(solution_str)\n"


def run(config, tokenizer):
    manager = RewardLoopManager(config, tokenizer)
    try:
        return asyncio.run(manager.score(sample("4")))
    finally:
        manager.close()


def from_file(path, name, scorer=None, **settings):
    return reward_config(
        scorer, reward_manager={"source": "importlib", "module": {"path": path, "name": name}}, **settings
    )


def test_a_manager_from_a_file_may_ask_the_scorer_more_than_once(scorer_file, tmp_path, tokenizer):
    (tmp_path / "score.py").write_text(SCORER)
    path, scorer = scorer_file(MINE), str(tmp_path / "score.py")
    assert run(from_file(path, "Halved", scorer), tokenizer) == RewardResult(6.0, {"index": 1})
    config = from_file(path, "Halved", scorer, reward_kwargs={"factor": 1.0}, timeout_s=5)
    assert run(config, tokenizer).score == 12.0


def test_what_a_manager_does_wrong_names_the_sample(scorer_file, tokenizer):
    path = scorer_file(MINE)
    with pytest.raises(RewardError, match=r"u7.*the reward manager returned a float; expected a RewardResult"):
        run(from_file(path, "Wrong"), tokenizer)
    with pytest.raises(RewardError, match=r"u7.*the reward manager raised LookupError: no such thing"):
        run(from_file(path, "Raises"), tokenizer)


def test_managers_that_do_not_exist_or_refuse_their_arguments(scorer_file, tokenizer):
    path = scorer_file(MINE)
    for config, said in (
        (reward_config(reward_manager={"name": "naiv"}), r"no reward manager 'naiv'; did you mean 'naive'"),
        (reward_config(reward_kwargs={"factor": 2}), r"reward\.reward_kwargs: NaiveRewardManager does not take factor"),
        (from_file(path, "not_a_manager"), "is no reward manager: expected a class"),
        (from_file(path, "Halve"), "did you mean 'Halved'"),
        (from_file(None, "Halved"), r"module\.path is not set"),
    ):
        with pytest.raises(ConfigError, match=said):
            RewardLoopManager(config, tokenizer)


def test_a_registered_manager_is_found_by_name_and_a_name_is_taken_once(tokenizer):
    class Mine(RewardManager):
        async def run_single(self, sample):
            return RewardResult(3.0)

    try:
        assert register_reward_manager("mine")(Mine) is Mine
        assert run(reward_config(reward_manager={"name": "mine"}), tokenizer).score == 3.0
        register_reward_manager("mine")(Mine)  # a notebook cell run twice
        with pytest.raises(ConfigError, match="named 'mine' exists already"):
            register_reward_manager("mine")(type("Other", (RewardManager,), {}))
    finally:
        MANAGERS.pop("mine", None)
