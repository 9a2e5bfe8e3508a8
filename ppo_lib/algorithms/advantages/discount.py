"""Discounted sums along a row, without a Python step per token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_BLOCK = 64


class PolicyTokens:
    """Where the policy tokens of each row are, to close the holes between them and open them again.

    Args:
        response_mask: (B, R) bool, int or float.
    """

    def __init__(self, response_mask: Tensor) -> None:
        self.kept = response_mask.bool()
        starts_again = bool((self.kept[:, 1:] & ~self.kept[:, :-1]).any())
        # the column each kept token moves to, (B, R) int64; None where all rows start at once and have no holes
        self._column = (self.kept.cumsum(dim=1) - 1).clamp(min=0) if starts_again else None

    def pack(self, x: Tensor) -> Tensor:
        """A new tensor with the kept entries of each row of `x` (B, R) at its left, in order, and 0 after them."""
        x = torch.where(self.kept, x, 0)
        if self._column is None:
            return x
        return torch.zeros_like(x).scatter_add_(1, self._column, x)  # what is not kept adds its 0 to a neighbour

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse: entries back in their columns, 0 elsewhere."""
        if self._column is None:
            return torch.where(self.kept, packed, 0)
        return torch.where(self.kept, packed.gather(1, self._column), 0)


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
