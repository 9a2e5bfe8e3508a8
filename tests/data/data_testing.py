"""Rows and configurations that the tests of data share."""

from __future__ import annotations

from typing import Any

from ppo_lib.config import DataConfig


def row(index: int, prompt: Any = None, **more: Any) -> dict[str, Any]:
    return {
        "data_source": "mine",
        "prompt": f"{index}:" if prompt is None else prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(index)},
        "extra_info": {"index": index},
        **more,
    }


def data_config(**settings: Any) -> DataConfig:
    return DataConfig.model_validate({"max_prompt_length": 8, "seed": 0, **settings})
