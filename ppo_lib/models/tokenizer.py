"""Tokenizers and processors, with the pad token that batching needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppo_lib.errors import ModelError
from ppo_lib.models.resolve import resolve_model_path

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def load_tokenizer(path: str, trust_remote_code: bool = False, custom_chat_template: str | None = None) -> Any:
    """The tokenizer of the model at `path` (anything `resolve_model_path` takes).

    A tokenizer without a pad token gets its end-of-text token as one; attention masks, not ids, tell the two apart.
    `custom_chat_template` is a Jinja template, or the path of a file that holds one.

    Raises `ModelError` if there is no tokenizer, or it has no end-of-text token, or the template file is missing.
    """
    from transformers import AutoTokenizer

    folder = resolve_model_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load a tokenizer from {path!r}: {_first_line(error)}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {path!r} has no eos_token, so no response could end; set one in its files.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if custom_chat_template is not None:
        tokenizer.chat_template = _chat_template(custom_chat_template)
    return tokenizer


def load_processor(path: str, trust_remote_code: bool = False) -> Any | None:
    """The multi-modal processor of the model at `path`; None for a model that reads text only."""
    from transformers.utils import cached_file

    folder = resolve_model_path(path)
    try:
        found = any(
            cached_file(
                folder,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
            for name in PROCESSOR_FILES
        )
        if not found:
            return None
        from transformers import AutoProcessor

        return AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(f"cannot load the processor of {path!r}: {_first_line(error)}") from error


def _chat_template(text: str) -> str:
    if "{" in text:
        return text
    file = Path(text).expanduser()
    if not file.is_file():
        raise ModelError(f"custom_chat_template {text!r} is neither a Jinja template nor a file that exists.")
    return file.read_text(encoding="utf-8")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
