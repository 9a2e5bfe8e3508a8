"""Tests against the real SGLang. Where it is not installed there is nothing to collect here: `make test-sglang`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ppo_lib.rollout.sglang.versions import is_installed

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "rollout"))  # what the tests of all engines share

INSTALLED = is_installed()
if not INSTALLED:
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.sglang)


if INSTALLED:
    import torch
    from rollout_testing import CONFIGS, SHAPE, rollout_config
    from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

    from ppo_lib.rollout.sglang.engine import SGLangEngine

    FAMILIES = {
        "llama": CONFIGS["llama"],
        "qwen2": Qwen2Config(**SHAPE, initializer_range=0.2, tie_word_embeddings=True),
        "qwen3": CONFIGS["qwen3"],
    }

    @pytest.fixture(scope="session")
    def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
        """One saved model per family."""
        folders = {}
        for name, config in FAMILIES.items():
            folder = tmp_path_factory.mktemp(name)
            with torch.random.fork_rng():
                torch.manual_seed(0)
                AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            folders[name] = str(folder)
        return folders

    @pytest.fixture(scope="session")
    def models(model_dirs: dict[str, str]) -> dict[str, PreTrainedModel]:
        """What transformers makes of them; never changed."""
        return {name: AutoModelForCausalLM.from_pretrained(folder).eval() for name, folder in model_dirs.items()}

    @pytest.fixture(scope="session")
    def shared_engine(model_dirs: dict[str, str]) -> Iterator[Callable[[str], SGLangEngine]]:
        """One engine per family for the whole run, with the weights of `models` unless a test puts them back."""
        engines: dict[str, SGLangEngine] = {}

        def get(family: str) -> SGLangEngine:
            if family not in engines:
                folder = model_dirs[family]
                engines[family] = SGLangEngine(rollout_config(folder, max_num_seqs=16), folder)
            return engines[family]

        yield get
        for engine in engines.values():
            asyncio.run(engine.shutdown())

    @pytest.fixture
    def make_engine(model_dirs: dict[str, str]) -> Iterator[Callable[..., SGLangEngine]]:
        """Builds engines, and shuts them down at the end of the test."""
        engines: list[SGLangEngine] = []

        def make(family: str = "llama", tokenizer: object | None = None, **overrides: object) -> SGLangEngine:
            folder = model_dirs[family]
            config = rollout_config(folder, **{"max_num_seqs": 8, **overrides})
            engines.append(SGLangEngine(config, folder, tokenizer))
            return engines[-1]

        yield make
        for engine in engines:
            asyncio.run(engine.shutdown())
