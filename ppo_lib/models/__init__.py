"""Where models come from: built-in ones made on this machine, local folders, Hugging Face ids."""

from __future__ import annotations

from ppo_lib.models.resolve import BUILTIN_MODELS, check_model_path, resolve_model_path
from ppo_lib.models.tokenizer import load_processor, load_tokenizer

__all__ = ["BUILTIN_MODELS", "check_model_path", "load_processor", "load_tokenizer", "resolve_model_path"]
