"""From a name in a configuration to the function it stands for, and how to add your own.

    @register_adv_est("my_estimator", needs=["uid"])
    def my_estimator(token_level_rewards, response_mask, index, **kwargs):
        return advantages, returns

A registration holds in the process that runs it. An estimator runs in the driver; a policy loss runs in every worker
process, so give it as `actor.policy_loss.loss_mode=my_module:my_loss` unless the workers are local.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, MutableMapping
from importlib import import_module
from typing import Any, TypeVar

from ppo_lib.algorithms.names import (
    ADV_ESTIMATORS,
    POLICY_LOSSES,
    AdvEstimator,
    PolicyLoss,
    find_adv_estimator,
    find_policy_loss,
)
from ppo_lib.errors import ConfigError, FieldMissingError

F = TypeVar("F", bound=Callable[..., Any])


def register_adv_est(name: str, needs: Iterable[str] = ()) -> Callable[[F], F]:
    """Make the decorated advantage estimator known as `name`.

    Args:
        name: what `algorithm.adv_estimator` will say.
        needs: the envelope fields it reads beyond rewards and mask: `values` asks for a critic, `uid` for groups.

    Raises:
        ConfigError: another function has that name.
    """

    def register(function: F) -> F:
        _add(ADV_ESTIMATORS, AdvEstimator(name, function, frozenset(needs), inspect.getdoc(function) or ""))
        return function

    return register


def register_policy_loss(name: str, of_mini_batch: Callable[..., Any] | None = None) -> Callable[[F], F]:
    """Make the decorated policy loss known as `name`, as `actor.policy_loss.loss_mode` will say.

    Args:
        name: the name.
        of_mini_batch: what the loss has to find out from the whole mini-batch, see `names.PolicyLoss`.

    Raises:
        ConfigError: another function has that name.
    """

    def register(function: F) -> F:
        _add(POLICY_LOSSES, PolicyLoss(name, function, inspect.getdoc(function) or "", of_mini_batch=of_mini_batch))
        return function

    return register


def get_adv_estimator_fn(name: str) -> Callable[..., Any]:
    """The estimator called `name`, or the one at `"module:function"`.

    Call it with every keyword there is (token_level_rewards, response_mask, index, values, old_log_probs,
    sum_pi_squared, reward_baselines, gamma, lam, norm_adv_by_std_in_grpo, config): it takes those it names, and raises
    `FieldMissingError` for one it cannot do without. It returns (advantages, returns), both (B, R) float32.
    """
    return _taking_what_it_names(name, _load(find_adv_estimator(name).function))


def get_policy_loss_fn(name: str) -> Callable[..., Any]:
    """The policy loss called `name`, or the one at `"module:function"`.

    It is called with (old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights) and
    returns (loss, metrics), see `policy_losses`.
    """
    return _load(find_policy_loss(name).function)


def get_of_mini_batch_fn(name: str) -> Callable[..., Any] | None:
    """What the policy loss called `name` has to find out from a whole mini-batch, if anything: `names.PolicyLoss`."""
    of_mini_batch = find_policy_loss(name).of_mini_batch
    return None if of_mini_batch is None else _load(of_mini_batch)


def _add(table: MutableMapping[str, Any], row: Any) -> None:
    known = table.get(row.name)
    if known is not None and _place(known.function) != _place(row.function):
        raise ConfigError(f"the name {row.name!r} is taken by {_place(known.function)}; choose another")
    table[row.name] = row  # the same place again: a notebook cell or a reloaded module, whose newest version counts


def _place(function: str | Callable[..., Any]) -> str:
    return function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"


def _load(place: str | Callable[..., Any]) -> Callable[..., Any]:
    if not isinstance(place, str):
        return place
    module_name, function_name = place.split(":")
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(f"{place!r}: cannot import {module_name!r}: {error}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{place!r}: {module_name!r} has no function {function_name!r}")
    return function


def _taking_what_it_names(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    required = [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]

    @functools.wraps(function)
    def estimator(**available: Any) -> Any:
        available.setdefault("config", None)
        missing = [key for key in required if available.get(key) is None and key != "config"]
        if missing:
            listed = ", ".join("index (the uid column)" if key == "index" else key for key in missing)
            raise FieldMissingError(f"advantage estimator {name!r} needs {listed}")
        return function(**{key: value for key, value in available.items() if takes_all or key in parameters})

    return estimator
