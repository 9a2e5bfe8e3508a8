"""What algorithms exist, where each lives and what it needs. Imports no torch: a config is checked in milliseconds.

A new family is one file with a function and one row here; `registry.py` adds rows at run time for functions of your
own. Where the name of an estimator or a policy loss is taken, `"module:function"` is taken too.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ppo_lib.errors import ConfigError


@dataclass(frozen=True)
class AdvEstimator:
    """One row of `ADV_ESTIMATORS`.

    `needs` holds names of envelope fields beyond rewards and mask: `values` (so a critic), `uid` (so the rollouts of
    one prompt are compared, and one rollout a prompt teaches nothing).
    """

    name: str
    function: str | Callable[..., Any]
    needs: frozenset[str] = frozenset()
    summary: str = ""
    paper: str = ""

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator reads `values`."""
        return "values" in self.needs

    @property
    def compares_rollouts(self) -> bool:
        """Whether the estimator compares the rollouts of one prompt, so that `rollout.n` should be above 1."""
        return "uid" in self.needs


@dataclass(frozen=True)
class PolicyLoss:
    """One row of `POLICY_LOSSES`."""

    name: str
    function: str | Callable[..., Any]
    summary: str = ""
    paper: str = ""


def _table(*rows: Any) -> dict[str, Any]:
    return {row.name: row for row in rows}


_GRPO = {
    "function": "ppo_lib.algorithms.advantages.grpo:compute_grpo_advantage",
    "needs": frozenset({"uid"}),
    "summary": "score minus the mean of its group, over the group's standard deviation",
    "paper": "arXiv:2402.03300; without the division arXiv:2503.20783",
}

ADV_ESTIMATORS: dict[str, AdvEstimator] = _table(
    AdvEstimator(
        "gae",
        "ppo_lib.algorithms.advantages.gae:compute_gae_advantage_return",
        needs=frozenset({"values"}),
        summary="exponentially weighted temporal differences of a critic, whitened over the batch",
        paper="arXiv:1506.02438",
    ),
    AdvEstimator("grpo", **_GRPO),
    AdvEstimator("grpo_vectorized", **_GRPO),
)

POLICY_LOSSES: dict[str, PolicyLoss] = _table(
    PolicyLoss(
        "vanilla",
        "ppo_lib.algorithms.policy_losses.vanilla:compute_policy_loss_vanilla",
        summary="PPO: the ratio clipped below and above, and from below again where the advantage is negative",
        paper="arXiv:1707.06347; dual clip arXiv:1912.09729; asymmetric clip arXiv:2503.14476",
    ),
)

LOSS_AGG_MODES: dict[str, str] = {
    "token-mean": "sum over tokens / number of tokens",
    "token-sum": "sum over tokens",
    "seq-mean-token-sum": "sum over tokens / number of sequences",
    "seq-mean-token-mean": "mean over a sequence's tokens, then mean over sequences",
    "seq-mean-token-sum-norm": "sum over tokens / (number of sequences * a constant horizon)",
}

_KL_FORMS: dict[str, str] = {
    "kl": "log ratio",
    "k1": "log ratio",
    "abs": "|log ratio|",
    "mse": "(log ratio)^2 / 2",
    "k2": "(log ratio)^2 / 2",
    "low_var_kl": "1/ratio - 1 + log ratio",
    "k3": "1/ratio - 1 + log ratio",
}
KL_PENALTIES: dict[str, str] = {
    **_KL_FORMS,
    **{f"{name}+": f"{form}, with the gradient of (log ratio)^2 / 2" for name, form in _KL_FORMS.items()},
}

KL_CONTROLLERS: dict[str, str] = {
    "fixed": "the coefficient stays kl_coef",
    "adaptive": "the coefficient moves to hold the KL at target_kl",
}


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a `name` of `kind` that nothing is known by, with the nearest name that is."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {kind} {name!r}: {hint}known are {', '.join(known)}")


def is_reference(name: object) -> bool:
    """Whether `name` has the form `"module:function"`."""
    if not isinstance(name, str) or name.count(":") != 1:
        return False
    module, function = name.split(":")
    return function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def _find(kind: str, name: str, table: Mapping[str, Any], row: Callable[..., Any]) -> Any:
    if name in table:
        return table[name]
    if is_reference(name):
        return row(name, name)
    error = unknown_name(kind, name, table)
    raise ConfigError(f"{error}; a function of your own is given as 'module:function'")


def find_adv_estimator(name: str) -> AdvEstimator:
    """The row of an advantage estimator, or of a `"module:function"`.

    Nothing is imported, so the row of a `"module:function"` states no needs: set `critic.enable` for one that reads
    `values`.
    """
    return _find("advantage estimator", name, ADV_ESTIMATORS, AdvEstimator)


def find_policy_loss(name: str) -> PolicyLoss:
    """The row of a policy loss, or of a `"module:function"`; nothing is imported."""
    return _find("policy loss", name, POLICY_LOSSES, PolicyLoss)
