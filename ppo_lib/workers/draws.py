"""Random numbers of tokens that belong to the tokens, wherever their rows lie.

A generator would give a token another number with every split into micro-batches and ranks. These are hashes: of the
row's tokens, the position and the step. Rows with the same prompt and the same response have the same.
"""

from __future__ import annotations

import torch

from ppo_lib.workers.packing import JaggedRows

__all__ = ["token_draws"]

# splitmix64 (Steele, Lea, Flood, OOPSLA 2014), in the two's complement of int64
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def token_draws(batch: JaggedRows, seed: int) -> torch.Tensor:
    """Flat float64 in [0, 1) for the response tokens of all rows, drawn anew for every `seed`."""
    lengths, responses, step = (torch.tensor(x, dtype=torch.int64) for x in (batch.lengths, batch.response_lens, seed))
    of_tokens = _mixed(_mixed(batch.token_ids.long()) + _GOLDEN * _positions(lengths))
    before = torch.nn.functional.pad(of_tokens.cumsum(0), (1, 0))
    ends = lengths.cumsum(0)
    rows = before[ends] - before[ends - lengths]  # sums wrap around, which subtracts away
    drawn = _mixed(_mixed(rows + _GOLDEN * step).repeat_interleave(responses) + _GOLDEN * _positions(responses))
    return _shifted(drawn, 11).double() * 2.0**-53


def _positions(lengths: torch.Tensor) -> torch.Tensor:
    """1 to n in each row of n, flat."""
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    return torch.arange(1, len(starts) + 1) - starts


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Every bit of the result depends on every bit of x, int64."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x, int64, to the right by so many bits, zeros behind it."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
