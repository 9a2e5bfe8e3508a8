from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
import torch
from rollout_testing import CONFIGS, rollout_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_lib.rollout.hf_engine import HFEngine


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One saved model per family; initialised wide enough that the most likely token is a clear one."""
    folders = {}
    for name, config in CONFIGS.items():
        folder = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        folders[name] = str(folder)
    return folders


@pytest.fixture
def make_engine(model_dirs: dict[str, str]) -> Iterator[Callable[..., HFEngine]]:
    """Builds engines, and shuts them down at the end of the test."""
    engines: list[HFEngine] = []

    def make(family: str = "llama", tokenizer: object | None = None, **overrides: object) -> HFEngine:
        folder = model_dirs[family]
        engines.append(HFEngine(rollout_config(folder, **overrides), folder, tokenizer))
        return engines[-1]

    yield make
    for engine in engines:
        asyncio.run(engine.shutdown())


@pytest.fixture(scope="session")
def reference_models(model_dirs: dict[str, str]) -> dict[str, PreTrainedModel]:
    return {name: AutoModelForCausalLM.from_pretrained(folder).eval() for name, folder in model_dirs.items()}
