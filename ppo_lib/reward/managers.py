"""Reward managers: what turns a finished response into one score. They run at the caller; scorers may run elsewhere."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, cast

from ppo_lib.errors import ConfigError
from ppo_lib.load_object import load_object
from ppo_lib.reward.sample import RewardResult, RewardSample

Scorer = Callable[[RewardSample, str], Awaitable[RewardResult]]
"""`await scorer(sample, solution_str)`: the configured scorer, wherever it runs, with errors that name the sample."""

Manager = TypeVar("Manager", bound="type[RewardManager]")
MANAGERS: dict[str, type[RewardManager]] = {}


def register_reward_manager(name: str) -> Callable[[Manager], Manager]:
    """Make a `RewardManager` known as `reward.reward_manager.name`."""

    def add(cls: Manager) -> Manager:
        if MANAGERS.get(name, cls) is not cls:
            raise ConfigError(f"a reward manager named {name!r} exists already: {MANAGERS[name].__qualname__}.")
        MANAGERS[name] = cls
        return cls

    return add


class RewardManager:
    """Base class. `reward.reward_kwargs` arrive as keyword arguments after the first two."""

    def __init__(self, tokenizer: Any, scorer: Scorer):
        self.tokenizer, self.scorer = tokenizer, scorer

    async def run_single(self, sample: RewardSample) -> RewardResult:
        """The score of one sample. Called for many samples at once."""
        raise NotImplementedError


@register_reward_manager("naive")
class NaiveRewardManager(RewardManager):
    """Decode the response, ask the scorer, take its answer."""

    async def run_single(self, sample: RewardSample) -> RewardResult:
        """See `decode_response` for what the scorer gets to read."""
        text = sample.solution_str
        return await self.scorer(sample, decode_response(self.tokenizer, sample.response_ids) if text is None else text)


def decode_response(tokenizer: Any, response_ids: Sequence[int]) -> str:
    """The text of a response without the special tokens at its end, and with every other special token as text.

    What ends a response (`<|im_end|>`, padding) is no part of the answer, and scorers that compare whole strings must
    not see it. Within the response nothing is hidden: a scorer that cannot see a special token would reward
    `7<|im_start|>` for `7`, and the policy would learn to write it.
    """
    special = set(tokenizer.all_special_ids)
    ids = list(response_ids)
    while ids and ids[-1] in special:
        ids.pop()
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def create_manager(config: Any, tokenizer: Any, scorer: Scorer) -> RewardManager:
    """The manager that the section `reward` names. Raises `ConfigError` if there is none or it refuses its kwargs."""
    return check_manager(config)(tokenizer, scorer, **config.reward_kwargs)


def check_manager(config: Any) -> type[RewardManager]:
    """The class that the section `reward` names. Raises `ConfigError` if there is none, or not with these kwargs."""
    cls = manager_class(config.reward_manager)
    kwargs = dict(config.reward_kwargs)
    try:
        inspect.signature(cls).bind(None, None, **kwargs)  # stand for tokenizer and scorer
    except TypeError as error:
        raise ConfigError(
            f"reward.reward_kwargs: {cls.__name__} does not take {', '.join(kwargs)}: {error}."
        ) from error
    return cls


def manager_class(config: Any) -> type[RewardManager]:
    """The class of `reward.reward_manager`."""
    if config.source == "importlib":
        if not config.module.path:
            raise ConfigError("reward.reward_manager.module.path is not set, and source is importlib.")
        cls = load_object(config.module.path, config.module.name, "reward.reward_manager.module")
        if not (inspect.isclass(cls) and hasattr(cls, "run_single")):
            raise ConfigError(
                f"reward.reward_manager.module: {config.module.name} in {config.module.path} is no reward manager: "
                "expected a class with `async run_single(sample)`, such as a subclass of ppo_lib.reward.RewardManager."
            )
        return cast("type[RewardManager]", cls)
    if config.name not in MANAGERS:
        near = difflib.get_close_matches(config.name, MANAGERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(MANAGERS))}."
        raise ConfigError(f"reward.reward_manager.name: no reward manager {config.name!r}; {hint}")
    return MANAGERS[config.name]
