"""What the tests of the rollout share and that is no fixture."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from ppo_lib.config import ActorRolloutRefConfig, PPOConfig, load_config
from ppo_lib.rollout.checkpoint_engine import WeightSender
from ppo_lib.rollout.engine import GenerationRequest, SamplingParams, TokenOutput
from ppo_lib.rollout.hf_engine import HFEngine
from ppo_lib.single_controller import Dispatch, Worker, register
from protocol import DataProto

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


class Model(Worker):
    """A worker that holds a whole model and sends it, with a fault where a test wants one."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.fault: str | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, sender: WeightSender) -> None:
        sender.send(self.rank, self.world_size, self._tensors())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, seed: int) -> None:
        """Other weights, the same on every rank."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0, 0.2, generator=generator)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_fault(self, fault: str | None) -> None:
        self.fault = fault

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def log_probs(self, prompt: list[int], response: list[int]) -> list[float]:
        return log_probs_of(self.model, prompt, response).tolist()

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.named_parameters():
            if name == "model.norm.weight" and self.fault:
                if self.fault == "unknown":
                    yield "model.nrom.weight", tensor
                elif self.fault == "shape":
                    yield name, tensor[:-1]
                elif self.fault == "raise":
                    raise RuntimeError("the gather broke")
                continue  # "missing"
            yield name, tensor


def log_probs_of(
    model: PreTrainedModel, prompt: list[int], response: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """What a trainer recomputes: (r,) float32."""
    scores = (scores_of(model, prompt, response) / temperature).log_softmax(-1)
    return scores.gather(1, torch.tensor(response).unsqueeze(1)).squeeze(1)


def scores_of(model: PreTrainedModel, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Logits at the response's positions: (r, V)."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0].float()
    return logits[len(prompt) - 1 : -1]


def gen_batch_of(prompts: list[list[int]], n: int = 1, width: int = 64, **meta: object) -> DataProto:
    """P prompts, each repeated n times, as the trainer submits them."""
    rows = len(prompts)
    ids, mask = torch.zeros((rows, width), dtype=torch.int64), torch.zeros((rows, width), dtype=torch.int64)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    batch = DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "prompt_row": torch.arange(rows),
        },
        non_tensors={
            "uid": np.array([f"u{i}" for i in range(rows)], dtype=object),
            "data_source": np.array(["repeat-digit"] * rows, dtype=object),
            "reward_model": np.array([{"ground_truth": str(i)} for i in range(rows)], dtype=object),
            "dataset_row": np.arange(rows) + 10,
        },
        meta_info={"temperature": 1.0, "epoch": 0, "global_steps": 1, **meta},
    )
    return batch.repeat(n, interleave=True)
