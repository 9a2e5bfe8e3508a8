"""The settings a policy loss reads, apart from the file they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ppo_lib.algorithms.aggregate import Denominators, denominators_of
from ppo_lib.errors import ConfigError


@dataclass(frozen=True)
class PolicyLossSettings:
    """The settings of single losses, as in `actor.policy_loss`, which holds the same defaults."""

    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None


@dataclass(frozen=True)
class LossConfig:
    """What every policy loss takes as `config`; the names are those of `actor_rollout_ref.actor`.

    Args:
        clip_ratio: how far the ratio may leave 1.
        clip_ratio_low, clip_ratio_high: the same below and above 1; None follows `clip_ratio`.
        clip_ratio_c: the bound on the loss of a token with negative advantage, in multiples of -advantage; above 1.
        loss_scale_factor: the horizon of `seq-mean-token-sum-norm`; None leaves that of `denominators`.
        tau_pos, tau_neg: how fast sapo's gate closes at good and at bad advantages.
        policy_loss: the settings of single losses (`actor.policy_loss`).
        denominators: those of the whole mini-batch; None takes each call's mask for all of it.
        mini_batch: what the loss's `of_mini_batch` function (see `names.PolicyLoss`) found in the whole mini-batch;
            None takes each call for all of it.
        draws: (b, R) random numbers from 0 to 1 for a loss that draws tokens (see `names.PolicyLoss`), the same for a
            token wherever its row lies; None draws anew.
    """

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    loss_scale_factor: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    policy_loss: Any = PolicyLossSettings()
    denominators: Denominators | None = None
    mini_batch: Any = None
    draws: Tensor | None = None

    def __post_init__(self) -> None:
        if self.clip_ratio_c <= 1.0:
            raise ConfigError(f"clip_ratio_c must be above 1 (3.0 is usual), got {self.clip_ratio_c}")

    @classmethod
    def from_actor(
        cls,
        actor_config: Any,
        denominators: Denominators | None = None,
        mini_batch: Any = None,
        draws: Tensor | None = None,
    ) -> LossConfig:
        """Read the settings from an actor section by attribute."""
        return cls(
            clip_ratio=actor_config.clip_ratio,
            clip_ratio_low=actor_config.clip_ratio_low,
            clip_ratio_high=actor_config.clip_ratio_high,
            clip_ratio_c=actor_config.clip_ratio_c,
            loss_scale_factor=actor_config.loss_scale_factor,
            tau_pos=actor_config.tau_pos,
            tau_neg=actor_config.tau_neg,
            policy_loss=actor_config.policy_loss,
            denominators=denominators,
            mini_batch=mini_batch,
            draws=draws,
        )

    @property
    def clip_bounds(self) -> tuple[float, float]:
        """The smallest and largest ratio that is not clipped."""
        low = self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low
        high = self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
        return 1.0 - low, 1.0 + high

    def denominators_for(self, mask: Tensor) -> Denominators:
        """The denominators of the mini-batch that `mask` (b, R) is part of."""
        whole = self.denominators or denominators_of(mask)
        return whole if self.loss_scale_factor is None else replace(whole, horizon=self.loss_scale_factor)
