"""What actor, reference and critic have in common: optimizer, FSDP2 engine, what a checkpoint holds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ppo_lib.config.base import ConfigModel, Fraction, OpenDict, Seed, follow

CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]


class OptimConfig(ConfigModel):
    """The optimizer and its learning-rate schedule, counted in optimizer steps."""

    optimizer: str = "AdamW"
    """Name of the optimizer class."""
    optimizer_impl: str = "torch.optim"
    """The module that defines the optimizer class."""
    lr: Annotated[float, Field(ge=0.0)] = 1e-6
    """Peak learning rate."""
    lr_warmup_steps: Annotated[int, Field(ge=-1)] = -1
    """Optimizer steps of linear warm-up; -1 takes `lr_warmup_steps_ratio`."""
    lr_warmup_steps_ratio: Fraction = 0.0
    """Warm-up as a share of all optimizer steps, where `lr_warmup_steps` is -1."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    """Shape of the schedule after the warm-up."""
    min_lr_ratio: Fraction = 0.0
    """A schedule that falls ends at this share of `lr`."""
    total_training_steps: Annotated[int, Field(ge=-1)] = -1
    """Optimizer steps until the schedule ends; -1 is the whole run."""
    zero_indexed_step: bool = True
    """Count the schedule's steps from 0, so that a warm-up's first step has learning rate 0; false counts from 1."""
    clip_grad: Annotated[float, Field(ge=0.0)] | None = follow("${..grad_clip}", 1.0)
    """Largest gradient norm; 0 does not clip."""
    num_cycles: Annotated[float, Field(gt=0.0)] = 0.5
    """Waves of the cosine schedule; 0.5 falls once."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.01
    """Decoupled weight decay: each step shrinks the weights by this times the learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    """Adam's moment decays."""
    override_optimizer_config: OpenDict = {}
    """Further keyword arguments of the optimizer class."""


class CriticOptimConfig(OptimConfig):
    """The critic's optimizer and its learning-rate schedule, counted in optimizer steps."""

    lr: Annotated[float, Field(ge=0.0)] = 1e-5
    """Peak learning rate."""


class WrapPolicyConfig(ConfigModel):
    """Into which units FSDP2 divides a model."""

    min_num_params: Annotated[int, Field(ge=0)] = 32_000_000
    """A model of fewer parameters is one unit, gathered and reduced once a mini-batch; of others each layer is."""


class FSDPConfig(ConfigModel):
    """How FSDP2 shards one model over its ranks."""

    param_offload: bool = False
    """Keep parameters in host memory between stages."""
    offload_policy: bool = False
    """Let FSDP2 itself stream parameters, gradients and optimizer states from host memory."""
    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass and gather them again for the backward."""
    fsdp_size: Annotated[int, Field(ge=-1)] = -1
    """Ranks in one shard group, replicated over the rest; -1 shards over all."""
    wrap_policy: WrapPolicyConfig = WrapPolicyConfig()
    """Into which units the model is divided."""
    forward_prefetch: bool = False
    """Gather the next block's parameters while this one computes."""
    model_dtype: Literal["fp32", "float32", "bf16", "bfloat16"] = "fp32"
    """Type of the master weights, which the optimizer changes."""
    dtype: Literal["bfloat16", "bf16", "float32", "fp32"] = "bfloat16"
    """Type of the arithmetic: mixed precision on CUDA, autocast on a CPU with AVX512-bf16."""
    seed: Seed = follow("${trainer.seed}", 42)
    """Seed of what this model initialises by chance (a value head)."""
    use_torch_compile: bool = False
    """On CUDA, compile the feed-forward and norm layers of each block; a CPU gets one notice."""
    full_determinism: bool = False
    """Only deterministic kernels."""


class TrainedFSDPConfig(FSDPConfig):
    """How FSDP2 shards a model that is trained."""

    optimizer_offload: bool = False
    """Keep optimizer states in host memory between updates."""
    use_no_sync_for_gradient_accumulation: bool = False
    """Reduce gradients once a mini-batch instead of once a micro-batch: faster, and whole gradients on each rank."""


class CheckpointConfig(ConfigModel):
    """What a checkpoint of this model holds."""

    save_contents: Annotated[tuple[CheckpointPart, ...], Field(min_length=1)] = ("model", "optimizer", "extra")
    """Parts to save: model, optimizer, extra (schedule, random states), hf_model (a folder for transformers)."""
    load_contents: Annotated[tuple[CheckpointPart, ...], Field(min_length=1)] = follow(
        "${.save_contents}", ("model", "optimizer", "extra")
    )
    """What is read on resuming."""
