"""What the tests of the reward loop share: a section `reward`, samples, and a batch of decoded responses."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ppo_lib.config import RewardConfig
from ppo_lib.reward import RewardSample
from protocol import DataProto


def reward_config(path: str | None = None, name: str = "compute_score", **settings: Any) -> RewardConfig:
    kwargs = settings.pop("reward_fn_kwargs", {})
    custom = {"path": path, "name": name, "reward_kwargs": kwargs}
    return RewardConfig.model_validate({"num_workers": 0, "custom_reward_function": custom, **settings})


def sample(text: str = "7", truth: Any = "7", source: str = "mine", uid: str = "u7", row: int = 3) -> RewardSample:
    return RewardSample(
        data_source=source,
        response_ids=[],
        ground_truth=truth,
        uid=uid,
        row=row,
        solution_str=text,
        extra_info={"index": 1},
    )


def batch_of(tokenizer: Any, responses: list[str], truths: list[str], source: str = "repeat-digit", width: int = 10):
    """Rows with a prompt of two tokens, the response, an end-of-text token where it fits, and padding."""
    ids = torch.full((len(responses), width), tokenizer.pad_token_id)
    mask = torch.zeros(len(responses), width, dtype=torch.int64)
    for row, text in enumerate(responses):
        tokens = [*tokenizer(text).input_ids, tokenizer.eos_token_id][:width] if text else []
        ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        mask[row, : len(tokens)] = 1
    prompt = torch.ones(len(responses), 2, dtype=torch.int64)
    rules = np.empty(len(truths), dtype=object)
    rules[:] = [{"style": "rule", "ground_truth": truth} for truth in truths]
    return DataProto.from_dict(
        tensors={"responses": ids, "response_mask": mask, "attention_mask": torch.cat([prompt, mask], dim=1)},
        non_tensors={
            "uid": np.array([f"u{i}" for i in range(len(truths))], dtype=object),
            "data_source": np.array([source] * len(truths), dtype=object),
            "reward_model": rules,
            "dataset_row": np.array([10 + i for i in range(len(truths))], dtype=object),
        },
    )
