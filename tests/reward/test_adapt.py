"""Reward functions handed to a trainer, and data checked against the scorer before anything starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reward_testing import batch_of, reward_config

from ppo_lib.config import DataConfig
from ppo_lib.data import RLHFDataset
from ppo_lib.errors import ConfigError, DataError, RewardError
from ppo_lib.reward import as_batch_reward, check_dataset


@pytest.fixture
def data(tokenizer):
    return batch_of(tokenizer, ["77777777", "7777"], ["77777777"] * 2)


def test_a_scorer_of_one_response_scores_the_batch(tokenizer, data):
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return {"score": len(solution_str), "acc": solution_str == ground_truth}

    scores, extra = as_batch_reward(compute_score, tokenizer)(data)
    assert scores.sum(-1).tolist() == [8.0, 4.0]
    assert extra["acc"].tolist() == [True, False]


def test_a_function_of_the_batch_may_return_scores_or_a_dict(tokenizer, data):
    given = torch.zeros(2, 10, dtype=torch.float64)
    given[:, 1] = 2.0
    for fn in (
        lambda batch: given,
        lambda batch: {"reward_tensor": given, "reward_extra_info": {"acc": [1, 0], "note": np.array(["a", "b"])}},
        lambda batch, return_dict=False: (
            {"reward_tensor": given, "reward_extra_info": {"acc": [1, 0]}} if return_dict else None
        ),
    ):
        scores, extra = as_batch_reward(fn, tokenizer)(data)
        assert torch.equal(scores, given.float())
        assert scores.dtype == torch.float32
        assert "acc" not in extra or extra["acc"].tolist() == [1, 0]
    assert extra.keys() == {"acc"}


def test_a_score_on_a_token_that_the_policy_did_not_write_moves_to_its_last_one(tokenizer, data):
    data.batch["response_mask"][0, 4:] = 0  # a tool wrote the rest
    data.batch["response_mask"][1] = 0
    given = torch.zeros(2, 10)
    given[0, 2], given[0, 8], given[1, 3] = 0.5, 1.0, 9.0
    scores, _ = as_batch_reward(lambda batch: given, tokenizer)(data)
    assert scores[0].tolist() == [0, 0, 0.5, 1.0, 0, 0, 0, 0, 0, 0]
    assert scores[1].tolist() == [0] * 10  # no token of the policy's to carry it


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned a NoneType; expected a tensor (2, 10)"),
        ({"scores": 1}, "returned a NoneType; expected a tensor (2, 10)"),
        (torch.zeros(2), "returned scores of shape (2,); expected (2, 10)"),
        (torch.tensor([[0.0] * 10, [float("nan")] * 10]), "not finite in row 1 ('repeat-digit')"),
        (
            {"reward_tensor": torch.zeros(2, 10), "reward_extra_info": {"acc": [1]}},
            "1 values under 'acc'",
        ),
        ({"reward_tensor": torch.zeros(2, 10), "reward_extra_info": {"acc": 1}}, "a int under 'acc'; expected one"),
    ],
)
def test_a_batch_function_that_returns_anything_else_is_an_error(tokenizer, data, returned, said):
    with pytest.raises(RewardError) as caught:
        as_batch_reward(lambda batch: returned, tokenizer)(data)
    assert said in str(caught.value)


def test_a_batch_function_that_raises_is_named_with_its_cause(tokenizer, data):
    def my_reward(batch):
        raise KeyError("gold")

    with pytest.raises(RewardError, match=r"my_reward failed on a batch of 2: KeyError: 'gold' .*test_adapt\.py"):
        as_batch_reward(my_reward, tokenizer)(data)


def dataset(tmp_path, tokenizer, *rows):
    import json

    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1:", **row}) + "\n" for row in rows))
    return RLHFDataset(str(path), tokenizer, DataConfig(max_prompt_length=32, seed=0))


GOOD = {"data_source": "arithmetic", "reward_model": {"style": "rule", "ground_truth": "1"}}


def test_data_that_the_scorers_can_score_passes(tmp_path, tokenizer):
    check_dataset(reward_config(), dataset(tmp_path, tokenizer, GOOD))
    check_dataset(reward_config(), [1, 2, 3])  # a dataset of the user's own that cannot be asked


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"data_source": "arithmetik"}, "no scorer for data_source 'arithmetik'; did you mean 'arithmetic'"),
        ({"reward_model": None}, "column 'reward_model' is None; the scorer for 'arithmetic' needs"),
        ({"reward_model": {"style": "rule"}}, "column 'reward_model' is {'style': 'rule'}"),
    ],
)
def test_data_that_no_scorer_can_score_is_refused_with_file_and_row(tmp_path, tokenizer, scorer_file, bad, said):
    rows = dataset(tmp_path, tokenizer, GOOD, {**GOOD, **bad})
    with pytest.raises(DataError) as caught:
        check_dataset(reward_config(), rows)
    assert said in str(caught.value)
    assert "rows.jsonl, row 1" in str(caught.value)
    own = scorer_file("def compute_score(**kwargs):\n    return 1.0\n")
    check_dataset(reward_config(own), rows)  # a scorer of one's own may need neither


def test_a_scorer_that_cannot_be_loaded_is_refused_with_the_data(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="there is no file"):
        check_dataset(reward_config(str(tmp_path / "absent.py")), dataset(tmp_path, tokenizer, GOOD))
