"""From a prompt, a chat or a string, to token ids of a given width."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ppo_lib.errors import DataError

Prompt = str | list[dict[str, Any]]


def prompt_problem(prompt: Any) -> str | None:
    """What is wrong with a prompt, or None: it must be a string, or a list of messages with role and content."""
    if prompt is None:
        return "is null"
    if isinstance(prompt, str):
        return None if prompt else "is an empty string"
    if not isinstance(prompt, list):
        return f"is a {type(prompt).__name__}; expected a string or a list of messages"
    if not prompt:
        return "is an empty list of messages"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"has a message {number} without a role; expected {{'role': ..., 'content': ...}}"
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            return f"has a message {number} whose content is null"
        if content is not None and not isinstance(content, str | list):
            return f"has a message {number} whose content is a {type(content).__name__}; expected text"
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                return f"has a message {number} with a part of type {kind!r}, and only text is trained"
    return None


def clean(prompt: Prompt) -> Prompt:
    """Drop the nulls that parquet gives a message for keys that only others have: chat templates test for keys."""
    if isinstance(prompt, str):
        return prompt
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in prompt]


class PromptEncoder:
    """Token ids of prompts.

    A chat goes through the tokenizer's chat template with `add_generation_prompt=True` and `template_kwargs`. A string
    is tokenized as it stands, with the special tokens that the tokenizer adds by default (a base Llama's `<s>`).
    """

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None):
        self.tokenizer = tokenizer
        self.template_kwargs = dict(template_kwargs or {})

    def encode(self, prompt: Prompt) -> list[int]:
        """Raises `DataError` (without file and row: the caller knows them) if the template refuses the chat."""
        if isinstance(prompt, str):
            try:
                ids = list(self.tokenizer(prompt).input_ids)
            except (TypeError, ValueError) as error:  # a lone surrogate, say, which is no text
                raise DataError(f"cannot be tokenized: {prompt[:40]!a}") from error
            if not ids:
                raise DataError(f"comes to no tokens: {prompt[:40]!a}")
            return ids
        if not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                "is a chat, and the tokenizer has no chat template; "
                "set actor_rollout_ref.model.custom_chat_template or give prompts as strings"
            )
        options = {"add_generation_prompt": True, **self.template_kwargs, "tokenize": True, "return_dict": False}
        try:
            ids = list(self.tokenizer.apply_chat_template(prompt, **options))
        except Exception as error:  # a Jinja template may raise anything
            raise DataError(f"is refused by the chat template: {type(error).__name__}: {error}") from error
        if not ids:
            raise DataError("is rendered to nothing by the chat template")
        return ids

    def lengths(self, prompts: Sequence[Prompt], workers: int = 1) -> list[int | DataError]:
        """The number of tokens of each prompt, or the error that encoding it raised, with `workers` threads.

        Tokenizers let go of the interpreter while they work; each thread has a copy, since they change as they do.
        """
        workers = max(1, min(workers, len(prompts)))
        size = -(-len(prompts) // workers)
        parts = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        encoders = [self] + [PromptEncoder(copy.deepcopy(self.tokenizer), self.template_kwargs) for _ in parts[1:]]
        if workers == 1:
            return self._lengths(prompts)
        with ThreadPoolExecutor(workers) as pool:
            return [length for part in pool.map(PromptEncoder._lengths, encoders, parts) for length in part]

    def _lengths(self, prompts: Sequence[Prompt]) -> list[int | DataError]:
        found: list[int | DataError] = []
        for prompt in prompts:
            try:
                found.append(len(self.encode(prompt)))
            except DataError as error:
                found.append(error)
        return found


def truncate(ids: list[int], width: int, side: str) -> list[int]:
    """Cut `ids` to `width`: `left` drops the beginning, `right` the end, `middle` keeps `width // 2` and the end."""
    if len(ids) <= width:
        return ids
    if side == "left":
        return ids[-width:]
    if side == "right":
        return ids[:width]
    if side == "middle":
        head = width // 2
        return ids[:head] + ids[len(ids) - (width - head) :]
    raise ValueError(f"unknown side {side!r}; expected left, right or middle")


def left_pad(ids: list[int], width: int, pad_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask`, `position_ids`, each (width,) int64; positions count from the first real token."""
    pad = width - len(ids)
    return {
        "input_ids": torch.tensor([pad_id] * pad + ids, dtype=torch.int64),
        "attention_mask": torch.tensor([0] * pad + [1] * len(ids), dtype=torch.int64),
        "position_ids": torch.tensor([0] * pad + list(range(len(ids))), dtype=torch.int64),
    }
