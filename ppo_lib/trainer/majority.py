"""Who wins a vote among k answers drawn from n: the probability, without drawing where that is cheap."""

from __future__ import annotations

import functools
from math import factorial

import numpy as np

_EXACT_UP_TO = 16  # answers; above, the exact sum over all outcomes takes longer than drawing
_DRAWS = 2000


@functools.lru_cache(maxsize=4096)
def win_probabilities(class_sizes: tuple[int, ...], draws: int) -> tuple[float, ...]:
    """The probability that each class has the most votes among `draws` answers drawn with replacement.

    A tie of t classes counts 1/t for each. Exact for up to 16 answers; above, the mean over 2000 draws from a fixed
    seed, so that the same votes always give the same number.

    Args:
        class_sizes: how many of the n answers are in each class, at least 1 each.
        draws: k, at least 1.

    Returns:
        One probability per class, summing to 1.
    """
    shares = np.array(class_sizes) / sum(class_sizes)
    wins = _exact if max(sum(class_sizes), draws) <= _EXACT_UP_TO else _sampled
    return tuple(wins(shares, draws).tolist())


def _exact(shares: np.ndarray, draws: int) -> np.ndarray:
    """Sum over j of P(class c gets j votes and every other class at most j), ties shared.

    With p the shares, that is k! p_c^j / j! times the coefficient of x^(k-j) in the product over the other classes d of
    sum_{i<j} (p_d x)^i / i! + u (p_d x)^j / j!, where u counts the classes that tie: t of them weigh 1/(1+t), which is
    the integral of u^t over [0, 1], and Gauss-Legendre takes that without error.
    """
    ties = min(len(shares), draws)
    nodes, weights = np.polynomial.legendre.leggauss(ties // 2 + 1)
    u = (nodes + 1)[None, :, None] / 2  # (1, U, 1)
    j = np.arange(1, draws + 1)[:, None, None]  # (J, 1, 1)
    i = np.arange(draws + 1)[None, None, :]  # (1, 1, K+1), the power of x
    kept = np.where(i < j, 1.0, np.where(i == j, u, 0.0))  # (J, U, K+1)
    over_factorial = 1 / np.array([factorial(n) for n in range(draws + 1)])
    factors = {p: kept * p ** np.arange(draws + 1) * over_factorial for p in set(shares.tolist())}

    chance = {}
    for winner in factors:
        others = shares.tolist()
        others.remove(winner)
        product = np.zeros_like(kept)
        product[..., 0] = 1
        for p in others:
            product = _times(product, factors[p])
        votes = np.arange(1, draws + 1)
        coefficient = product[votes - 1, :, draws - votes]  # (J, U)
        chance[winner] = factorial(draws) * (winner**votes * over_factorial[1:] * (coefficient @ weights / 2)).sum()
    return np.array([chance[p] for p in shares.tolist()])


def _times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of polynomials along the last axis, cut at its length."""
    width = a.shape[-1]
    product = np.zeros_like(a)
    for power in range(width):
        product[..., power:] += a[..., power : power + 1] * b[..., : width - power]
    return product


def _sampled(shares: np.ndarray, draws: int) -> np.ndarray:
    votes = np.random.default_rng(0).multinomial(draws, shares, size=_DRAWS)
    wins = votes == votes.max(axis=1, keepdims=True)
    return (wins / wins.sum(axis=1, keepdims=True)).mean(axis=0)
