from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lib.algorithms import names
from ppo_lib.algorithms.advantages.discount import discounted_sum_to_go
from ppo_lib.algorithms.registry import get_adv_estimator_fn
from ppo_lib.errors import BatchMismatchError

NAN = float("nan")
ESTIMATORS = sorted(names.ADV_ESTIMATORS)
GROUPED = sorted(name for name, row in names.ADV_ESTIMATORS.items() if row.compares_rollouts)
quick = settings(max_examples=40, deadline=None)


def estimate(name, rewards, mask, index=None, **keywords):
    index = np.zeros(len(rewards), dtype=object) if index is None else index
    values = keywords.pop("values", torch.zeros(rewards.shape))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "every prompt has one rollout")
        return get_adv_estimator_fn(name)(
            token_level_rewards=rewards, response_mask=mask, index=index, values=values, **keywords
        )


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


# ---------------------------------------------------------------- one rule for each edge


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("by_std", [True, False])
def test_a_group_of_one_has_advantage_zero(name, by_std):
    rewards, mask = column(1.0, 3.0, 5.0)
    advantages, _ = estimate(name, rewards, mask, index=["alone", "x", "x"], norm_adv_by_std_in_grpo=by_std)
    assert advantages[0].item() == 0
    assert advantages[1].item() < 0 < advantages[2].item()


@pytest.mark.parametrize("name", GROUPED)
def test_one_rollout_for_every_prompt_is_warned_about(name):
    rewards, mask = column(1.0, 0.0)
    with pytest.warns(UserWarning, match="every prompt has one rollout"):
        get_adv_estimator_fn(name)(token_level_rewards=rewards, response_mask=mask, index=["a", "b"])


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("count", [2, 3, 7, 16])
@pytest.mark.parametrize("score", [0.0, 1.0, 0.1, -1 / 3, 1e4 + 0.3])
def test_a_group_of_equal_scores_has_advantage_exactly_zero(name, count, score):
    advantages, _ = estimate(name, *column(*[score] * count))
    assert advantages.abs().max().item() == 0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_scores_and_a_perfect_critic_leave_nothing_to_learn(name):
    rewards = torch.tensor([[0.0, 0.1], [0.0, 0.1]])
    advantages, _ = estimate(name, rewards, torch.ones(2, 2), values=torch.full((2, 2), 0.1))
    assert advantages.abs().max().item() == 0


def test_a_reward_on_a_tool_token_or_in_the_padding_is_not_read():
    mask = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0]])
    clean = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    dirty = torch.where(mask.bool(), clean, 5.0)
    for name in ESTIMATORS:
        torch.testing.assert_close(estimate(name, dirty, mask), estimate(name, clean, mask))


def test_shapes_that_differ_are_refused():
    with pytest.raises(BatchMismatchError, match=r"values \(2, 3\)"):
        estimate("gae", torch.zeros(2, 4), torch.ones(2, 4), values=torch.zeros(2, 3))
    with pytest.raises(BatchMismatchError, match="index has 3 entries for 2 rows"):
        estimate("grpo", torch.zeros(2, 4), torch.ones(2, 4), index=["a", "b", "c"])


# ---------------------------------------------------------------- properties of every estimator


@st.composite
def batches(draw):
    """Rewards, a mask with holes, empty rows too, uids and values."""
    rows, width = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    mask = torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.2, 0.6, 1.0]))
    rewards = torch.randn(rows, width, generator=generator)
    if draw(st.booleans()):
        rewards = rewards.round()  # so that ties are common
    values = torch.randn(rows, width, generator=generator)
    uids = np.array([f"prompt {i}" for i in torch.randint(0, 3, (rows,), generator=generator).tolist()], dtype=object)
    return {"rewards": rewards, "mask": mask, "index": uids, "values": values, "gamma": 0.9, "lam": 0.7}


def close(results, others):
    for result, other in zip(results, others, strict=True):
        torch.testing.assert_close(result, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
class TestEveryEstimator:
    @quick
    @given(batch=batches(), seed=st.integers(0, 2**31))
    def test_permuting_rows_permutes_advantages(self, name, batch, seed):
        order = torch.randperm(len(batch["mask"]), generator=torch.Generator().manual_seed(seed))
        permuted = {
            k: v[order.numpy() if k == "index" else order] if k not in ("gamma", "lam") else v for k, v in batch.items()
        }
        close(estimate(name, **permuted), [result[order] for result in estimate(name, **batch)])

    @quick
    @given(batch=batches(), left=st.integers(0, 3), right=st.integers(0, 70))
    def test_extra_padding_changes_nothing(self, name, batch, left, right):
        width = batch["mask"].shape[1]
        padded = dict(batch)
        for key, fill in (("rewards", NAN), ("values", NAN), ("mask", False)):
            padded[key] = torch.nn.functional.pad(batch[key], (left, right), value=fill)
        results = estimate(name, **padded)
        close([result[:, left : left + width] for result in results], estimate(name, **batch))
        assert all(result[:, left + width :].abs().sum() == 0 for result in results)

    @quick
    @given(batch=batches())
    def test_the_mask_may_be_bool_int_or_float_and_what_it_hides_is_not_read(self, name, batch):
        expected = estimate(name, **batch)
        for dtype in (torch.int64, torch.int32, torch.float32):
            close(estimate(name, **batch | {"mask": batch["mask"].to(dtype)}), expected)
        hidden = {k: torch.where(batch["mask"], batch[k], NAN) for k in ("rewards", "values")}
        close(estimate(name, **batch | hidden), expected)

    @quick
    @given(batch=batches())
    def test_finite_float32_in_and_out_and_zero_off_the_mask(self, name, batch):
        for result in estimate(name, **batch):
            assert result.dtype == torch.float32
            assert result.shape == batch["mask"].shape
            assert bool(result.isfinite().all())
            assert result[~batch["mask"]].abs().sum() == 0

    @quick
    @given(batch=batches(), data=st.data())
    def test_a_row_without_policy_tokens_is_as_if_it_were_not_there(self, name, batch, data):
        row = data.draw(st.integers(0, len(batch["mask"]) - 1))
        mask = batch["mask"].clone()
        mask[row] = False
        others = torch.arange(len(mask)) != row
        results = estimate(name, **batch | {"mask": mask})
        without = {
            k: v if k in ("gamma", "lam") else v[others.numpy() if k == "index" else others] for k, v in batch.items()
        }
        assert all(result[row].abs().sum() == 0 for result in results)
        close([result[others] for result in results], estimate(name, **without))

    def test_no_rows_give_no_rows(self, name):
        for result in estimate(name, torch.zeros(0, 4), torch.zeros(0, 4), index=[]):
            assert result.shape == (0, 4)
