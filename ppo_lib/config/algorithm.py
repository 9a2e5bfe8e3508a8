"""Section `algorithm`: advantages, and the KL that is taken from the reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ppo_lib.config.base import ConfigModel, Fraction, Positive
from ppo_lib.config.registered import EstimatorName, KLName


class KLCtrlConfig(ConfigModel):
    """The coefficient of the KL in the reward, where `algorithm.use_kl_in_reward` is true."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """`adaptive` moves the coefficient towards a target KL."""
    kl_coef: Annotated[float, Field(ge=0.0)] = 0.001
    """The coefficient, or the one that `adaptive` starts from."""
    horizon: Positive = 10000
    """How slowly `adaptive` moves: samples over which a full error changes the coefficient by itself."""
    target_kl: Annotated[float, Field(gt=0.0)] = 0.1
    """The KL that `adaptive` aims at."""


class AlgorithmConfig(ConfigModel):
    """Advantage estimation, and the KL that is taken from the reward."""

    adv_estimator: EstimatorName = "gae"
    """A registered advantage estimator, or `module:function`."""
    gamma: Fraction = 1.0
    """Discount of later rewards."""
    lam: Fraction = 1.0
    """GAE's lambda."""
    norm_adv_by_std_in_grpo: bool = True
    """Divide a group's advantages by their standard deviation; false is Dr.GRPO."""
    use_kl_in_reward: bool = False
    """Take the KL to the reference from the reward, token by token."""
    kl_penalty: KLName = "kl"
    """Which KL estimator the reward uses."""
    kl_ctrl: KLCtrlConfig = KLCtrlConfig()
    """Its coefficient."""
