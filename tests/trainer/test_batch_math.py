"""The driver's own arithmetic on the envelope, with literal values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ppo_lib.algorithms.kl import FixedKLController
from ppo_lib.errors import FieldMissingError
from ppo_lib.trainer.batch_math import (
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
    extract_reward,
    mini_batch_of,
    mini_batch_sizes,
    rank_major_order,
)
from ppo_lib.trainer.stages import contiguous_partitions
from protocol import DataProto


def test_response_mask_is_the_attended_part_of_the_response():
    data = DataProto.from_dict(
        {
            "responses": torch.zeros(2, 2, dtype=torch.int64),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        }
    )
    assert compute_response_mask(data).tolist() == [[1, 0], [1, 1]]


def test_extract_reward_gives_scores_and_the_columns_the_reward_loop_named():
    data = DataProto.from_dict(
        {"rm_scores": torch.tensor([[0.0, 1.0]])},
        {"acc": np.array([1.0], dtype=object), "uid": np.array(["a"], dtype=object)},
        meta_info={"reward_extra_keys": ["acc"]},
    )
    scores, extra = extract_reward(data)
    assert scores.tolist() == [[0.0, 1.0]]
    assert list(extra) == ["acc"]
    with pytest.raises(FieldMissingError, match="rm_scores"):
        extract_reward(DataProto.from_dict({"x": torch.zeros(1)}))


def test_kl_penalty_is_taken_from_the_scores_on_policy_tokens_only():
    data = DataProto.from_dict(
        {
            "token_level_scores": torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]]),
            "old_log_probs": torch.tensor([[-1.0, -2.0, 5.0], [-1.0, -1.0, -1.0]]),
            "ref_log_prob": torch.tensor([[-2.0, -1.5, float("nan")], [-9.0, -9.0, -9.0]]),
            "response_mask": torch.tensor([[1, 1, 0], [0, 0, 0]]),
        }
    )
    data, metrics = apply_kl_penalty(data, FixedKLController(0.5), "kl")
    # row 0: kl = [1, -0.5]; rewards = [0 - 0.5*1, 1 + 0.5*0.5, 0]; measured = mean(1, -0.5); row 1 has no policy token
    assert data.batch["token_level_rewards"].tolist() == [[-0.5, 1.25, 0.0], [0.0, 0.0, 0.0]]
    assert metrics == {"actor/reward_kl_penalty": 0.25, "actor/reward_kl_penalty_coeff": 0.5}


def test_two_groups_of_three_get_the_textbook_grpo_advantages():
    scores = torch.tensor([[1.0], [0.0], [0.0], [0.0], [1.0], [1.0]])
    data = DataProto.from_dict(
        {"token_level_rewards": scores, "response_mask": torch.ones(6, 1, dtype=torch.int64)},
        {"uid": np.array(["a"] * 3 + ["b"] * 3, dtype=object)},
    )
    data = compute_advantage(data, "grpo")
    expected = torch.tensor([1.1547, -0.5774, -0.5774, -1.1547, 0.5774, 0.5774])
    torch.testing.assert_close(data.batch["advantages"][:, 0], expected, atol=1e-4, rtol=0)


def test_mini_batches_are_filled_by_prompts_in_order_and_hold_whole_groups():
    prompt_row = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    assert mini_batch_of(prompt_row, 2).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    shuffled = mini_batch_of(prompt_row, 2, shuffle_seed=3)
    assert sorted(shuffled.tolist()) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert all(shuffled[i] == shuffled[i + 1] for i in range(0, 8, 2))
    assert any(mini_batch_of(prompt_row, 2, shuffle_seed=s).tolist() != [0, 0, 0, 0, 1, 1, 1, 1] for s in range(5))


def test_denominators_count_policy_tokens_and_rows_that_have_one():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1], [1, 0, 0]])
    tokens, rows = mini_batch_sizes(torch.tensor([0, 0, 1, 1]), mask)
    assert tokens == [2.0, 3.0]
    assert rows == [1.0, 2.0]


def test_every_rank_gets_an_equal_share_of_every_mini_batch_and_padding_repeats_the_shortest():
    order, padding = rank_major_order([0, 0, 0, 1, 1], [5, 3, 4, 9, 1], 2, contiguous_partitions)
    # mini-batch 0 is filled up to 4 rows with its shortest (row 1); each rank: two rows of it, then one of mini-batch 1
    assert order == [0, 1, 3, 2, 1, 4]
    assert padding == [4]
