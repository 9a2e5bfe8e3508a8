"""Section `data`: where the prompts come from and how they are cut."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from ppo_lib.config.base import ConfigModel, NonNegative, OpenDict, Positive, Seed, Workers, follow, one_or_many

_File = Annotated[str, Field(min_length=1)]
_Files = Annotated[
    tuple[_File, ...],
    BeforeValidator(one_or_many, json_schema_input_type=_File | Annotated[tuple[_File, ...], Field(min_length=1)]),
    Field(min_length=1),
]


class CustomClassConfig(ConfigModel):
    """A dataset class of your own in place of the built-in one, found by file and name."""

    path: str | None = None
    """Python file, or `pkg://module`, that defines the class; null uses the built-in one."""
    name: str | None = None
    """Name of the class in that file."""


class SamplerConfig(ConfigModel):
    """A class of your own that decides which training prompts come next, in place of `data.shuffle`."""

    class_path: str | None = None
    """Python file, or `pkg://module`, that defines the class; null draws as `data.shuffle` says."""
    class_name: str | None = None
    """Name of the class, made as `cls(data_source=dataset, data_config=data)`; `update(batch)` ends a step."""


class DataConfig(ConfigModel):
    """Prompts for training and validation."""

    train_files: _Files = ("~/data/rlhf/gsm8k/train.parquet",)
    """Parquet, json or jsonl files with the training prompts (one or a list), or `builtin:NAME`."""
    val_files: _Files = ("~/data/rlhf/gsm8k/test.parquet",)
    """Files with the validation prompts, in the same forms."""
    train_max_samples: Annotated[int, Field(ge=-1)] = -1
    """Most training rows to use: the first, or with `shuffle` a random choice; -1 is all."""
    val_max_samples: Annotated[int, Field(ge=-1)] = -1
    """Most validation rows to use: the first, or with `validation_shuffle` a random choice; -1 is all."""
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
    gen_batch_size: Positive = follow("${data.train_batch_size}", 1024)
    """Prompts generated for at a time, where `algorithm.filter_groups` drops some; null follows `train_batch_size`."""
    val_batch_size: Positive | None = None
    """Prompts per validation batch; null takes all at once."""
    shuffle: bool = True
    """Draw training prompts in a random order, another one each epoch; false keeps the order of the files."""
    seed: Seed = follow("${trainer.seed}", 42)
    """Seed of the order of `shuffle`, and of the rows that `train_max_samples` chooses."""
    dataloader_num_workers: Workers | None = None
    """Processes that prepare prompts; 0 is the driver itself, null is min(8, cores), 0 for a `sampler` that learns."""
    validation_shuffle: bool = False
    """Shuffle the validation prompts too."""
    filter_overlong_prompts: bool = False
    """Leave out prompts longer than `max_prompt_length`, and say how many."""
    filter_overlong_prompts_workers: NonNegative = 1
    """Threads that count tokens before training; 0 is 1."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a prompt longer than `max_prompt_length`: `error` stops the run, the others cut it there."""
    custom_cls: CustomClassConfig = CustomClassConfig()
    """A dataset class of your own in place of RLHFDataset."""
    sampler: SamplerConfig = SamplerConfig()
    """The order of training prompts."""
    image_key: str | None = "images"
    """Column with images: one that is not empty is refused, since only text is trained; null carries it unread."""
    video_key: str | None = "videos"
    """Column with videos: one that is not empty is refused, since only text is trained; null carries it unread."""
    audio_key: str | None = "audios"
    """Column with sounds: one that is not empty is refused, since only text is trained; null carries it unread."""
    apply_chat_template_kwargs: OpenDict = {}
    """Keyword arguments of the tokenizer's chat template, such as `enable_thinking`."""
