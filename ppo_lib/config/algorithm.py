"""Section `algorithm`: advantages, and the KL that is taken from the reward."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ppo_lib.config.base import ConfigModel, Fraction, NonNegative, Positive, Strings
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


class RolloutCorrectionConfig(ConfigModel):
    """What is done about rollouts whose log-probs are not the trainer's. All off: `rollout_corr/` is only reported."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh the loss by importance: of each token, or of its whole response; null does not."""
    rollout_is_threshold: float | str = 2.0
    """Largest weight; or `lo_hi` (such as 0.5_5.0), and weights outside are 0."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch; in bypass mode over the mini-batch."""
    rollout_rs: str | None = None
    """Leave out what is too far: {token,seq_sum,seq_mean,seq_max}_{k1,k2,k3}, several separated by commas."""
    rollout_rs_threshold: float | str | None = None
    """Bounds, one or one for each: of the ratio for k1 (`lo_hi`, or h for 1/h to h), the largest for k2 and k3."""
    bypass_mode: bool = False
    """Take the rollout's log-probs as the old ones, and save the pass that computes them; correct in the update."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """The policy loss of bypass mode, where `policy_loss.loss_mode` is vanilla."""


class FilterGroupsConfig(ConfigModel):
    """Drop prompts whose rollouts all score the same, which teach nothing, and generate for others in their place."""

    enable: bool = False
    """Filter groups (DAPO, arXiv:2503.14476)."""
    metric: str = "reward"
    """What must differ: `reward` (also `score`, `seq_reward`, `seq_final_reward`), or a column of the scorer's own."""
    max_num_gen_batches: NonNegative = 0
    """Batches of `data.gen_batch_size` prompts a step may generate before it stops the run; 0 is no limit."""


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
    rollout_correction: RolloutCorrectionConfig = RolloutCorrectionConfig()
    """Where the rollout engine's log-probs are not the trainer's."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()
    """Prompts that teach nothing."""
    gdpo_reward_keys: Strings = ()
    """Columns of the scorer that gdpo normalises one by one, before it adds them up."""
    gdpo_reward_weights: tuple[float, ...] = ()
    """A weight for each of `gdpo_reward_keys`; none is 1 for each."""
