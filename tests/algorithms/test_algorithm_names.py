from __future__ import annotations

import subprocess
import sys

import pytest

import ppo_lib.algorithms as algorithms
from ppo_lib.algorithms import names
from ppo_lib.algorithms.registry import (
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
    register_policy_loss,
)
from ppo_lib.errors import ConfigError, FieldMissingError


def test_names_import_no_torch():
    code = (
        "import sys; from ppo_lib.algorithms import names; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_public_name_loads():
    for name in algorithms.__all__:
        assert callable(getattr(algorithms, name))
    with pytest.raises(AttributeError, match="no attribute 'grop'"):
        algorithms.grop  # noqa: B018


def test_every_row_leads_to_a_function():
    for name in names.ADV_ESTIMATORS:
        assert callable(get_adv_estimator_fn(name))
    for name in names.POLICY_LOSSES:
        assert callable(get_policy_loss_fn(name))


def test_gae_needs_a_critic_and_grpo_compares_rollouts():
    assert names.find_adv_estimator("gae").needs_critic
    assert not names.find_adv_estimator("gae").compares_rollouts
    assert names.find_adv_estimator("grpo").compares_rollouts
    assert not names.find_adv_estimator("grpo").needs_critic


@pytest.mark.parametrize(
    ("find", "wrong", "nearest"),
    [
        (names.find_adv_estimator, "grop", "grpo"),
        (names.find_adv_estimator, "GAE", "known are gae"),
        (names.find_policy_loss, "vanila", "vanilla"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(find, wrong, nearest):
    with pytest.raises(ConfigError, match=nearest):
        find(wrong)


@pytest.mark.parametrize("name", ["a:b:c", ":b", "a:", "a-b:c", "a.b:c d", "../x:y"])
def test_what_is_not_module_colon_function_is_unknown(name):
    with pytest.raises(ConfigError, match="unknown advantage estimator"):
        names.find_adv_estimator(name)


def test_a_function_of_ones_own_is_found_by_module_and_name():
    assert names.find_adv_estimator("os.path:join").needs == frozenset()
    function = get_policy_loss_fn("ppo_lib.algorithms.policy_losses.vanilla:compute_policy_loss_vanilla")
    assert function is get_policy_loss_fn("vanilla")


@pytest.mark.parametrize(
    ("reference", "message"),
    [("no_such_module:f", "cannot import 'no_such_module'"), ("os.path:no_such", "has no function 'no_such'")],
)
def test_a_reference_that_leads_nowhere_says_so(reference, message):
    with pytest.raises(ConfigError, match=message):
        get_adv_estimator_fn(reference)


@pytest.mark.usefixtures("_restored_tables")
class TestRegistering:
    def test_an_estimator_takes_the_keywords_it_names(self):
        @register_adv_est("mine", needs=["values"])
        def mine(token_level_rewards, response_mask, gamma=0.5):
            return token_level_rewards, response_mask, gamma

        result = get_adv_estimator_fn("mine")(token_level_rewards=1, response_mask=2, index=3, values=4, lam=5)
        assert result == (1, 2, 0.5)
        assert names.find_adv_estimator("mine").needs_critic

    def test_an_estimator_of_an_existing_pipeline_takes_everything(self):
        @register_adv_est("theirs")
        def theirs(token_level_rewards, response_mask, config, **kwargs):
            return config, kwargs

        result = get_adv_estimator_fn("theirs")(token_level_rewards=1, response_mask=2, config=3, index=4, gamma=5)
        assert result == (3, {"index": 4, "gamma": 5})
        for none in ({}, {"config": None}):  # a script without a configuration
            assert get_adv_estimator_fn("theirs")(token_level_rewards=1, response_mask=2, **none) == (None, {})

    def test_a_needed_field_that_is_not_there_is_named(self):
        with pytest.raises(FieldMissingError, match=r"estimator 'gae' needs values$"):
            get_adv_estimator_fn("gae")(token_level_rewards=1, response_mask=2, values=None)
        with pytest.raises(FieldMissingError, match=r"estimator 'grpo' needs index .the uid column.$"):
            get_adv_estimator_fn("grpo")(token_level_rewards=1, response_mask=2)

    def test_a_name_is_not_taken_twice(self):
        with pytest.raises(ConfigError, match=r"'grpo' is taken by ppo_lib\.algorithms\.advantages\.grpo"):
            register_adv_est("grpo")(lambda **kwargs: None)
        with pytest.raises(ConfigError, match="'vanilla' is taken"):
            register_policy_loss("vanilla")(lambda **kwargs: None)

    def test_a_notebook_cell_may_run_twice(self):
        def cell(result):
            @register_policy_loss("cell")
            def loss(*args):
                return result

        cell(1)
        cell(2)
        assert get_policy_loss_fn("cell")() == 2
