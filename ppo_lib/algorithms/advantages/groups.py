"""Statistics over the rollouts of one prompt."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_lib.algorithms.masked import masked_sum
from ppo_lib.errors import BatchMismatchError


@dataclass(frozen=True)
class Groups:
    """Scores of rows and the groups they are compared in; all (B,), scores in float64.

    In float64 the sum of equal float32 scores is exact, so a group of equal scores has deviation exactly 0.
    """

    scores: Tensor
    group: Tensor  # int64, numbered by first appearance
    counted: Tensor  # bool, rows with at least one policy token; the others are in no statistic

    @classmethod
    def of(cls, token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Any]) -> Groups:
        """Sum the rewards (B, R) of each row over its policy tokens, and group rows by `index` (B,), any hashables."""
        keys = index.tolist() if isinstance(index, (np.ndarray, Tensor)) else list(index)
        if len(keys) != len(response_mask):
            raise BatchMismatchError(f"index has {len(keys)} entries for {len(response_mask)} rows")
        numbers: dict[Any, int] = {}
        group = [numbers.setdefault(key, len(numbers)) for key in keys]
        groups = cls(
            scores=masked_sum(token_level_rewards, response_mask, dim=1).double(),
            group=torch.tensor(group, dtype=torch.int64, device=response_mask.device),
            counted=response_mask.bool().any(dim=1),
        )
        if len(keys) > 0 and len(numbers) == len(keys):
            warnings.warn("every prompt has one rollout: there is nothing to compare, advantages are 0", stacklevel=3)
        return groups

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` (B,) over the counted rows of each row's group, (B,)."""
        kept = torch.where(self.counted, values, 0)
        totals = kept.new_zeros(len(values)).index_add(0, self.group, kept)
        return totals[self.group]

    @property
    def size(self) -> Tensor:
        """How many rows of each row's group are counted, (B,) float64."""
        return self.sum(torch.ones_like(self.scores))

    def to_tokens(self, advantage: Tensor, response_mask: Tensor) -> Tensor:
        """Give each policy token its row's advantage (B,) -> (B, R) float32; 0 in groups of one and off the mask."""
        comparable = torch.where(self.counted & (self.size > 1), advantage, 0).float()
        return torch.where(response_mask.bool(), comparable[:, None], 0)
