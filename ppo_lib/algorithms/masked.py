"""Sums and means over the tokens a mask keeps. What stands elsewhere, NaN too, reaches neither values nor gradients.

`0 * NaN` is NaN, so masks select with `torch.where` and never multiply. A mask may be bool, int or float and may have
holes (tool tokens inside a response); every nonzero entry is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_lib.algorithms.row_blocks import to_float32, whiten
from ppo_lib.errors import BatchMismatchError

LOG_RATIO_CLAMP = 20.0
"""Bound on every log ratio before it is used: exp(20) = 5e8 still squares to a finite float32."""

LOG_PROB_ROUNDING = 1e-5
"""How far the log-probs of two float32 passes over equal weights may be from each other."""


def check_same_shape(**tensors: Tensor) -> None:
    """Raise `BatchMismatchError`, naming the tensors, unless all of them are (B, R) with one shape."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise BatchMismatchError(f"expected one shape (rows, tokens) for all of: {listed}")


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `values` where `mask` is nonzero; 0 where it keeps nothing.

    Args:
        values: any shape.
        mask: the same shape; bool, int or float.
        dim: the dimension to sum over; None sums over all.
    """
    kept = torch.where(mask.bool(), values, 0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of `values` where `mask` is nonzero; 0, not NaN, where it keeps nothing."""
    kept = mask.bool()
    count = kept.count_nonzero() if dim is None else kept.count_nonzero(dim)
    return masked_sum(values, kept, dim) / count.clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` over the kept entries, with the unbiased variance; 0 elsewhere.

    Equal entries, or a single one, whiten to exactly 0.

    Args:
        values: (B, R) float32.
        mask: (B, R) bool, int or float.
    """
    kept = mask.bool()
    return to_float32(whiten(torch.where(kept, values, 0), kept))


def log_ratio(log_prob: Tensor, other_log_prob: Tensor, mask: Tensor | None = None) -> Tensor:
    """`log_prob - other_log_prob`, clamped to +-`LOG_RATIO_CLAMP`; 0 with zero gradient where `mask` is 0."""
    difference = log_prob - other_log_prob
    if mask is not None:
        difference = torch.where(mask.bool(), difference, 0)
    return difference.clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)


def distance(log_ratio: Tensor) -> Tensor:
    """`|log_ratio|`, any shape. Its gradient is the sign, and 0 up to `LOG_PROB_ROUNDING`.

    There the sign is that of a rounding error, and would be a gradient of full size in a random direction: the policy
    before its first update is the reference, and the one that sampled.
    """
    size = log_ratio.abs()
    return torch.where(size > LOG_PROB_ROUNDING, size, size.detach())
