from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from ppo_lib.trainer.majority import win_probabilities
from ppo_lib.trainer.metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    process_validation_metrics,
    validation_metric_names,
)
from protocol import DataProto, FieldMissingError

GOLDEN = json.loads((Path(__file__).parents[1] / "algorithms" / "core_algos_small.json").read_text())


def make_batch(padding=False, **replaced):
    """L = 2, R = 3: a full response, one with a tool token, an empty one; perhaps a padding row after them."""
    tensors = {
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0], [1, 1, 0, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]]),
        "token_level_scores": torch.tensor([[0.0, 0, 1], [3, 0, 0], [0, 0, 0]]),
        "token_level_rewards": torch.tensor([[0.0, 0, 0.5], [2, 0, 0], [0, 0, 0]]),
        "advantages": torch.tensor([[1.0, 2, 3], [-2, 0, 0], [0, 0, 0]]),
        "returns": torch.tensor([[1.0, 1, 1], [3, 0, 0], [0, 0, 0]]),
        "values": torch.tensor([[1.0, 1, 2], [3, 99, 99], [99, 99, 99]]),
    }
    tensors |= replaced
    turns = [2, 4, 6]
    if padding:
        loud = {"attention_mask": 1, "response_mask": 1}
        tensors = {k: torch.cat([v, torch.full_like(v[:1], loud.get(k, 1000))]) for k, v in tensors.items()}
        tensors["is_padding"] = torch.tensor([False, False, False, True])
        turns.append(1000)
    return DataProto.from_dict(tensors=tensors, non_tensors={"__num_turns__": np.array(turns, dtype=object)})


# ---------------------------------------------------------------- a training step


def test_data_metrics_by_hand():
    metrics = compute_data_metrics(make_batch(), use_critic=True)
    unexplained = (1 / 4) / (1 + 1e-5)  # returns - values = 0, 0, -1, 0; returns = 1, 1, 1, 3
    assert metrics == pytest.approx(
        {
            "critic/score/mean": 2,  # of the two rows with a response
            "critic/score/max": 3,
            "critic/score/min": 1,
            "critic/rewards/mean": 1.25,
            "critic/rewards/max": 2,
            "critic/rewards/min": 0.5,
            "critic/advantages/mean": 1,
            "critic/advantages/max": 3,
            "critic/advantages/min": -2,
            "critic/returns/mean": 1.5,
            "critic/returns/max": 3,
            "critic/returns/min": 1,
            "critic/values/mean": 1.75,
            "critic/values/max": 3,
            "critic/values/min": 1,
            "critic/vf_explained_var": 1 - unexplained,
            "response_length/mean": 5 / 3,
            "response_length/max": 3,
            "response_length/min": 0,
            "response_length/clip_ratio": 1 / 3,
            "response_length_non_aborted/mean": 2.5,
            "response_length_non_aborted/max": 3,
            "response_length_non_aborted/min": 2,
            "response_length_non_aborted/clip_ratio": 1 / 2,
            "prompt_length/mean": 5 / 3,
            "prompt_length/max": 2,
            "prompt_length/min": 1,
            "prompt_length/clip_ratio": 2 / 3,
            "response/aborted_ratio": 1 / 3,
            "response/fully_masked_ratio": 1 / 3,
            "num_turns/mean": 4,
            "num_turns/max": 6,
            "num_turns/min": 2,
        }
    )
    assert all(type(value) is float for value in metrics.values())


def test_padding_rows_are_in_no_metric():
    timing = {"step": 2.0, "gen": 1.0, "adv": 0.5}
    for compute in (
        compute_data_metrics,
        lambda batch: compute_timing_metrics(batch, timing),
        lambda batch: compute_throughout_metrics(batch, timing, n_gpus=2),
    ):
        assert compute(make_batch(padding=True)) == compute(make_batch())


def test_values_are_reported_where_there_are_any():
    batch = make_batch()
    assert "critic/values/mean" in compute_data_metrics(batch)
    assert "critic/values/mean" not in compute_data_metrics(batch, use_critic=False)
    batch.pop(batch_keys=["values"])
    assert "critic/values/mean" not in compute_data_metrics(batch)


def test_a_field_that_is_not_there_is_named():
    batch = make_batch()
    batch.pop(batch_keys=["returns"])
    with pytest.raises(FieldMissingError, match="need 'returns'; the batch has attention_mask"):
        compute_data_metrics(batch)


def test_a_batch_without_a_single_response_reports_no_score_and_no_nan():
    attention = torch.tensor([[1, 1, 0, 0, 0]] * 3)
    metrics = compute_data_metrics(make_batch(attention_mask=attention, response_mask=torch.zeros(3, 3)))
    assert metrics["response/aborted_ratio"] == 1
    assert metrics["response/fully_masked_ratio"] == 1
    assert metrics["response_length/mean"] == 0
    assert not any(name.startswith("critic/") for name in metrics)
    assert all(math.isfinite(value) for value in metrics.values())


def test_timing_is_charged_to_the_tokens_of_the_stage():
    metrics = compute_timing_metrics(make_batch(), {"gen": 2.0, "adv": 3.0, "reward": 1.0})
    assert metrics == pytest.approx(
        {
            "timing_s/gen": 2.0,
            "timing_s/adv": 3.0,
            "timing_s/reward": 1.0,
            "timing_per_token_ms/gen": 2000 / 5,
            "timing_per_token_ms/adv": 3000 / 10,
        }
    )


def test_throughput_counts_all_tokens_per_second_and_rank():
    metrics = compute_throughout_metrics(make_batch(), {"step": 4.0}, n_gpus=2)
    assert metrics.pop("perf/cpu_memory_used_gb") > 0
    assert metrics == {"perf/total_num_tokens": 10, "perf/time_per_step": 4, "perf/throughput": 10 / 8}


# ---------------------------------------------------------------- a validation


def test_validation_golden():
    infos = {"reward": [1.0, 0.0, 0.0, 0.0], "pred": ["1", "2", "3", "3"]}
    metrics = process_validation_metrics(["d"] * 4, ["a", "a", "b", "b"], infos)["d"]["reward"]
    expected = GOLDEN["val"]["reward"]
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        assert value == pytest.approx(expected[name], abs=0.02)  # 1000 draws a prompt, two prompts: 3 sigma
    assert metrics["mean@2"] == metrics["std@2"] == metrics["maj@2/mean"] == 0.25
    assert metrics["best@2/mean"] == 0.375
    assert metrics["worst@2/mean"] == 0.125


def test_statistics_equal_the_enumeration_of_all_draws():
    values, votes = [3.0, 1.0, 4.0, 1.5], ["x", "y", "y", "z"]
    metrics = process_validation_metrics(["d"] * 4, ["a"] * 4, {"acc": values, "pred": votes})["d"]["acc"]
    for draws in (2, 4):
        best, worst, majority = [], [], []
        for drawn in itertools.product(range(4), repeat=draws):
            best.append(max(values[i] for i in drawn))
            worst.append(min(values[i] for i in drawn))
            counted = {}
            for i in drawn:
                counted.setdefault(votes[i], []).append(values[i])
            winner = max(counted.values(), key=len)  # the first drawn among ties
            majority.append(winner[0])
        for name, outcomes in (("best", best), ("worst", worst), ("maj", majority)):
            assert metrics[f"{name}@{draws}/mean"] == pytest.approx(np.mean(outcomes))
            assert metrics[f"{name}@{draws}/std"] == pytest.approx(np.std(outcomes))
    assert metrics["mean@4"] == pytest.approx(np.mean(values))
    assert metrics["std@4"] == pytest.approx(np.std(values))


def test_draws_double_up_to_the_number_of_responses():
    metrics = process_validation_metrics(["d"] * 6, ["a"] * 6, {"reward": [0.0] * 6})["d"]["reward"]
    assert [name for name in metrics if name.startswith("best") and name.endswith("mean")] == [
        "best@2/mean",
        "best@4/mean",
        "best@6/mean",
    ]
    assert not any(name.startswith("maj") for name in metrics)  # without a vote


def test_one_response_has_a_mean_and_nothing_else():
    assert process_validation_metrics(["d"], ["a"], {"reward": [0.5], "pred": ["x"]}) == {
        "d": {"reward": {"mean@1": 0.5}}
    }


def test_sources_are_kept_apart_and_prompts_weigh_the_same():
    sources = ["d", "e", "d", "d"]
    uids = ["a", "a", "b", "b"]  # a uid counts within its source
    reduced = process_validation_metrics(sources, uids, {"reward": [1.0, 5.0, 0.0, 0.0]})
    assert reduced["e"] == {"reward": {"mean@1": 5.0}}
    assert reduced["d"]["reward"]["mean@1"] == 1.0
    assert reduced["d"]["reward"]["mean@2"] == 0.0


def test_missing_values_are_left_out_and_text_is_no_variable():
    infos = {
        "acc": [True, None, float("nan"), False],
        "other": [None, None, None, None],
        "text": ["a", "b", "c", 4],
        "count": [np.int64(1), np.float32(3), 2, np.bool_(True)],
    }
    reduced = process_validation_metrics(["d"] * 4, ["a", "a", "b", "b"], infos)["d"]
    assert reduced["acc"] == {"mean@1": 0.5}
    assert reduced["count"]["mean@2"] == 1.75
    assert reduced.keys() == {"acc", "count"}


def test_a_vote_may_be_missing_or_unhashable_and_none_everywhere_is_no_vote():
    values = [0.0, 1.0, 1.0]
    votes = process_validation_metrics(["d"] * 3, ["a"] * 3, {"reward": values, "pred": [None, [1], [1]]})
    assert votes["d"]["reward"]["maj@3/mean"] == pytest.approx(win_probabilities((2, 1), 3)[0])
    none = process_validation_metrics(["d"] * 3, ["a"] * 3, {"reward": values, "pred": [None] * 3})
    assert not any(name.startswith("maj") for name in none["d"]["reward"])


def test_names_put_what_a_run_is_judged_by_in_core():
    infos = {"reward": [0.0, 1.0, 1.0, 0.0], "acc": [0, 1, 1, 0], "pred": ["x", "y", "y", "x"]}
    flat = validation_metric_names(process_validation_metrics(["open/d"] * 4, ["a"] * 4, infos))
    assert {name for name in flat if name.startswith("val-core/")} == {
        "val-core/open/d/acc/mean@4",
        "val-core/open/d/acc/best@4/mean",
        "val-core/open/d/acc/maj@4/mean",
    }
    for name in ("acc/std@4", "acc/best@2/mean", "acc/best@4/std", "acc/worst@4/mean", "reward/mean@4"):
        assert f"val-aux/open/d/{name}" in flat
    without_acc = validation_metric_names(process_validation_metrics(["d"], ["a"], {"reward": [1.0]}))
    assert without_acc == {"val-core/d/reward/mean@1": 1.0}


@pytest.mark.parametrize(
    ("sizes", "draws"), [((2, 1), 2), ((1, 1, 1), 3), ((3, 2, 1), 4), ((2, 2, 1), 5), ((4,), 3), ((1, 1, 1, 1, 1), 6)]
)
def test_win_probabilities_equal_enumeration(sizes, draws):
    answers = [c for c, size in enumerate(sizes) for _ in range(size)]
    wins = np.zeros(len(sizes))
    for drawn in itertools.product(answers, repeat=draws):
        counts = np.bincount(drawn, minlength=len(sizes))
        wins += (counts == counts.max()) / (counts == counts.max()).sum()
    np.testing.assert_allclose(win_probabilities(sizes, draws), wins / len(answers) ** draws, atol=1e-12)


def test_many_answers_are_drawn_and_come_near_the_exact_probability():
    exact = win_probabilities((7, 5, 4), 16)
    drawn = win_probabilities((14, 10, 8), 16)  # the same shares of 32 answers
    assert drawn == win_probabilities.__wrapped__((14, 10, 8), 16)
    assert sum(drawn) == pytest.approx(1)
    np.testing.assert_allclose(drawn, exact, atol=4 * 0.5 / math.sqrt(2000))
    assert drawn != exact
