"""Rollout correction where bypass mode makes it: in the update, by the policy of each optimizer step.

Before the update nobody knows how far the policy is from the rollout, since bypass mode saves the pass that would tell.
The update knows: its log-probs are the policy's, and the old ones are the rollout's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ppo_lib.algorithms import Denominators
from ppo_lib.algorithms.aggregate import denominators_of
from ppo_lib.algorithms.masked import log_ratio
from ppo_lib.algorithms.metric import Reduction
from ppo_lib.algorithms.rollout_correction import (
    batch_mean,
    correct_rollouts,
    importance_weights,
    left_by_rejection,
)
from ppo_lib.config import weighs_in_update
from ppo_lib.workers.metrics import StepMetrics

__all__ = ["LookAhead", "UpdateCorrection"]

_OVER_MINI_BATCHES: dict[str, Reduction] = {"rollout_corr/rollout_is_max": "max", "rollout_corr/rollout_is_min": "min"}
"""How the metrics of mini-batches become those of the step; the others are averaged."""


@dataclass(frozen=True)
class LookAhead:
    """What correction finds in a whole mini-batch before its losses are taken."""

    left: Tensor
    """(N,) bool: the tokens that rejection leaves."""
    mean_weight: float
    """What weights are divided by."""
    denominators: Denominators
    """Counted after rejection."""


class UpdateCorrection:
    """Section `algorithm.rollout_correction` in bypass mode, for one policy loss."""

    def __init__(self, section: Any, loss_mode: str) -> None:
        """`loss_mode` is the policy loss: only `reinforce` is weighed, the ratios of others weigh already."""
        weighs = weighs_in_update(loss_mode, section)
        self.config = section if weighs else section.model_copy(update={"rollout_is": None})
        self.normalizes = weighs and section.rollout_is_batch_normalize
        self.looks_ahead = self.normalizes or section.rollout_rs is not None

    def look_ahead(
        self, log_probs: Tensor, rollout_log_probs: Tensor, lengths: Tensor, denominators: Denominators
    ) -> LookAhead:
        """Reject and weigh all tokens (N,) of a mini-batch, whose rows have so many each: `lengths` (rows,) int64."""
        kept = _row_mask(lengths)
        log_r = log_ratio(_to_rows(log_probs, kept), _to_rows(rollout_log_probs, kept), kept)
        left = left_by_rejection(log_r, kept, self.config)
        level = self.config.rollout_is
        mean = batch_mean(importance_weights(log_r, kept, self.config), kept, level) if self.normalizes else 1.0
        return LookAhead(left[kept], mean, replace(denominators_of(left), horizon=denominators.horizon))

    def correct(
        self, log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, mean_weight: float
    ) -> tuple[Tensor, Tensor | None]:
        """The mask that rejection leaves and the weights, or None, of a micro-batch, all (b, r)."""
        kept = response_mask.bool()
        log_r = log_ratio(log_probs, rollout_log_probs, kept)
        left = left_by_rejection(log_r, kept, self.config)
        if self.config.rollout_is is None:
            return left, None
        return left, importance_weights(log_r, kept, self.config) / mean_weight

    def measure(self, log_probs: Tensor, rollout_log_probs: Tensor, lengths: Tensor, into: StepMetrics) -> None:
        """Add `rollout_corr/...` of all tokens (N,) of a mini-batch."""
        kept = _row_mask(lengths)
        ours, theirs = _to_rows(log_probs, kept), _to_rows(rollout_log_probs, kept)
        for name, value in correct_rollouts(ours, theirs, kept, self.config).metrics.items():
            into.add(_OVER_MINI_BATCHES.get(name, "mean"), {name: value})


def _row_mask(lengths: Tensor) -> Tensor:
    """(rows, width) bool: the first `lengths` (rows,) tokens of each."""
    width = max(1, int(lengths.max())) if len(lengths) else 1
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def _to_rows(tokens: Tensor, kept: Tensor) -> Tensor:
    """Tokens (N,) at their places in (rows, width), 0 elsewhere."""
    return tokens.new_zeros(kept.shape).masked_scatter(kept, tokens)
