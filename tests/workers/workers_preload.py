"""Imported once by the server that forks the ranks of a test."""

import pytest  # noqa: F401
import torch
import transformers

torch.set_num_threads(1)
transformers.AutoModelForTokenClassification  # noqa: B018  (loads the lazy part)
transformers.LlamaForCausalLM  # noqa: B018

import workers_ranks  # noqa: E402, F401
