"""What holds for every estimator in the registry: a new one is tested by being registered."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppo_lib.algorithms import names
from ppo_lib.algorithms.registry import get_adv_estimator_fn

NAN = float("nan")
ESTIMATORS = sorted(names.ADV_ESTIMATORS)
GROUPED = sorted(name for name, row in names.ADV_ESTIMATORS.items() if row.compares_rollouts)
PER_TOKEN = ("token_level_rewards", "values", "old_log_probs", "sum_pi_squared", "rollout_is_weights")
PER_ROW = ("index", "reward_baselines", "reward_components")
quick = settings(max_examples=30, deadline=None)


def estimate(name, fields, **changed):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "every prompt has one rollout")
        return get_adv_estimator_fn(name)(**{"gamma": 0.9, "lam": 0.7, "config": None, **fields, **changed})


def fields_of(rewards, mask, index=None, seed=0):
    """Every keyword there is, for these rewards."""
    rows, width = rewards.shape
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.rand(rows, width, generator=generator)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": np.array(["only"] * rows if index is None else index, dtype=object),
        "values": torch.randn(rows, width, generator=generator),
        "old_log_probs": probabilities.log(),
        "sum_pi_squared": probabilities.square() + (1 - probabilities).square() / 3,
        "rollout_is_weights": 0.5 + torch.rand(rows, width, generator=generator),
        "reward_baselines": torch.randn(rows, generator=generator),
    }


def one_token(*scores, **keywords):
    return fields_of(torch.tensor(scores, dtype=torch.float32)[:, None], torch.ones(len(scores), 1), **keywords)


def rows_of(fields, chosen):
    """The fields of some rows."""
    return {key: value[chosen.numpy() if key == "index" else chosen] for key, value in fields.items()}


@st.composite
def batches(draw):
    """Every keyword there is: a mask with holes, empty rows too, ties, several rewards."""
    rows, width = draw(st.integers(1, 8)), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < draw(st.sampled_from([0.2, 0.6, 1.0]))
    rewards = torch.randn(rows, width, generator=generator)
    if draw(st.booleans()):
        rewards = rewards.round()  # so that ties are common
    uids = [f"prompt {i}" for i in torch.randint(0, 3, (rows,), generator=generator).tolist()]
    fields = fields_of(rewards, mask, uids, seed)
    if draw(st.booleans()):
        fields["reward_components"] = torch.randn(rows, 2, generator=generator).round(decimals=1)
    return fields


def close(results, others):
    for result, other in zip(results, others, strict=True):
        torch.testing.assert_close(result, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ESTIMATORS)
class TestEveryEstimator:
    @quick
    @given(fields=batches(), seed=st.integers(0, 2**31))
    def test_permuting_rows_permutes_advantages(self, name, fields, seed):
        order = torch.randperm(len(fields["index"]), generator=torch.Generator().manual_seed(seed))
        close(estimate(name, rows_of(fields, order)), [result[order] for result in estimate(name, fields)])

    @quick
    @given(fields=batches(), left=st.integers(0, 3), right=st.integers(0, 70))
    def test_extra_padding_changes_nothing(self, name, fields, left, right):
        width = fields["response_mask"].shape[1]
        padded = {
            key: torch.nn.functional.pad(fields[key], (left, right), value=False if key == "response_mask" else NAN)
            for key in (*PER_TOKEN, "response_mask")
        }
        results = estimate(name, fields, **padded)
        close([result[:, left : left + width] for result in results], estimate(name, fields))
        assert all(result[:, left + width :].abs().sum() == 0 for result in results)

    @quick
    @given(fields=batches())
    def test_the_mask_may_be_bool_int_or_float_and_what_it_hides_is_not_read(self, name, fields):
        expected, mask = estimate(name, fields), fields["response_mask"]
        for dtype in (torch.int64, torch.int32, torch.float32):
            for result, other in zip(estimate(name, fields, response_mask=mask.to(dtype)), expected, strict=True):
                assert torch.equal(result, other)
        hidden = {key: torch.where(mask, fields[key], NAN) for key in PER_TOKEN}
        for result, other in zip(estimate(name, fields, **hidden), expected, strict=True):
            assert torch.equal(result, other)

    @quick
    @given(fields=batches(), scale=st.sampled_from([1.0, 1e-30, 1e30, 3e38]))
    def test_finite_in_finite_float32_out_and_zero_off_the_mask(self, name, fields, scale):
        limit = torch.finfo(torch.float32).max
        large = {key: (fields[key] * scale).clamp(-limit, limit) for key in ("token_level_rewards", "values")}
        mask = fields["response_mask"]
        for result in estimate(name, fields, **large):
            assert result.dtype == torch.float32
            assert result.shape == mask.shape
            assert not bool(result.isnan().any())
            assert bool(result.isfinite().all())
            assert result[~mask].abs().sum() == 0

    @quick
    @given(fields=batches(), data=st.data())
    def test_a_row_without_policy_tokens_is_as_if_it_were_not_there(self, name, fields, data):
        row = data.draw(st.integers(0, len(fields["index"]) - 1))
        mask = fields["response_mask"].clone()
        mask[row] = False
        others = torch.arange(len(mask)) != row
        masked = fields | {"response_mask": mask}
        results = estimate(name, masked)
        assert all(result[row].abs().sum() == 0 for result in results)
        close([result[others] for result in results], estimate(name, rows_of(masked, others)))

    def test_equal_outcomes_and_a_perfect_baseline_leave_nothing_to_learn(self, name):
        fields = fields_of(torch.tensor([[0.0, 0.1], [0.0, 0.1]]), torch.ones(2, 2))
        perfect = {"values": torch.full((2, 2), 0.1), "reward_baselines": torch.full((2,), 0.1)}
        advantages, _ = estimate(name, fields, **perfect, gamma=1.0)
        assert advantages.abs().max().item() == 0

    def test_a_reward_on_a_tool_token_or_in_the_padding_is_not_read(self, name):
        mask = torch.tensor([[1, 0, 1, 0], [1, 0, 1, 0]])
        clean = torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
        dirty = torch.where(mask.bool(), clean, 5.0)
        close(estimate(name, fields_of(dirty, mask)), estimate(name, fields_of(clean, mask)))

    def test_an_outcome_on_the_last_policy_token_reaches_the_tokens_before_a_tool_answer(self, name):
        mask = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 0, 0, 1]])
        rewards = torch.tensor([[0.0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
        good, bad = estimate(name, fields_of(rewards, mask), gamma=1.0, lam=1.0)[1]
        kept = mask[0].bool()
        assert bool((good != bad)[kept][[0, 1, 2] if name != "grpo_passk" else [0]].all())

    def test_no_rows_give_no_rows(self, name):
        for result in estimate(name, fields_of(torch.zeros(0, 4), torch.zeros(0, 4))):
            assert result.shape == (0, 4)

    def test_nothing_but_empty_responses_gives_zeros(self, name):
        fields = fields_of(torch.full((3, 4), NAN), torch.zeros(3, 4))
        for result in estimate(name, fields):
            assert result.abs().sum().item() == 0


@pytest.mark.parametrize("name", GROUPED)
class TestEveryEstimatorThatComparesRollouts:
    @pytest.mark.parametrize("by_std", [True, False])
    def test_a_group_of_one_has_advantage_zero(self, name, by_std):
        fields = one_token(1.0, 3.0, 5.0, index=["alone", "x", "x"])
        advantages, _ = estimate(name, fields, norm_adv_by_std_in_grpo=by_std)
        assert advantages[0].item() == 0
        assert advantages[1].item() <= 0 < advantages[2].item()

    @pytest.mark.parametrize("count", [2, 3, 7, 16])
    @pytest.mark.parametrize("score", [0.0, 1.0, 0.1, -1 / 3, 1e4 + 0.3])
    def test_a_group_of_equal_outcomes_has_advantage_exactly_zero_beside_one_that_differs(self, name, count, score):
        equal, differing = [score] * count, [5.0, 1.0, 2.0]
        fields = one_token(*equal, *differing, index=["equal"] * count + ["differing"] * 3)
        advantages, _ = estimate(name, fields)
        assert advantages[:count].abs().max().item() == 0
        assert advantages[count].item() > 0

    def test_one_rollout_for_every_prompt_is_warned_about(self, name):
        with pytest.warns(UserWarning, match="every prompt has one rollout"):
            get_adv_estimator_fn(name)(**one_token(1.0, 0.0, index=["a", "b"]))

    def test_prompts_are_compared_by_uid_whatever_type_and_order_it_has(self, name):
        scores = (1.0, 10.0, 0.0, 30.0)
        expected, _ = estimate(name, one_token(*scores, index=["x", "y", "x", "y"]))
        for index in ([3, 1, 3, 1], [("a", 1), None, ("a", 1), None]):
            fields = one_token(*scores)
            fields["index"] = index
            close(estimate(name, fields)[:1], [expected])
