from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ppo_lib.algorithms.advantages.discount import discounted_sum_to_go
from ppo_lib.algorithms.registry import get_adv_estimator_fn
from ppo_lib.errors import BatchMismatchError, FieldMissingError

NAN = float("nan")


def estimate(name, rewards, mask, index=None, **keywords):
    index = np.zeros(len(rewards), dtype=object) if index is None else index
    return get_adv_estimator_fn(name)(token_level_rewards=rewards, response_mask=mask, index=index, **keywords)


def column(*scores):
    """One token a row."""
    return torch.tensor(scores, dtype=torch.float32)[:, None], torch.ones(len(scores), 1)


# ---------------------------------------------------------------- literal arrays


@pytest.mark.parametrize(("case", "gamma", "lam"), [("gae g=1 l=1", 1.0, 1.0), ("gae g=.9 l=.8", 0.9, 0.8)])
def test_gae_golden(golden, case, gamma, lam):
    inputs = golden["inputs"]
    mask = torch.tensor(inputs["mask"])
    results = estimate(
        "gae",
        torch.tensor(inputs["token_level_rewards"]),
        mask,
        values=torch.tensor(inputs["values"]),
        gamma=gamma,
        lam=lam,
    )
    for result, expected in zip(results, ("advantages", "returns"), strict=True):
        torch.testing.assert_close(result, torch.tensor(golden[case][expected]) * mask, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("case", "by_std"), [("grpo", True), ("grpo nostd", False)])
@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized"])
def test_grpo_golden(golden, name, case, by_std):
    inputs = golden["inputs"]
    advantages, returns = estimate(
        name,
        torch.tensor(inputs["token_level_rewards"]),
        torch.tensor(inputs["mask"]),
        np.array(inputs["uid"], dtype=object),
        norm_adv_by_std_in_grpo=by_std,
    )
    torch.testing.assert_close(advantages, torch.tensor(golden[case]["advantages"]), atol=1e-5, rtol=0)
    torch.testing.assert_close(returns, advantages)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [([1, 0, 0], [1.155, -0.577, -0.577]), ([0, 1, 1], [-1.155, 0.577, 0.577])],
)
def test_grpo_by_hand(scores, expected):
    advantages, _ = estimate("grpo", *column(*scores))
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-3)


def test_grpo_compares_within_a_prompt_only():
    advantages, _ = estimate("grpo", *column(1, 10, 0, 30), index=["x", "y", "x", "y"], norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [0.5, -10, -0.5, 10]


def test_gae_carries_value_and_return_over_a_tool_span():
    rewards = torch.tensor([[0.0, NAN, NAN, 1.0]])
    mask = torch.tensor([[1, 0, 0, 1]])
    values = torch.tensor([[0.5, NAN, NAN, 0.25]])
    advantages, returns = estimate("gae", rewards, mask, values=values, gamma=0.5, lam=0.5)
    # the last token: A = 1 - 0.25; the first: delta = 0.5 * 0.25 - 0.5, A = delta + 0.25 * 0.75 = -0.1875
    torch.testing.assert_close(returns, torch.tensor([[-0.1875 + 0.5, 0, 0, 1.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[-(0.5**0.5), 0, 0, 0.5**0.5]]))  # two numbers, whitened


def test_gae_with_a_tool_span_equals_gae_without_it():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(5, 90, generator=generator), torch.randn(5, 90, generator=generator)
    mask = torch.rand(5, 90, generator=generator) < 0.6
    mask[:, :50] = mask[:1, :50]  # the same holes in every row, so that cutting them out keeps a rectangle
    mask[:, 50:] = mask[:1, 50:]
    kept = mask[0]
    with_span = estimate("gae", rewards, mask, values=values, gamma=0.97, lam=0.9)
    without = estimate(
        "gae", rewards[:, kept], torch.ones(5, int(kept.sum())), values=values[:, kept], gamma=0.97, lam=0.9
    )
    for left, right in zip(with_span, without, strict=True):
        torch.testing.assert_close(left[:, kept], right)


def test_lam_zero_is_the_one_step_difference_and_lam_one_the_return():
    rewards, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3)
    values = torch.tensor([[0.5, 1.5, 2.5]])
    _, one_step = estimate("gae", rewards, mask, values=values, gamma=1.0, lam=0.0)
    assert one_step.tolist() == [[1 + 1.5, 2 + 2.5, 4]]
    _, whole = estimate("gae", rewards, mask, values=values, gamma=1.0, lam=1.0)
    assert whole.tolist() == [[7, 6, 4]]


@pytest.mark.parametrize("width", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 1.0])
def test_discounted_sum_equals_the_recurrence(width, decay):
    x = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    expected = torch.zeros(3, width, dtype=torch.float64)
    later = torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(width)):
        later = x[:, t].double() + decay * later
        expected[:, t] = later
    torch.testing.assert_close(discounted_sum_to_go(x, decay).double(), expected, atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- the others, worked by hand

# Two prompts: lengths 1, 2, 3 with outcomes 1, 0, 0 and lengths 2, 1, 2 with outcomes 3, 1, 3.
MASK = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0]])
REWARDS = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 2, 0], [1, 0, 0], [0, 3, 0]])
UIDS = np.array(["x", "x", "x", "y", "y", "y"], dtype=object)


def of_rows(name, **keywords):
    """The advantage of each row on its tokens, where all tokens of a row have one."""
    advantages, _ = estimate(name, REWARDS, MASK, UIDS, **keywords)
    for row, mask in zip(advantages, MASK.bool(), strict=True):
        assert len(set(row[mask].tolist())) == 1
        assert row[~mask].abs().sum() == 0
    return advantages[:, 0].tolist()


@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized"])
def test_rloo_by_hand(name):
    assert of_rows(name) == pytest.approx([1 - 0, 0 - 1 / 2, 0 - 1 / 2, 3 - 2, 1 - 3, 3 - 2])


def test_opo_by_hand():
    first, second = (1 * 1) / 6, (2 * 3 + 1 * 1 + 2 * 3) / 5  # weighted by length
    assert of_rows("opo") == pytest.approx([1 - first, -first, -first, 3 - second, 1 - second, 3 - second])


def test_gpg_by_hand():
    alpha = 6 / 4  # four of six outcomes are not 0
    expected = [alpha * x for x in (2 / 3, -1 / 3, -1 / 3, 2 / 3, -4 / 3, 2 / 3)]
    assert of_rows("gpg") == pytest.approx(expected)


def test_grpo_passk_by_hand():
    std = math.sqrt((4 / 9 + 1 / 9 + 1 / 9) / 2)
    assert of_rows("grpo_passk") == pytest.approx([1 / std, 0, 0, 0, 0, 0], abs=1e-4)  # the winners of y are two
    assert of_rows("grpo_passk", norm_adv_by_std_in_grpo=False) == [1, 0, 0, 0, 0, 0]


def test_grpo_passk_leads_over_the_runner_up():
    advantages, _ = estimate("grpo_passk", *column(2, 7, 4.5), norm_adv_by_std_in_grpo=False)
    assert advantages[:, 0].tolist() == [0, 2.5, 0]


def test_remax_by_hand():
    baselines = torch.tensor([0.5, 0.5, 0.5, 2, 2, 2])
    advantages, returns = estimate("remax", REWARDS, MASK, reward_baselines=baselines)
    to_go = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 0], [3, 2, 0], [1, 0, 0], [3, 3, 0]])
    assert returns.tolist() == to_go.tolist()
    assert advantages.tolist() == ((to_go - baselines[:, None]) * MASK).tolist()


def test_reinforce_plus_plus_by_hand():
    rewards, mask = torch.tensor([[0.0, 4.0, NAN], [1.0, 0.0, 2.0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages, returns = estimate("reinforce_plus_plus", rewards, mask, gamma=0.5)
    assert returns.tolist() == [[2, 4, 0], [1.5, 1, 2]]
    deviation = math.sqrt((0.01 + 3.61 + 0.36 + 1.21 + 0.01) / 4)  # about their mean 2.1
    expected = torch.tensor([[-0.1, 1.9, 0], [-0.6, -1.1, -0.1]]) / deviation
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)


def test_reinforce_plus_plus_carries_returns_over_a_tool_span():
    rewards, mask = torch.tensor([[0.0, NAN, NAN, 0.0, 8.0]]), torch.tensor([[1, 0, 0, 1, 1]])
    _, returns = estimate("reinforce_plus_plus", rewards, mask, gamma=0.5)
    assert returns.tolist() == [[2, 0, 0, 4, 8]]


def test_reinforce_plus_plus_baseline_by_hand():
    centred = [2 / 3, -1 / 3, -1 / 3, 2 / 3, -4 / 3, 2 / 3]
    tokens = [c for c, length in zip(centred, (1, 2, 3, 2, 1, 2)) for _ in range(length)]
    mean = sum(tokens) / 11
    deviation = math.sqrt(sum((c - mean) ** 2 for c in tokens) / 10)
    expected = [(c - mean) / deviation for c in centred]
    assert of_rows("reinforce_plus_plus_baseline") == pytest.approx(expected, abs=1e-5)


def test_gdpo_keeps_apart_what_a_sum_of_rewards_would_merge():
    # the totals of the first two rows are equal, but each component normalised on its own tells them apart:
    # (1, 0, 0) gives 2, -1, -1 over sqrt(3), and (0, 10, 0) the same the other way round
    components = torch.tensor([[10.0, 0.0], [0.0, 10.0], [0.0, 0.0], [0.0, 5.0]])
    rewards, mask = components.sum(dim=1, keepdim=True), torch.ones(4, 1)
    advantages, _ = estimate("gdpo", rewards, mask, index=["x", "x", "x", "y"], reward_components=components)
    total = torch.tensor([2 - 1, -1 + 2, -1 - 1, 0]) / math.sqrt(3)  # row 3 is alone and counts with 0
    deviation = math.sqrt((total - total.mean()).square().sum() / 3)
    expected = (total - total.mean()) / deviation
    assert advantages[:3, 0].tolist() == pytest.approx(expected[:3].tolist(), abs=1e-5)
    assert advantages[3].item() == 0


def test_gdpo_weighs_components():
    components, mask = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.ones(2, 1)
    fields = {"index": ["x", "x"], "reward_components": components}
    even, _ = estimate("gdpo", components.sum(dim=1, keepdim=True), mask, **fields)
    assert even.abs().max().item() < 1e-6  # what the first gains by one reward it loses by the other
    config = SimpleNamespace(gdpo_reward_weights=(3.0, 1.0))
    weighed, _ = estimate("gdpo", components.sum(dim=1, keepdim=True), mask, **fields, config=config)
    assert weighed[:, 0].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])
    config = SimpleNamespace(gdpo_reward_weights=(1.0, 1.0, 1.0))
    with pytest.raises(BatchMismatchError, match="has 3 values for 2 rewards"):
        estimate("gdpo", components.sum(dim=1, keepdim=True), mask, **fields, config=config)


def test_optimal_token_baseline_by_hand():
    # one token that the policy was sure of (w = 1 - 2 + 1 = 0), others with w = 1 - 2/2 + 1/2 = 1/2 or 1 - 0 + 1 = 2
    probabilities = torch.tensor([[0.5, 0.5, 0.5], [1.0, 0.5, 1.0], [1e-30, 1.0, NAN]])
    squares = torch.tensor([[0.5, 0.5, 0.5], [1.0, 0.5, 1.0], [1.0, 1.0, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 0]])
    rewards = torch.tensor([[0.0, 0.0, 4.0], [1.0, 0.0, 9.0], [0.0, 2.0, 9.0]])
    advantages, returns = estimate(
        "optimal_token_baseline", rewards, mask, old_log_probs=probabilities.log(), sum_pi_squared=squares
    )
    assert returns.tolist() == [[4, 4, 4], [1, 0, 0], [2, 2, 0]]
    first = (0.5 * 4 + 0 * 1 + 2 * 2) / 2.5
    second = (1 * 4 + 0.5 * 0 + 2 * 2) / 3.5
    expected = torch.tensor([[4 - first, 4 - second, 4 - 0], [1 - first, 0 - second, 0], [2 - first, 2 - second, 0]])
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)  # behind the last sibling there is no baseline


def test_optimal_token_baseline_squares_importance_weights():
    rewards, mask = column(3.0, 0.0)
    half = {"old_log_probs": torch.full((2, 1), 0.5).log(), "sum_pi_squared": torch.full((2, 1), 0.5)}
    weights = torch.tensor([[2.0], [1.0]])
    advantages, _ = estimate("optimal_token_baseline", rewards, mask, **half, rollout_is_weights=weights)
    baseline = (4 * 3 + 1 * 0) / 5
    assert advantages[:, 0].tolist() == pytest.approx([3 - baseline, -baseline])


def test_tir_optimal_token_baseline_lines_policy_tokens_up_over_tool_answers():
    with_tool = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 0]])
    without = torch.tensor([[1, 1], [1, 1]])
    probabilities = torch.tensor([[0.5, NAN, NAN, 0.2], [0.3, 0.6, NAN, NAN]])
    packed = torch.tensor([[0.5, 0.2], [0.3, 0.6]])
    results = estimate(
        "tir_optimal_token_baseline",
        torch.tensor([[0, 7, 7, 1.0], [0, 0, 7, 7]]),
        with_tool,
        old_log_probs=probabilities.log(),
        sum_pi_squared=probabilities,
    )
    expected = estimate(
        "optimal_token_baseline",
        torch.tensor([[0, 1.0], [0, 0]]),
        without,
        old_log_probs=packed.log(),
        sum_pi_squared=packed,
    )
    for result, packed_result in zip(results, expected, strict=True):
        torch.testing.assert_close(result[with_tool.bool()], packed_result.view(-1))


@pytest.mark.parametrize(
    ("case", "name", "keywords"),
    [
        ("grpo_passk", "grpo_passk", {}),
        ("rloo", "rloo", {}),
        ("opo", "opo", {}),
        ("gpg", "gpg", {}),
        ("reinforce_plus_plus g=.9", "reinforce_plus_plus", {"gamma": 0.9}),
        ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", {}),
        ("remax", "remax", {"reward_baselines": torch.tensor([0.5, 0.5, 0.5, 1, 1, 1])}),
        ("gdpo(fallback)", "gdpo", {}),
        (
            "optimal_token_baseline",
            "optimal_token_baseline",
            {"old_log_probs": torch.full((6, 4), 0.5).log(), "sum_pi_squared": torch.full((6, 4), 0.5)},
        ),
    ],
)
def test_golden(golden, case, name, keywords):
    inputs = golden["inputs"]
    mask = torch.tensor(inputs["mask"])
    rewards, uids = torch.tensor(inputs["token_level_rewards"]), np.array(inputs["uid"], dtype=object)
    for result, expected in zip(estimate(name, rewards, mask, uids, **keywords), ("advantages", "returns")):
        torch.testing.assert_close(result, torch.tensor(golden[case][expected]) * mask, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- what is refused


def test_shapes_that_differ_are_refused():
    with pytest.raises(BatchMismatchError, match=r"values \(2, 3\)"):
        estimate("gae", torch.zeros(2, 4), torch.ones(2, 4), values=torch.zeros(2, 3))
    with pytest.raises(BatchMismatchError, match="index has 3 entries for 2 rows"):
        estimate("grpo", torch.zeros(2, 4), torch.ones(2, 4), index=["a", "b", "c"])
    with pytest.raises(BatchMismatchError, match="one entry for each of 2 rows"):
        estimate("remax", torch.zeros(2, 4), torch.ones(2, 4), reward_baselines=torch.zeros(3))
    with pytest.raises(BatchMismatchError, match="components"):
        estimate("gdpo", torch.zeros(2, 4), torch.ones(2, 4), reward_components=torch.zeros(3, 2))


def test_a_field_that_is_missing_is_named():
    with pytest.raises(FieldMissingError, match="'remax' needs reward_baselines"):
        estimate("remax", torch.zeros(2, 4), torch.ones(2, 4))
    with pytest.raises(FieldMissingError, match="needs old_log_probs, sum_pi_squared"):
        estimate("optimal_token_baseline", torch.zeros(2, 4), torch.ones(2, 4))
