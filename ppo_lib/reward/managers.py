"""Reward managers: what turns a finished response into one score. They run at the caller; scorers may run elsewhere."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
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

    @classmethod
    def check(cls, **kwargs: Any) -> None:
        """Raise `ConfigError` for keyword arguments that cannot work. Called before a run, without an instance."""

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


OVERLONG_DEFAULTS: dict[str, Any] = {"enable": False, "len": 0, "penalty_factor": 1.0, "log": False}


@register_reward_manager("dapo")
class DapoRewardManager(RewardManager):
    """The scorer's answer, less a penalty that grows over the last tokens that fit (arXiv:2503.14476, section 3.4).

    With a response of l tokens, at most `max_resp_len`, and a buffer of `len` tokens before that:

        score + min(0, -penalty_factor (l - (max_resp_len - len)) / len)

    What the scorer said by itself is reported as `acc` unless it reports an `acc` of its own, since the score no longer
    says how often the policy is right; with `log`, `overlong_reward` and `overlong` are reported too.

    Args:
        tokenizer, scorer: see `RewardManager`.
        overlong_buffer_cfg: `enable`, `len` in tokens, `penalty_factor`, `log`.
        max_resp_len: most tokens of a response; None follows `data.max_response_length`.
    """

    def __init__(
        self,
        tokenizer: Any,
        scorer: Scorer,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
        max_resp_len: int | None = None,
    ):
        super().__init__(tokenizer, scorer)
        self.check(overlong_buffer_cfg=overlong_buffer_cfg, max_resp_len=max_resp_len)
        self.buffer = OVERLONG_DEFAULTS | dict(overlong_buffer_cfg or {})
        self.max_resp_len = max_resp_len

    @classmethod
    def check(cls, **kwargs: Any) -> None:
        """See `RewardManager.check`."""
        key, given = "reward.reward_kwargs.overlong_buffer_cfg", kwargs.get("overlong_buffer_cfg") or {}
        if not isinstance(given, Mapping):
            raise ConfigError(f"{key}={given!r}: expected {', '.join(OVERLONG_DEFAULTS)}")
        if unknown := sorted(given.keys() - OVERLONG_DEFAULTS.keys()):
            raise ConfigError(f"{key}.{unknown[0]} is not a key; there are {', '.join(OVERLONG_DEFAULTS)}")
        buffer, longest = OVERLONG_DEFAULTS | dict(given), kwargs.get("max_resp_len")
        if not buffer["enable"]:
            return
        if longest is None:
            raise ConfigError(f"{key}.enable=true needs reward.reward_kwargs.max_resp_len, the longest response")
        if not isinstance(buffer["len"], int) or not 0 < buffer["len"] <= longest:
            raise ConfigError(
                f"{key}.len={buffer['len']}: expected from 1 to {longest} tokens, the longest response; "
                f"{max(1, longest // 5)} would penalise its last fifth"
            )
        if buffer["penalty_factor"] < 0:
            raise ConfigError(
                f"{key}.penalty_factor={buffer['penalty_factor']} would reward length; set it to 0 or more"
            )

    async def run_single(self, sample: RewardSample) -> RewardResult:
        """See the class."""
        text = sample.solution_str
        answer = await self.scorer(
            sample, decode_response(self.tokenizer, sample.response_ids) if text is None else text
        )
        extra = {"acc": answer.score} | answer.extra
        penalty = self.overlong_reward(len(sample.response_ids))
        if self.buffer["enable"] and self.buffer["log"]:
            extra |= {"overlong_reward": penalty, "overlong": penalty < 0}
        return RewardResult(answer.score + penalty, extra)

    def overlong_reward(self, length: int) -> float:
        """0 up to the buffer, then falling evenly to minus `penalty_factor` where no more tokens fit."""
        if not self.buffer["enable"] or self.max_resp_len is None:
            return 0.0
        beyond = length - (self.max_resp_len - self.buffer["len"])
        return min(0.0, -self.buffer["penalty_factor"] * beyond / self.buffer["len"])


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
    cls = check_manager(config)
    return cls(tokenizer, scorer, **_kwargs_of(cls, config))


def _kwargs_of(cls: type[RewardManager], config: Any) -> dict[str, Any]:
    """`reward.reward_kwargs`, and the longest response for a manager that asks for `max_resp_len`."""
    kwargs = dict(config.reward_kwargs)
    if "max_resp_len" in inspect.signature(cls).parameters and kwargs.get("max_resp_len") is None:
        kwargs["max_resp_len"] = config.max_response_length
    return kwargs


def check_manager(config: Any) -> type[RewardManager]:
    """The class that the section `reward` names. Raises `ConfigError` if there is none, or not with these kwargs."""
    cls = manager_class(config.reward_manager)
    kwargs = _kwargs_of(cls, config)
    try:
        inspect.signature(cls).bind(None, None, **kwargs)  # stand for tokenizer and scorer
    except TypeError as error:
        hint = (
            " Set reward.reward_manager.name=dapo for the overlong penalty." if "overlong_buffer_cfg" in kwargs else ""
        )
        raise ConfigError(
            f"reward.reward_kwargs: {cls.__name__} does not take {', '.join(kwargs)}: {error}.{hint}"
        ) from error
    if issubclass(cls, RewardManager):
        cls.check(**kwargs)
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
