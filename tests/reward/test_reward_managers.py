"""Reward managers of the user's own, by name or by file."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from reward_testing import reward_config, sample

from ppo_lib.config import load_config
from ppo_lib.errors import ConfigError, RewardError
from ppo_lib.reward import RewardLoopManager, RewardManager, RewardResult, register_reward_manager
from ppo_lib.reward.managers import MANAGERS, DapoRewardManager, check_manager

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


def dapo(scorer, **kwargs):
    return reward_config(scorer, reward_manager={"name": "dapo"}, reward_kwargs=kwargs)


BUFFER = {"enable": True, "len": 4, "penalty_factor": 0.5}


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (6, 0.0), (7, -0.125), (8, -0.25), (10, -0.5)])
def test_dapo_penalises_the_last_tokens_that_fit_evenly(tmp_path, tokenizer, tokens, penalty):
    (tmp_path / "score.py").write_text(SCORER)
    manager = RewardLoopManager(
        dapo(str(tmp_path / "score.py"), overlong_buffer_cfg={**BUFFER, "log": True}, max_resp_len=10), tokenizer
    )
    try:
        result = asyncio.run(manager.score(replace(sample("4"), response_ids=[5] * tokens)))
    finally:
        manager.close()
    assert result == RewardResult(4.0 + penalty, {"acc": 4.0, "overlong_reward": penalty, "overlong": penalty < 0})


def test_dapo_without_a_buffer_is_the_scorers_answer_with_an_acc(tmp_path, tokenizer):
    (tmp_path / "score.py").write_text(SCORER)
    assert run(dapo(str(tmp_path / "score.py")), tokenizer) == RewardResult(4.0, {"acc": 4.0})
    (tmp_path / "own.py").write_text(SCORER.replace("float(solution_str)", "{'score': 1.0, 'acc': 0.25}"))
    config = dapo(str(tmp_path / "own.py"), overlong_buffer_cfg={**BUFFER}, max_resp_len=10)
    assert run(config, tokenizer) == RewardResult(1.0, {"acc": 0.25})


def test_the_longest_response_follows_the_data_section():
    keys = ["reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 9}"]
    assert check_manager(load_config(overrides=[*keys, "data.max_response_length=10"]).reward) is DapoRewardManager
    with pytest.raises(ConfigError, match="from 1 to 8 tokens"):
        check_manager(load_config(overrides=[*keys, "data.max_response_length=8"]).reward)


@pytest.mark.parametrize(
    ("buffer", "said"),
    [
        ({**BUFFER, "len": 11}, "from 1 to 10 tokens"),
        ({**BUFFER, "len": 0}, "from 1 to 10 tokens"),
        ({**BUFFER, "penalty_factor": -1}, "would reward length"),
        ({**BUFFER, "length": 3}, "overlong_buffer_cfg.length is not a key"),
        (3, "expected enable, len, penalty_factor, log"),
    ],
)
def test_a_penalty_that_cannot_work_is_told_before_the_run(tokenizer, buffer, said):
    with pytest.raises(ConfigError, match=said):
        RewardLoopManager(dapo(None, overlong_buffer_cfg=buffer, max_resp_len=10), tokenizer)


def test_an_overlong_penalty_under_another_manager_says_which_manager_takes_it(tokenizer):
    with pytest.raises(ConfigError, match=r"Set reward.reward_manager.name=dapo"):
        RewardLoopManager(reward_config(reward_kwargs={"overlong_buffer_cfg": BUFFER}), tokenizer)
