"""What the tests of the rollout share and that is no fixture."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from ppo_lib.config import ActorRolloutRefConfig, PPOConfig, load_config
from ppo_lib.rollout.engine import GenerationRequest, SamplingParams, TokenOutput
from ppo_lib.rollout.hf_engine import HFEngine

VOCAB = 96
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, initializer_range=0.2),
    "qwen2-sliding": Qwen2Config(
        **SHAPE,
        initializer_range=0.2,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "qwen3": Qwen3Config(**SHAPE, initializer_range=0.2, head_dim=16),
}


def ppo_config(model_path: str | Path, *overrides: str, **rollout: object) -> PPOConfig:
    """What a run with the hf engine has: checkpoint weights and small lengths unless told otherwise.

    Keywords are keys of the rollout section; prompt_length and response_length are set where they follow from.
    """
    settings = {"name": "hf", "dtype": "float32", "load_format": "auto", **rollout}
    lengths = {"prompt": settings.pop("prompt_length", 64), "response": settings.pop("response_length", 32)}
    return load_config(
        overrides=[
            f"actor_rollout_ref.model.path={model_path}",
            *(f"data.max_{name}_length={length}" for name, length in lengths.items()),
            *(f"actor_rollout_ref.rollout.{key}={value}" for key, value in settings.items()),
            *overrides,
        ]
    )


def rollout_config(model_path: str | Path, **rollout: object) -> ActorRolloutRefConfig:
    """The section `actor_rollout_ref` of `ppo_config`."""
    return ppo_config(model_path, **rollout).actor_rollout_ref


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def requests_of(prompts: list[list[int]], **params: object) -> list[GenerationRequest]:
    """One request a prompt, each with its own seed unless one is given."""
    return [
        GenerationRequest(f"r{i}", prompt, SamplingParams(**{"seed": 100 + i, **params}), order=(i, 0))
        for i, prompt in enumerate(prompts)
    ]


async def generate_all(engine: HFEngine, requests: list[GenerationRequest], **kwargs: object) -> list[TokenOutput]:
    return list(await asyncio.gather(*(engine.generate(request, **kwargs) for request in requests)))


def run(coroutine: object, limit_s: float = 60) -> object:
    """Await from a test, for at most `limit_s` seconds."""

    async def bounded() -> object:
        return await asyncio.wait_for(coroutine, limit_s)

    return asyncio.run(bounded())
