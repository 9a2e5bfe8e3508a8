"""Statistics over the rollouts of one prompt."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_lib.algorithms.masked import check_same_shape
from ppo_lib.algorithms.row_blocks import row_sums
from ppo_lib.errors import BatchMismatchError


@dataclass(frozen=True)
class Groups:
    """Outcomes of rows and the groups they are compared in; all (B,), in float64.

    In float64 the sum of equal float32 outcomes is exact, so a group of equal outcomes has deviation exactly 0.
    """

    scores: Tensor
    group: Tensor  # int64 though, numbered by first appearance
    lengths: Tensor  # policy tokens; rows with none are in no statistic

    @classmethod
    def of(cls, token_level_rewards: Tensor, response_mask: Tensor, index: Iterable[Any]) -> Groups:
        """Sum the rewards (B, R) of each row over its policy tokens, and group rows by `index` (B,), any hashables."""
        check_same_shape(token_level_rewards=token_level_rewards, response_mask=response_mask)
        keys = index.tolist() if isinstance(index, (np.ndarray, Tensor)) else list(index)
        if len(keys) != len(response_mask):
            raise BatchMismatchError(f"index has {len(keys)} entries for {len(response_mask)} rows")
        numbers: dict[Any, int] = {}
        group = [numbers.setdefault(key, len(numbers)) for key in keys]
        if len(keys) > 0 and len(numbers) == len(keys):
            warnings.warn("every prompt has one rollout: there is nothing to compare, advantages are 0", stacklevel=3)
        scores, lengths = row_sums(token_level_rewards, response_mask)
        return cls(scores, torch.tensor(group, dtype=torch.int64, device=response_mask.device), lengths)

    @property
    def counted(self) -> Tensor:
        """Which rows have a policy token, (B,) bool."""
        return self.lengths > 0

    def blocks(self, rows: int) -> Iterator[tuple[Tensor, Groups]]:
        """Whole groups, about `rows` rows at a time: which rows these are, (b,) int64, and their groups."""
        order, start = self.group.argsort(stable=True), 0
        for end in self.group.bincount().cumsum(0).tolist():
            if end - start >= rows or end == len(order):
                block, start = order[start:end], end
                yield block, Groups(self.scores[block], self.group[block] - self.group[block[0]], self.lengths[block])

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` (B, ...) over the counted rows of each row's group, (B, ...)."""
        kept = torch.where(_like(self.counted, values), values, 0)
        return torch.zeros_like(kept).index_add_(0, self.group, kept)[self.group]

    def max(self, values: Tensor) -> Tensor:
        """The largest of `values` (B,) over the counted rows of each row's group, (B,); -inf where there is none."""
        kept = torch.where(self.counted, values, -torch.inf)
        return torch.full_like(kept, -torch.inf).scatter_reduce_(0, self.group, kept, "amax")[self.group]

    @functools.cached_property
    def size(self) -> Tensor:
        """How many rows of each row's group are counted, (B,) float64."""
        return self.sum(torch.ones_like(self.scores))

    def centred(self, values: Tensor) -> Tensor:
        """`values` (B, ...) minus the mean over each row's group; exactly 0 where a group's values are all equal."""
        return values - self.sum(values) / _like(self.size, values).clamp(min=1)

    def std(self, centred: Tensor) -> Tensor:
        """The unbiased standard deviation of `centred` values (B, ...) over each row's group; 0 in groups of one."""
        return (self.sum(centred.square()) / (_like(self.size, centred) - 1).clamp(min=1)).sqrt()

    def tell_apart(self, centred: Tensor) -> Tensor:
        """Which rows have siblings to be compared with and outcomes that differ, (B,) bool.

        Args:
            centred: (B,) or (B, K), the outcomes minus the mean of their group.
        """
        differing = self.sum(centred.abs()) > 0
        if differing.dim() > 1:
            differing = differing.any(dim=1)
        return self.counted & (self.size > 1) & differing


def _like(per_row: Tensor, values: Tensor) -> Tensor:
    """`per_row` (B,) with as many trailing dimensions of 1 as `values` has."""
    return per_row.view(-1, *[1] * (values.dim() - 1))
