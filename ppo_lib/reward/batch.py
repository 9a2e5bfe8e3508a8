"""Between the envelope and samples: which tokens are the response, where a score goes, what becomes a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from ppo_lib.errors import FieldMissingError
from ppo_lib.reward.sample import RewardSample
from protocol import DataProto


def tensors_of(data: DataProto, *needed: str) -> TensorDict:
    """The batch's tensors. Raises `FieldMissingError` if one of `needed` is not among them."""
    missing = [key for key in needed if data.batch is None or data.batch.get(key) is None]
    if missing or data.batch is None:
        raise FieldMissingError(f"scoring needs {', '.join(needed)} in the batch; missing: {', '.join(missing)}")
    return data.batch


def samples_of(data: DataProto) -> list[RewardSample | None]:
    """One sample a row with all tokens of its response, tool tokens included; None for rows that are padding."""
    batch = tensors_of(data, "responses", "response_mask", "attention_mask")
    responses = batch["responses"]  # (B, R)
    attended = batch["attention_mask"][:, -responses.shape[1] :].bool()  # (B, R)
    padding = batch.get("is_padding", torch.zeros(len(data))).tolist()
    samples: list[RewardSample | None] = []
    for row in range(len(data)):
        columns = {key: column[row] for key, column in data.non_tensor_batch.items()}
        sample = RewardSample.from_columns(columns, responses[row][attended[row]].tolist())
        samples.append(None if padding[row] else sample)
    return samples


def place_scores(scores: Sequence[float], response_mask: Tensor) -> Tensor:
    """(B,) scores on the last policy token of each row: (B, R) float32. A row without policy tokens carries none."""
    mask = response_mask.bool()  # (B, R)
    placed = torch.zeros(mask.shape, dtype=torch.float32)
    last = mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1)  # (B,)
    rows = mask.any(-1).nonzero().squeeze(-1)
    placed[rows, last[rows]] = torch.tensor(list(scores), dtype=torch.float32)[rows]
    return placed


def columns_of(extras: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """One object column (B,) for every key that any row has; None in the rows that lack it."""
    keys = dict.fromkeys(key for extra in extras for key in extra)
    columns = {}
    for key in keys:
        columns[key] = np.empty(len(extras), dtype=object)
        for row, extra in enumerate(extras):
            columns[key][row] = extra.get(key)
    return columns
