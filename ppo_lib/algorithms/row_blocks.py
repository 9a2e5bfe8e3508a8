"""Passes over (B, R) tensors in blocks of rows that fit the processor's cache.

A large tensor costs most of its time on the way to memory and back, so what is done to one is done block by block, all
of it while the block is near. Masks are multiplied as float32 zeros and ones, which runs six times faster than choosing
by a bool; where that met a NaN or an infinity behind the mask, the block is done again by choosing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

_ELEMENTS = 2**17


def row_blocks(mask: Tensor, dtype: torch.dtype = torch.float32) -> Iterator[tuple[slice, Tensor]]:
    """The rows of `mask` (B, R), bool, int or float, block by block: where they are and (b, R) zeros and ones.

    Without rows there is one block, without rows. The zeros and ones lie in the same memory each time: use them, or
    write over them, before the next block.
    """
    rows, height = len(mask), _height(mask)
    memory = torch.empty((min(height, rows), mask.shape[1]), dtype=dtype, device=mask.device)
    for start in range(0, max(rows, 1), height):
        block = slice(start, min(start + height, rows))
        yield block, torch.ne(mask[block], 0, out=memory[: block.stop - start])


def _height(mask: Tensor) -> int:
    """How many rows of a (B, R) tensor are a block."""
    return max(1, _ELEMENTS // max(mask.shape[1], 1))


def only_kept(x: Tensor, kept: Tensor) -> Tensor:
    """A new (b, R) of the dtype of `kept`: x where `kept` is 1, 0 where it is 0, NaN and infinities there included."""
    x = x.detach().to(kept.dtype)
    product = x * kept
    if bool(product.sum().isfinite()):
        return product
    return torch.where(kept.bool(), x, 0)


def row_sums(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of each row of `x` (B, R) where the mask is 1, and over how many tokens; both (B,) float64."""
    x = x.detach().float()
    sums, counts = (torch.zeros(len(mask), dtype=torch.float32, device=mask.device) for _ in range(2))
    for block, kept in row_blocks(mask):
        torch.sum(kept, dim=1, out=counts[block])
        torch.sum(kept.mul_(x[block]), dim=1, out=sums[block])
    sums = sums.double()
    left = (~sums.isfinite()).nonzero().flatten()  # rows with something else behind the mask, or beyond float32
    for block, kept in row_blocks(mask[left]) if len(left) else ():
        chosen = only_kept(x[left[block]], kept)
        exact = chosen.sum(dim=1).double()
        sums[left[block]] = torch.where(exact.isfinite(), exact, chosen.double().sum(dim=1))
    return sums, counts.double()


def to_tokens(advantage: Tensor, mask: Tensor) -> Tensor:
    """Give each policy token its row's advantage, (B,) -> (B, R) float32; 0 off the mask."""
    advantage = to_float32(advantage)[:, None]
    tokens = torch.empty(mask.shape, dtype=torch.float32, device=mask.device)
    height = _height(mask)
    for rows, kept, out in zip(advantage.split(height), mask.split(height), tokens.split(height)):
        torch.ne(kept, 0, out=out).mul_(rows)
    return tokens


def whiten(values: Tensor, mask: Tensor, out: Tensor | None = None) -> Tensor:
    """`(x - mean) / sqrt(var + 1e-8)` over the tokens the mask keeps, with the unbiased variance; 0 elsewhere.

    Moments are taken about the mean of the first block that has any tokens, where they lose no digits. Equal values, or
    a single one, become exactly 0.

    Args:
        values: (B, R) float32 or float64, 0 off the mask.
        mask: (B, R) bool, int or float.
        out: where the result may be written, perhaps `values`; None makes a new tensor.

    Returns:
        (B, R) of the dtype of `values`, or float64 where squares are beyond float32.
    """
    out = torch.empty_like(values) if out is None else out
    shift = count = first = second = 0.0
    for block, kept in row_blocks(mask, values.dtype):
        if tokens := float(kept.sum()):
            shift = shift if count else _mean(values[block], kept)
            moved = (values[block] - shift).mul_(kept)
            count, first = count + tokens, first + float(moved.sum(dim=1).double().sum())
            second += float(moved.square_().sum(dim=1).double().sum())
    if count < 2:
        return out.zero_()
    if not math.isfinite(second) and values.dtype == torch.float32:
        return whiten(values.double(), mask)
    mean = shift + first / count
    scale = (max(second - first * first / count, 0.0) / (count - 1) + 1e-8) ** -0.5
    for block, kept in row_blocks(mask, values.dtype):
        torch.sub(values[block], mean, out=out[block]).mul_(kept.mul_(scale))
    return out


def _mean(values: Tensor, kept: Tensor) -> float:
    """The mean where `kept` is 1, without a rounding error where all values are equal."""
    some = float(values.flatten()[kept.flatten().argmax()])
    return some + float(((values - some) * kept).sum(dim=1).double().sum()) / float(kept.sum())


def to_float32(x: Tensor) -> Tensor:
    """`x` in float32; what float32 cannot hold becomes the largest that it can."""
    largest = torch.finfo(torch.float32).max
    return x if x.dtype == torch.float32 else x.clamp(-largest, largest).float()
