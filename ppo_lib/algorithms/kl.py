"""How far the policy is from the reference, and how much that costs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ppo_lib.algorithms.masked import distance, log_ratio
from ppo_lib.algorithms.names import KL_CONTROLLERS, KL_FROM_LOGITS, KL_PENALTIES, unknown_name
from ppo_lib.errors import BatchMismatchError, ConfigError

K3_MAX = 10.0
"""Upper bound on k3, which grows like 1/ratio: one token the policy all but gave up must not outweigh a whole batch."""


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str, mask: Tensor | None = None) -> Tensor:
    """Estimate KL(policy || reference) on each token the policy sampled, from the two log-probabilities.

    With d = logprob - ref_logprob (http://joschu.net/blog/kl-approx.html):

        kl, k1           d                     unbiased value, may be negative
        abs              |d|                   no gradient while that is a rounding error, see `masked.distance`
        mse, k2          d^2 / 2               the gradient of its mean is that of the KL
        low_var_kl, k3   exp(-d) - 1 + d       unbiased value, never negative; at most `K3_MAX`

    The means of k1 and k3 have the right value but not the right gradient, so each name also comes with a trailing
    `+`: that value with the gradient of k2 (straight-through). `full` is the KL itself, not an estimate: see `full_kl`.

    Args:
        logprob: (b, R) float32; for `full` the logits (b, R, V).
        ref_logprob: the same of the reference.
        kl_penalty: one of the names.
        mask: (b, R), optional: 0 with zero gradient where it is 0, whatever stands there.

    Returns:
        (b, R) float32.
    """
    if kl_penalty in KL_FROM_LOGITS:
        return full_kl(logprob, ref_logprob, mask)
    if kl_penalty not in KL_PENALTIES:
        raise unknown_name("kl_penalty", kl_penalty, KL_PENALTIES | KL_FROM_LOGITS)
    d = log_ratio(logprob, ref_logprob, mask)
    value = _kl_value(d, kl_penalty.removesuffix("+"))
    if not kl_penalty.endswith("+"):
        return value
    surrogate = _kl_value(d, "k2")
    return value.detach() + (surrogate - surrogate.detach())


def _kl_value(d: Tensor, form: str) -> Tensor:
    if form in ("kl", "k1"):
        return d
    if form == "abs":
        return distance(d)
    if form in ("mse", "k2"):
        return 0.5 * d.square()
    return ((-d).exp() - 1 + d).clamp(max=K3_MAX)  # low_var_kl, k3


def full_kl(logits: Tensor, ref_logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """KL(policy || reference) at each token, over the whole vocabulary.

        sum_v p_v (log p_v - log q_v),    p = softmax(logits), q = softmax(ref_logits)

    Exact in value and gradient, so that `full+` is the same. Log ratios are clamped like all others.

    Args:
        logits: (b, R, V) float32.
        ref_logits: (b, R, V) float32.
        mask: (b, R), optional: 0 with zero gradient where it is 0, whatever stands there.

    Returns:
        (b, R) float32.
    """
    if logits.dim() != 3 or logits.shape != ref_logits.shape:
        raise BatchMismatchError(
            "full takes logits (rows, tokens, vocabulary) of both models, "
            f"got {tuple(logits.shape)} and {tuple(ref_logits.shape)}"
        )
    if mask is not None:
        logits, ref_logits = (torch.where(mask.bool()[..., None], x, 0) for x in (logits, ref_logits))
    log_p, log_q = logits.log_softmax(dim=-1), ref_logits.log_softmax(dim=-1)
    kl = (log_p.exp() * log_ratio(log_p, log_q)).sum(dim=-1)
    return kl if mask is None else torch.where(mask.bool(), kl, 0)


class FixedKLController:
    """A KL coefficient that stays as it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps: nothing, so that a resumed run takes the coefficient of its own configuration."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing was kept."""


class AdaptiveKLController:
    """A KL coefficient that rises while the KL is above its target and falls while it is below (arXiv:1909.08593).

    value *= 1 + clip(kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ConfigError(f"kl_ctrl needs target_kl and horizon above 0, got {target_kl} and {horizon}")
        self.value = float(init_kl_coef)
        self.target_kl = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient after `n_steps` sequences whose mean KL was `current_kl`."""
        if not math.isfinite(current_kl):
            raise ValueError(f"the KL to the reference is {current_kl}; the coefficient cannot follow it")
        error = min(max(float(current_kl) / self.target_kl - 1, -0.2), 0.2)
        factor = 1 + error * n_steps / self.horizon
        if factor <= 0:
            raise ConfigError(
                f"kl_ctrl.horizon={self.horizon:g} is below a fifth of the {n_steps} sequences of a step, which would "
                f"turn the KL coefficient negative; use {n_steps} or more"
            )
        self.value *= factor

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from a kept coefficient."""
        self.value = float(state["value"])


def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    """The controller an `algorithm.kl_ctrl` section describes (type, kl_coef, target_kl, horizon)."""
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise unknown_name("kl_ctrl.type", kl_ctrl.type, KL_CONTROLLERS)
