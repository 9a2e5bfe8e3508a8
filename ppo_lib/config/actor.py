"""Sections `actor_rollout_ref.actor` and `.ref`: the policy's loss and the frozen reference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ppo_lib.config.base import ConfigModel, Fraction, Positive, Seed, follow
from ppo_lib.config.registered import AggregationName, KLName, PolicyLossName
from ppo_lib.config.training import CheckpointConfig, FSDPConfig, OptimConfig, TrainedFSDPConfig

_Ratio = Annotated[float, Field(ge=0.0)]


class ActorFSDPConfig(TrainedFSDPConfig):
    """How FSDP2 shards the policy."""

    entropy_from_logits_chunk_size: Positive | None = follow("${..entropy_from_logits_chunk_size}", None)
    """Response tokens whose logits exist at one time."""
    use_torch_compile: bool = follow("${..use_torch_compile}", False)
    """On CUDA, compile the feed-forward and norm layers of each block; a CPU gets one notice."""


class RefFSDPConfig(FSDPConfig):
    """How FSDP2 shards the reference."""

    entropy_from_logits_chunk_size: Positive | None = follow("${..entropy_from_logits_chunk_size}", None)
    """Response tokens whose logits exist at one time."""
    use_torch_compile: bool = follow("${..use_torch_compile}", False)
    """On CUDA, compile the feed-forward and norm layers of each block; a CPU gets one notice."""


class PolicyLossConfig(ConfigModel):
    """Which policy loss."""

    loss_mode: PolicyLossName = "vanilla"
    """A registered policy loss, or `module:function`."""
    clip_cov_ratio: Fraction = 0.0002
    """clip_cov: the share of tokens held back."""
    clip_cov_lb: float = 1.0
    """clip_cov: tokens of smaller covariance are not held back."""
    clip_cov_ub: float = 5.0
    """clip_cov: tokens of larger covariance are not held back."""
    kl_cov_ratio: Fraction = 0.0002
    """kl_cov: the share of tokens that pay for moving."""
    ppo_kl_coef: Annotated[float, Field(ge=0.0)] = 0.1
    """kl_cov: weight of the KL that those tokens pay."""
    dro_beta: Annotated[float, Field(gt=0.0)] | None = None
    """dro: weight of the squared log ratio; null is 0.05."""


class ActorConfig(ConfigModel):
    """The policy update."""

    optim: OptimConfig = OptimConfig()
    """Optimizer and schedule."""
    fsdp_config: ActorFSDPConfig = ActorFSDPConfig()
    """Sharding."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    """Which policy loss."""
    ppo_mini_batch_size: Positive = 256
    """Prompts per optimizer step over all ranks; times `rollout.n` is rows."""
    ppo_micro_batch_size_per_gpu: Positive | None = None
    """Rows per forward and backward on one rank; null packs rows up to the token cap."""
    use_dynamic_bsz: bool = False
    """Pack rows up to the token cap even where a micro-batch size is set."""
    ppo_max_token_len_per_gpu: Positive = 16384
    """The token cap: most tokens of one micro-batch on one rank, wherever rows are packed."""
    ppo_epochs: Positive = 1
    """Passes over each batch of rollouts."""
    shuffle: bool = False
    """Visit the mini-batches in a random order, drawn anew each pass."""
    data_loader_seed: Seed = follow("${trainer.seed}", 42)
    """Seed of the order of `shuffle`."""
    clip_ratio: _Ratio = 0.2
    """PPO's clip range: the ratio counts from 1 - `clip_ratio` to 1 + `clip_ratio`."""
    clip_ratio_low: _Ratio = follow("${actor_rollout_ref.actor.clip_ratio}", 0.2)
    """Clip range below 1, where it differs from `clip_ratio`."""
    clip_ratio_high: _Ratio = follow("${actor_rollout_ref.actor.clip_ratio}", 0.2)
    """Clip range above 1, where it differs from `clip_ratio`."""
    clip_ratio_c: Annotated[float, Field(gt=1.0)] = 3.0
    """Dual clip: where the advantage is negative, the ratio counts at most this much."""
    tau_pos: Annotated[float, Field(gt=0.0)] = 1.0
    """sapo: how fast the gate closes on tokens with a positive advantage."""
    tau_neg: Annotated[float, Field(gt=0.0)] = 1.05
    """sapo: how fast it closes on the others."""
    loss_agg_mode: AggregationName = "token-mean"
    """How the losses of all response tokens become one number."""
    loss_scale_factor: Annotated[float, Field(gt=0.0)] | None = None
    """Divisor of `seq-mean-token-sum-norm`; null is `data.max_response_length`."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    calculate_sum_pi_squared: bool = False
    """Give `sum_pi_squared` to an advantage estimator of your own; those here that read it get it anyway."""
    calculate_entropy: bool = False
    """Report the entropy during the update even where its weight is 0."""
    use_kl_loss: bool = False
    """Add the KL to the reference to the loss."""
    kl_loss_coef: Annotated[float, Field(ge=0.0)] = 0.001
    """Weight of the KL to the reference in the loss."""
    kl_loss_type: KLName = "low_var_kl"
    """Which KL estimator the loss uses."""
    grad_clip: Annotated[float, Field(ge=0.0)] | None = 1.0
    """Largest gradient norm; null or 0 does not clip."""
    entropy_from_logits_chunk_size: Positive | None = None
    """Response tokens whose logits exist at one time; null is as many as fit 64 MiB."""
    use_torch_compile: bool = False
    """On CUDA, compile the feed-forward and norm layers of each block; a CPU gets one notice."""
    recompute_old_log_probs: Literal["always", "auto"] = "always"
    """`auto` skips the pass before the update where it tells nothing: one optimizer step a rollout, and hf rollouts."""


class RefConfig(ConfigModel):
    """The frozen reference policy, kept where a KL is wanted."""

    fsdp_config: RefFSDPConfig = RefFSDPConfig()
    """Sharding."""
    log_prob_micro_batch_size_per_gpu: Positive | None = None
    """Rows per forward on one rank; null packs rows up to the token cap."""
    log_prob_use_dynamic_bsz: bool = follow("${actor_rollout_ref.actor.use_dynamic_bsz}", False)
    """Pack rows up to the token cap even where a micro-batch size is set."""
    log_prob_max_token_len_per_gpu: Positive = follow("${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}", 16384)
    """The token cap of one micro-batch on one rank."""
    entropy_from_logits_chunk_size: Positive | None = follow(
        "${actor_rollout_ref.actor.entropy_from_logits_chunk_size}", None
    )
    """Response tokens whose logits exist at one time."""
    use_torch_compile: bool = follow("${actor_rollout_ref.actor.use_torch_compile}", False)
    """On CUDA, compile the feed-forward and norm layers of each block; a CPU gets one notice."""
