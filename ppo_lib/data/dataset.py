"""The dataset of prompts: rows of files, checked when they are loaded, tokenized when they are drawn."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ppo_lib.data.builtin import with_split
from ppo_lib.data.prompts import PromptEncoder, clean, left_pad, prompt_problem, truncate
from ppo_lib.data.sources import open_data
from ppo_lib.errors import ConfigError, DataError
from ppo_lib.load_object import load_object
from protocol import schema

logger = logging.getLogger(__name__)

DICT_COLUMNS = ("reward_model", "extra_info")
MEDIA_KEYS = ("image_key", "video_key", "audio_key")
# What the dataset or a later stage of a step writes: a file's column of that name would be overwritten or in the way.
FROM_DATA = {"data_source", "reward_model", "extra_info"}
FROM_ROLLOUT = {"finish_reason", "__num_turns__", "weight_version_min", "weight_version_max"}
OWN_KEYS = (schema.FIELDS.keys() - FROM_DATA) | FROM_ROLLOUT | {"dataset_row"}


class RLHFDataset(Dataset):
    """Prompts from parquet, json or jsonl files, or `builtin:NAME`, as left-padded token ids with their columns beside.

    A row has `prompt` (a chat list or a string) and `data_source`, and usually `ability`, `reward_model` (`style`,
    `ground_truth`) and `extra_info`; every other column is carried along. Everything that can be wrong with a row is
    found here, before a worker starts: this tokenizes every prompt once.

    `max_samples` rows are kept (-1: all), chosen before overlong prompts are filtered: the first ones in file order,
    or, where `data.shuffle` (for validation `data.validation_shuffle`) is on, a random subset drawn with `data.seed`,
    in file order.

    Args:
        data_files: one path or several.
        tokenizer: with a pad token, and a chat template if prompts are chats.
        config: the section `data`.
        processor: a multi-modal model's; this class reads text and refuses rows that hold images, videos or sounds.
        max_samples: see above.
        is_train: which shuffle setting `max_samples` follows, and which part `builtin:NAME` means.

    Raises:
        DataError: names file, row and column of the first row that cannot be used.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
        is_train: bool = True,
    ):
        self.tokenizer, self.config, self.processor = tokenizer, config, processor
        self.rows = open_data(data_files, config, is_train)
        self.encoder = PromptEncoder(tokenizer, config.apply_chat_template_kwargs)
        self._check_columns()
        prompts = self.rows.column(config.prompt_key)
        self._check_values(prompts)
        shuffle = config.shuffle if is_train else config.validation_shuffle
        kept = choose_rows(len(self.rows), max_samples, config.seed if shuffle else None)
        self.num_filtered = 0
        self.kept = self._check_lengths(prompts, kept)  # dataset_row of each item

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`input_ids`, `attention_mask`, `position_ids` (L,) int64, `raw_prompt`, `dataset_row`, and the columns."""
        number = self.kept[index]
        row = self.rows[number]
        prompt = clean(row.pop(self.config.prompt_key))
        width = self.config.max_prompt_length
        ids = truncate(self._encode(prompt, number), width, self.config.truncation)
        item: dict[str, Any] = {**left_pad(ids, width, self.tokenizer.pad_token_id)}
        item.update(dict.fromkeys(self.rows.columns))  # a column that only another file has
        item.pop(self.config.prompt_key)
        item.update(row)
        item.update(
            raw_prompt=prompt,
            dataset_row=number,
            data_source=row[self.config.reward_fn_key],
            ability=row.get("ability"),
            reward_model=row.get("reward_model") or {},
            extra_info=row.get("extra_info") or {},
        )
        return item

    def column(self, name: str) -> list[Any]:
        """One column of the rows that are used, without tokenizing; None where a row lacks it."""
        values = self.rows.column(name)
        return [values[number] for number in self.kept]

    def where(self, index: int) -> str:
        """File and row of item `index`, for messages."""
        return self.rows.where(self.kept[index])

    def _encode(self, prompt: Any, number: int) -> list[int]:
        try:
            return self.encoder.encode(prompt)
        except DataError as error:
            raise self._bad(number, str(error)) from error

    def _bad(self, number: int, problem: str) -> DataError:
        return DataError(f"{self.rows.where(number)}: column {self.config.prompt_key!r} {problem}.")

    def _check_columns(self) -> None:
        media = {getattr(self.config, key): key for key in MEDIA_KEYS}
        for file in self.rows.files:
            for column in file.columns:
                if column in OWN_KEYS and column != self.config.prompt_key:
                    raise DataError(f"{file.name}: the column {column!r} has a name that training writes; rename it.")
                if column in media:
                    row = next((number for number, value in enumerate(file.column(column)) if value), None)
                    if row is not None:
                        key = media[column]
                        raise DataError(
                            f"{file.name}, row {row}: column {column!r} (data.{key}) is not empty, and training on"
                            f" {key.removesuffix('_key')}s is not there yet, only on text; leave such rows out, or set"
                            f" data.{key}=null to carry the column along unread."
                        )

    def _check_values(self, prompts: list[Any]) -> None:
        if self.tokenizer.pad_token_id is None:
            raise DataError("the tokenizer has no pad token; set one, or load it with ppo_lib.models.load_tokenizer.")
        sources = self.rows.column(self.config.reward_fn_key)
        for column in DICT_COLUMNS:
            for number, value in enumerate(self.rows.column(column)):
                if value is not None and not isinstance(value, dict):
                    raise DataError(
                        f"{self.rows.where(number)}: {column!r} is a {type(value).__name__}; expected named values."
                    )
        for number, (prompt, source) in enumerate(zip(prompts, sources)):
            problem = prompt_problem(prompt)
            if problem:
                raise self._bad(number, problem)
            if not isinstance(source, str):
                raise DataError(
                    f"{self.rows.where(number)}: column {self.config.reward_fn_key!r} is {source!r}; expected a name."
                )

    def _check_lengths(self, prompts: list[Any], kept: list[int]) -> list[int]:
        """Drop prompts that are too long, or raise for the first, or leave them to be cut, as the configuration says.

        A prompt that cannot be encoded always raises.
        """
        limit = self.config.max_prompt_length
        found = self.encoder.lengths(
            [clean(prompts[number]) for number in kept], self.config.filter_overlong_prompts_workers
        )
        lengths: dict[int, int] = {}
        for number, length in zip(kept, found):
            if isinstance(length, DataError):
                raise self._bad(number, str(length)) from length
            lengths[number] = length
        longest = max(lengths.values())
        overlong = [number for number in kept if lengths[number] > limit]
        if not self.config.filter_overlong_prompts and self.config.truncation != "error":
            return kept
        if overlong and not self.config.filter_overlong_prompts:
            raise self._bad(
                overlong[0],
                f"has {lengths[overlong[0]]} tokens, more than data.max_prompt_length={limit} ({len(overlong)} of "
                f"{len(kept)} prompts are too long, the longest has {longest} tokens); raise it, set "
                "data.filter_overlong_prompts=true to leave them out, or data.truncation=left|right|middle to cut them",
            )
        self.num_filtered = len(overlong)
        files = ", ".join(file.name for file in self.rows.files)
        if len(overlong) == len(kept):
            raise DataError(
                f"{files}: all {len(kept)} prompts are longer than data.max_prompt_length={limit} tokens (from "
                f"{min(lengths.values())} to {longest}), so filtering leaves none; raise data.max_prompt_length."
            )
        if overlong:
            logger.warning(
                "%s: left out %d of %d prompts, longer than data.max_prompt_length=%d tokens (the longest has %d)",
                *(files, len(overlong), len(kept), limit, longest),
            )
        return [number for number in kept if lengths[number] <= limit]


def choose_rows(total: int, max_samples: int, seed: int | None) -> list[int]:
    """The rows that `max_samples` keeps, in file order: the first, or with a seed a random subset; -1 keeps all."""
    if max_samples == 0:
        raise DataError("max_samples is 0, which leaves no rows; -1 takes all of them.")
    if max_samples < 0 or max_samples >= total:
        return list(range(total))
    if seed is None:
        return list(range(max_samples))
    return sorted(np.random.default_rng(seed).permutation(total)[:max_samples].tolist())


def create_rl_dataset(
    data_files: str | Sequence[str],
    config: Any,
    tokenizer: Any,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Any:
    """`RLHFDataset`, or the class that `data.custom_cls` names.

    A custom class is called with the keywords `data_files` (a list; `builtin:NAME` with its part spelled out),
    `tokenizer`, `config`, `processor` and `max_samples`, and `is_train` if it takes it. It needs `__len__` and
    `__getitem__`, and gives items as `RLHFDataset` does.
    """
    names = [data_files] if isinstance(data_files, str) else list(data_files)
    arguments: dict[str, Any] = {
        "data_files": [with_split(name, is_train) for name in names],
        "tokenizer": tokenizer,
        "config": config,
        "processor": processor,
        "max_samples": max_samples,
    }
    cls = dataset_class(config)
    if "is_train" in inspect.signature(cls).parameters:
        arguments["is_train"] = is_train
    return cls(**arguments)


def dataset_class(config: Any) -> type:
    """The class of `data.custom_cls`, else `RLHFDataset`. Raises `ConfigError` if it is not there or no dataset."""
    custom = config.custom_cls
    if not custom.path and not custom.name:
        return RLHFDataset
    if not (custom.path and custom.name):
        missing = "path" if custom.name else "name"
        raise ConfigError(f"data.custom_cls.{missing} is not set; a dataset class needs both path and name.")
    cls = load_object(custom.path, custom.name, "data.custom_cls")
    if not (inspect.isclass(cls) and hasattr(cls, "__len__") and hasattr(cls, "__getitem__")):
        raise ConfigError(
            f"data.custom_cls: {custom.name} in {custom.path} is no dataset: it needs __len__ and __getitem__."
        )
    return cls
