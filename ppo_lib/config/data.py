"""Section `data`: where the prompts come from and how they are cut."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ppo_lib.config.base import ConfigModel, NonNegative, OpenDict, Positive, Strings, Workers, follow


class CustomClassConfig(ConfigModel):
    """A class of the user's own, found by file and name."""

    path: str | None = None
    """Python file that defines the class; null uses the built-in one."""
    name: str | None = None
    """Name of the class in that file."""


class DataConfig(ConfigModel):
    """Prompts for training and validation."""

    train_files: Annotated[Strings, Field(min_length=1)] = ("~/data/rlhf/gsm8k/train.parquet",)
    """Parquet, json or jsonl files (one or a list), or `builtin:NAME`."""
    val_files: Annotated[Strings, Field(min_length=1)] = ("~/data/rlhf/gsm8k/test.parquet",)
    """The same for validation."""
    train_max_samples: Annotated[int, Field(ge=-1)] = -1
    """Use at most so many training rows; -1 is all."""
    val_max_samples: Annotated[int, Field(ge=-1)] = -1
    """Use at most so many validation rows; -1 is all."""
    prompt_key: str = "prompt"
    """Column with the prompt: a chat list or a string."""
    reward_fn_key: str = "data_source"
    """Column that picks the scorer and groups the validation metrics."""
    max_prompt_length: Positive = 512
    """Prompt width L in tokens; prompts are left-padded to it."""
    max_response_length: Positive = 512
    """Response width R in tokens; the most a rollout may generate."""
    train_batch_size: Positive = 1024
    """Prompts per training step (P)."""
    val_batch_size: Positive | None = None
    """Prompts per validation batch; null takes all at once."""
    shuffle: bool = True
    """Draw training prompts in an order that depends on the seed and the epoch."""
    seed: int = follow("${trainer.seed}", 42)
    """Seed of that order."""
    dataloader_num_workers: Workers | None = None
    """Processes that prepare prompts; 0 is the driver itself, null is min(8, cores)."""
    validation_shuffle: bool = False
    """Shuffle the validation prompts too."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than `max_prompt_length`, and say how many."""
    filter_overlong_prompts_workers: NonNegative = 1
    """Processes that count tokens for that filter."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt that is too long and was not filtered: stop, or cut at that side."""
    custom_cls: CustomClassConfig = CustomClassConfig()
    """A dataset class of your own in place of RLHFDataset."""
    apply_chat_template_kwargs: OpenDict = {}
    """Passed on to the tokenizer's chat template."""
