"""Drawing tokens from logits, row by row seeded, with the log-probability a trainer can recompute.

A row's token is the inverse of its cumulative distribution at one uniform number, and that number is a hash of the
row's seed and the position in its response. So a request's draws do not depend on which rows stand beside it or on
how often the generator was called before, and no B x V noise is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ppo_lib.rollout.engine import SamplingParams

# Logits are handled a block of rows at a time: with a vocabulary of 150k and 256 rows the temporaries of all rows at
# once would outweigh a small model.
_BLOCK_ELEMENTS = 1 << 24


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """One number in [0, 1) per row, a pure function of (seed, position): SplitMix64's output function, twice.

    Args:
        seeds: (b,) int64.
        positions: (b,) int64, the index of the token in its response.

    Returns:
        (b,) float64.
    """
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds.astype(np.uint64)) ^ positions.astype(np.uint64))
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _splitmix(x: np.ndarray) -> np.ndarray:
    """One step of SplitMix64 (Steele, Lea, Flood 2014) on uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass
class RowSampling:
    """The sampling parameters of b rows as tensors, rebuilt only when rows join or leave.

    Args:
        scale: (b, 1) float32, one over the temperature; None where all are 1.
        greedy: (b,) bool; None where no row is greedy.
        narrowed: (k,) int64, the rows with a top_k or top_p; None where there are none.
        top_k: (k,) int64, the vocabulary's size where all tokens count.
        top_p: (k,) float32.
        seeds: (b,) int64.
    """

    scale: torch.Tensor | None
    greedy: torch.Tensor | None
    narrowed: torch.Tensor | None
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: np.ndarray

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], seeds: Sequence[int], vocab: int, device: torch.device
    ) -> RowSampling:
        """Collect the parameters of these rows."""
        greedy = [p.is_greedy for p in params]
        scale = [1.0 if p.temperature == 0 else 1.0 / p.temperature for p in params]
        narrowed = [
            i for i, p in enumerate(params) if not greedy[i] and (0 < p.top_k < vocab or p.top_p < 1)
        ]  # a greedy row is the same with and without them
        return cls(
            scale=torch.tensor(scale, device=device).unsqueeze(1) if any(s != 1 for s in scale) else None,
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            narrowed=torch.tensor(narrowed, device=device) if narrowed else None,
            top_k=torch.tensor([params[i].top_k if params[i].top_k > 0 else vocab for i in narrowed], device=device),
            top_p=torch.tensor([params[i].top_p for i in narrowed], device=device, dtype=torch.float32),
            seeds=np.asarray(seeds, dtype=np.int64),
        )


def sample(logits: torch.Tensor, rows: RowSampling, positions: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: (b, V) of any float dtype.
        rows: The rows' parameters.
        positions: (b,) int64, the index of the drawn token in its row's response.

    Returns:
        Tokens (b,) int64 and their log-probabilities (b,) float32 under softmax(logits / temperature). A row whose
        logits are not finite has a log-probability that is not finite.
    """
    drawn = uniforms(rows.seeds, positions).to(logits.device, torch.float32)
    size = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    parts = [_sample_block(logits, rows, drawn, begin, begin + size) for begin in range(0, len(logits), size)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([log_probs for _, log_probs in parts])


def _sample_block(
    logits: torch.Tensor, rows: RowSampling, drawn: torch.Tensor, begin: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows begin..end of `sample`."""
    scaled = logits[begin:end].float()  # (c, V)
    if rows.scale is not None:
        scaled = scaled * rows.scale[begin:end]
    top = scaled.max(dim=1, keepdim=True).values
    mass = (scaled - top).exp_()
    greedy = None if rows.greedy is None else rows.greedy[begin:end]
    if greedy is not None and bool(greedy.all()):
        total = mass.sum(dim=1, keepdim=True)
        tokens = scaled.argmax(dim=1)
    else:
        cumulative = torch.cumsum(mass, dim=1, out=mass)
        total = cumulative[:, -1:].clone()
        tokens = _invert(cumulative, total, drawn[begin:end])
        if rows.narrowed is not None:
            _draw_narrowed(tokens, scaled, rows, drawn, begin, end)
        if greedy is not None:
            tokens = torch.where(greedy, scaled.argmax(dim=1), tokens)
    log_probs = scaled.gather(1, tokens.unsqueeze(1)) - top - total.log()
    return tokens, log_probs.squeeze(1)


def _invert(cumulative: torch.Tensor, total: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """First index whose cumulative mass is above drawn * total; never a token without mass.

    Rounding may lift drawn * total to total itself, which would point behind the last token.
    """
    target = torch.minimum(drawn.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    return found.clamp_(max=cumulative.shape[1] - 1)  # only reached on non-finite mass, which the caller refuses


def _draw_narrowed(
    tokens: torch.Tensor, scaled: torch.Tensor, rows: RowSampling, drawn: torch.Tensor, begin: int, end: int
) -> None:
    """Redraw, in place, the rows of the block that have a top_k or top_p: top_k first, top_p of what it leaves."""
    assert rows.narrowed is not None
    inside = (rows.narrowed >= begin) & (rows.narrowed < end)
    which = rows.narrowed[inside]
    if len(which) == 0:
        return
    top_k, top_p = rows.top_k[inside], rows.top_p[inside].unsqueeze(1)
    width = int(top_k.max())
    values, order = torch.topk(scaled[which - begin], width, dim=1)  # (c, width), sorted
    mass = (values - values[:, :1]).exp_()
    mass *= torch.arange(width, device=mass.device) < top_k.unsqueeze(1)
    cumulative = mass.cumsum(dim=1)
    # A token counts while the mass before it is below top_p, so the first always does.
    kept = (cumulative - mass < top_p * cumulative[:, -1:]).sum(dim=1, keepdim=True).clamp_(min=1)
    total = cumulative.gather(1, kept - 1)
    place = _invert(cumulative, total, drawn[which])
    tokens[which - begin] = order.gather(1, place.unsqueeze(1)).squeeze(1)
