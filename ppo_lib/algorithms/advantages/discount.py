"""Discounted sums along a row, without a Python step per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppo_lib.algorithms.row_blocks import only_kept, row_blocks

_BLOCK = 64


class PolicyTokens:
    """Where the policy tokens of each row are, to close the holes between them and open them again.

    Args:
        kept: (b, R), 1 on policy tokens and 0 elsewhere, in the dtype of the computation.
        closes_holes: whether to; if not, entries stay in their columns.
    """

    def __init__(self, kept: Tensor, closes_holes: bool = True) -> None:
        self.kept = kept
        starts_again = (
            closes_holes and kept.shape[1] > 1 and len(kept) > 0 and bool((kept[:, 1:] - kept[:, :-1]).max() > 0)
        )
        # the column each kept token moves to, (b, R) int64; None where all rows start at once and have no holes
        self._column = (kept.long().cumsum(dim=1) - 1).clamp(min=0) if starts_again else None

    def pack(self, x: Tensor) -> Tensor:
        """A new tensor with the kept entries of each row of `x` (b, R) at its left, in order, and 0 elsewhere."""
        x = only_kept(x, self.kept)
        if self._column is None:
            return x
        return torch.zeros_like(x).scatter_add_(1, self._column, x)  # what is not kept adds its 0 to a neighbour

    def unpack(self, packed: Tensor, out: Tensor | None = None) -> Tensor:
        """The inverse: entries back in their columns, 0 elsewhere. Behind the kept entries, `packed` must be finite."""
        return torch.mul(packed if self._column is None else packed.gather(1, self._column), self.kept, out=out)


class DiscountedSum:
    """y_t = x_t + decay * y_{t+1}, with y = 0 after the end, for each row.

    Inside a block of 64 tokens this is one product with a triangular matrix of powers of the decay, and from block to
    block another, with powers of decay^64 on the first y of each.

    Args:
        width: R, of the rows to sum.
        decay: at least 0 and at most 1.
        like: a tensor of the dtype and on the device of the rows.
    """

    def __init__(self, width: int, decay: float, like: Tensor) -> None:
        self.width, self.count = width, -(-width // _BLOCK)
        self.inside = _powers(decay, _BLOCK, like)
        self.between = _powers(decay**_BLOCK, self.count, like)
        self.to_next = _small_to_zero(like.new_tensor(decay) ** torch.arange(_BLOCK, 0, -1, device=like.device))

    def __call__(self, x: Tensor) -> Tensor:
        """The sums of (b, R), as a new tensor."""
        blocks = pad(x, (0, -self.width % _BLOCK)).view(len(x), self.count, _BLOCK)
        sums = blocks @ self.inside
        if self.count > 1:
            first = sums[..., 0] @ self.between  # (b, count): y at the start of each block
            sums[:, :-1].addcmul_(first[:, 1:, None], self.to_next)
        return sums.view(len(x), self.count * _BLOCK)[:, : self.width]


def scan_rows(
    response_mask: Tensor, decay: float, block: Callable[[PolicyTokens, slice, DiscountedSum], tuple[Tensor, ...]]
) -> tuple[Tensor, ...]:
    """Run `block` over the rows and put together what it returns of each, with the holes open again, (B, R).

    In float32, and once more in float64 if that overflowed; the results have the dtype it took.
    """
    results: tuple[Tensor, ...] = ()
    for dtype in (torch.float32, torch.float64):
        like, results = torch.zeros((), dtype=dtype, device=response_mask.device), ()
        scan = DiscountedSum(response_mask.shape[1], decay, like)
        for rows, kept in row_blocks(response_mask, dtype):
            tokens = PolicyTokens(kept)
            packed = block(tokens, rows, scan)
            results = results or tuple(like.new_empty(response_mask.shape) for _ in packed)
            for result, part in zip(results, packed):
                tokens.unpack(part, out=result[rows])
        if all(bool(result.sum().isfinite()) for result in results):
            break
    return results


def discounted_sum_to_go(x: Tensor, decay: float) -> Tensor:
    """`DiscountedSum` of a tensor (B, R) at once."""
    return DiscountedSum(x.shape[1], decay, x)(x)


def _powers(decay: float, size: int, like: Tensor) -> Tensor:
    """(size, size): decay^(i - j) for the i-th entry (row) as the j-th (column) sees it, 0 for entries before it."""
    step = torch.arange(size, device=like.device)
    distance = step[:, None] - step
    return torch.where(distance >= 0, _small_to_zero(like.new_tensor(decay) ** distance.clamp(min=0)), 0)


def _small_to_zero(powers: Tensor) -> Tensor:
    """Without the powers so small that a processor would slow down over them."""
    return torch.where(powers < 1e-30, 0, powers)
