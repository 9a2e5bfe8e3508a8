"""Section `critic`: the value model's update."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ppo_lib.config.base import ConfigModel, Positive, Seed, follow
from ppo_lib.config.model import CriticModelConfig
from ppo_lib.config.registered import AggregationName
from ppo_lib.config.training import CheckpointConfig, CriticOptimConfig, TrainedFSDPConfig


class CriticConfig(ConfigModel):
    """The value model; most keys follow the actor's."""

    enable: bool | None = None
    """Train a critic; null does where the advantage estimator needs one."""
    model: CriticModelConfig = CriticModelConfig()
    """The network under the value head."""
    optim: CriticOptimConfig = CriticOptimConfig()
    """Optimizer and schedule."""
    fsdp: TrainedFSDPConfig = TrainedFSDPConfig()
    """Sharding."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is saved."""
    ppo_mini_batch_size: Positive = follow("${actor_rollout_ref.actor.ppo_mini_batch_size}", 256)
    """Prompts per optimizer step of the critic over all ranks."""
    ppo_micro_batch_size_per_gpu: Positive | None = None
    """Rows per forward and backward on one rank; null packs rows up to the token cap."""
    use_dynamic_bsz: bool = follow("${actor_rollout_ref.actor.use_dynamic_bsz}", False)
    """Pack rows up to the token cap even where a micro-batch size is set."""
    ppo_max_token_len_per_gpu: Positive = 32768
    """The token cap of one micro-batch on one rank."""
    forward_micro_batch_size_per_gpu: Positive | None = follow("${.ppo_micro_batch_size_per_gpu}", None)
    """Rows per forward of the pass that computes values, on one rank."""
    forward_max_token_len_per_gpu: Positive = follow("${.ppo_max_token_len_per_gpu}", 32768)
    """The token cap of the pass that computes values."""
    ppo_epochs: Positive = follow("${actor_rollout_ref.actor.ppo_epochs}", 1)
    """Passes of the critic over each batch of rollouts."""
    shuffle: bool = follow("${actor_rollout_ref.actor.shuffle}", False)
    """Visit the mini-batches in a random order, drawn anew each pass."""
    data_loader_seed: Seed = follow("${trainer.seed}", 42)
    """Seed of the order of `shuffle`."""
    cliprange_value: Annotated[float, Field(gt=0.0)] = 0.5
    """New values are clipped to within this of the old ones."""
    loss_agg_mode: AggregationName = follow("${actor_rollout_ref.actor.loss_agg_mode}", "token-mean")
    """How the losses of all response tokens become one number."""
    loss_scale_factor: Annotated[float, Field(gt=0.0)] | None = follow(
        "${actor_rollout_ref.actor.loss_scale_factor}", None
    )
    """Divisor of `seq-mean-token-sum-norm`; null is `data.max_response_length`."""
    grad_clip: Annotated[float, Field(ge=0.0)] | None = 1.0
    """Largest gradient norm; null or 0 does not clip."""
