"""Names that a registry knows: checked when the file is read, not in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from ppo_lib.algorithms import names
from ppo_lib.errors import ConfigError


def _registered(find: Callable[[str], object]) -> AfterValidator:
    def check(name: str) -> str:
        find(name)  # raises a ConfigError that names the nearest
        return name

    return AfterValidator(check)


def _one_of(kind: str, known: dict[str, str]) -> AfterValidator:
    def check(name: str) -> str:
        if name not in known:
            raise names.unknown_name(kind, name, known)
        return name

    return AfterValidator(check)


def _from_two_tokens(name: str) -> str:
    if name.removesuffix("+") == "full":
        raise ConfigError(
            f"KL estimator {name!r} sums over the vocabulary and needs the logits of policy and reference side by side,"
            " which no pass over a batch keeps; it is a function of ppo_lib.algorithms.kl only. Use low_var_kl, or kl"
        )
    return name


def _choices(known: Iterable[str], *more: dict[str, str]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"enum": list(known)}, *more]})


_REFERENCE = {"type": "string", "pattern": r"^[\w.]+:\w+$", "title": "module:function"}

EstimatorName = Annotated[str, _registered(names.find_adv_estimator), _choices(names.ADV_ESTIMATORS, _REFERENCE)]
PolicyLossName = Annotated[str, _registered(names.find_policy_loss), _choices(names.POLICY_LOSSES, _REFERENCE)]
AggregationName = Annotated[str, _one_of("loss aggregation mode", names.LOSS_AGG_MODES), _choices(names.LOSS_AGG_MODES)]
KLName = Annotated[
    str, AfterValidator(_from_two_tokens), _one_of("KL estimator", names.KL_PENALTIES), _choices(names.KL_PENALTIES)
]
