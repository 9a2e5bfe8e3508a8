"""Discounted sums along a row, without a Python step per token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 64


def discounted_sum_to_go(x: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t+1}, with y = 0 after the end, for each row.

    Inside a block of 64 tokens this is one product with a triangular matrix of powers of the decay; only the blocks
    follow one another, each taking the first y of the block to its right.

    Args:
        x: (B, R) float32.
        decay: at least 0 and at most 1.

    Returns:
        (B, R) float32.
    """
    rows, width = x.shape
    count = -(-width // _BLOCK)
    blocks = pad(x, (0, -width % _BLOCK)).view(rows, count, _BLOCK)
    step = torch.arange(_BLOCK, device=x.device)
    distance = step[:, None] - step  # (64, 64), from token (row) back to the token that looks ahead (column)
    powers = torch.where(distance >= 0, torch.tensor(decay, dtype=x.dtype, device=x.device) ** distance.clamp(min=0), 0)
    sums = blocks @ powers
    to_next_block = powers[-1] * decay  # decay ** (64 - t)
    for block in reversed(range(count - 1)):
        sums[:, block] += sums[:, block + 1, :1] * to_next_block
    return sums.view(rows, count * _BLOCK)[:, :width]
