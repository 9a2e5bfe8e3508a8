from __future__ import annotations

import textwrap

import pytest

from ppo_lib.models import load_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer("builtin:tiny-llama")


@pytest.fixture
def scorer_file(tmp_path):
    """Write a Python file with the given text; returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "scorer.py"
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write
