"""Names that a registry knows: checked when the file is read, not in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

from ppo_lib.algorithms import names


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


def _choices(known: Iterable[str], *more: dict[str, str]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"enum": list(known)}, *more]})


_REFERENCE = {"type": "string", "pattern": r"^[\w.]+:\w+$", "title": "module:function"}

EstimatorName = Annotated[str, _registered(names.find_adv_estimator), _choices(names.ADV_ESTIMATORS, _REFERENCE)]
PolicyLossName = Annotated[str, _registered(names.find_policy_loss), _choices(names.POLICY_LOSSES, _REFERENCE)]
AggregationName = Annotated[str, _one_of("loss aggregation mode", names.LOSS_AGG_MODES), _choices(names.LOSS_AGG_MODES)]
KLName = Annotated[str, _registered(names.check_kl_penalty), _choices(names.KL_PENALTIES)]
