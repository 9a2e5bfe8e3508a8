from __future__ import annotations

import numpy as np
import pytest
import torch

from ppo_lib.rollout import sampling
from ppo_lib.rollout.engine import SamplingParams
from ppo_lib.rollout.sampling import RowSampling, sample, uniforms

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -5.0, float("-inf")])


def _draws(params: SamplingParams, count: int, logits: torch.Tensor = LOGITS) -> tuple[torch.Tensor, torch.Tensor]:
    rows = RowSampling.of([params] * count, list(range(count)), len(logits), CPU)
    return sample(logits.expand(count, -1), rows, np.zeros(count, dtype=np.int64))


def test_uniforms_are_uniform_and_independent_of_neighbours():
    seeds, positions = np.repeat(np.arange(300), 100), np.tile(np.arange(100), 300)
    values = uniforms(seeds, positions).view(300, 100)
    assert ((values >= 0) & (values < 1)).all()
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(values.var() - 1 / 12) < 0.003
    for a, b in ((values[:-1], values[1:]), (values[:, :-1], values[:, 1:])):  # next seed, next position
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.02
    torch.testing.assert_close(uniforms(np.array([7]), np.array([3]))[0], values[7, 3], rtol=0, atol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_are_the_scaled_distribution(temperature):
    tokens, log_probs = _draws(SamplingParams(temperature=temperature), 20_000)
    expected = (LOGITS / temperature).log_softmax(-1)
    frequency = torch.bincount(tokens, minlength=6) / 20_000
    torch.testing.assert_close(frequency, expected.exp(), atol=0.012, rtol=0)
    torch.testing.assert_close(log_probs, expected[tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 1}, [0]),
        ({"top_p": 0.6}, [0]),
        ({"top_p": 0.7}, [0, 1]),  # the first holds 0.64
        ({"top_k": 2, "top_p": 0.8}, [0, 1]),  # of two tokens the first holds 0.73
        ({"top_k": 2, "top_p": 0.7}, [0]),
        ({"top_k": 0}, [0, 1, 2, 3, 4]),
        ({"top_k": 100}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-9}, [0]),
    ],
)
def test_top_k_and_top_p_narrow_the_draw_but_not_the_log_probs(params, allowed):
    tokens, log_probs = _draws(SamplingParams(**params), 20_000)
    expected = torch.zeros(6)
    expected[allowed] = LOGITS[allowed].softmax(-1)
    torch.testing.assert_close(torch.bincount(tokens, minlength=6) / 20_000, expected, atol=0.012, rtol=0)
    torch.testing.assert_close(log_probs, LOGITS.log_softmax(-1)[tokens], atol=1e-6, rtol=0)


def test_rows_with_different_parameters_stand_side_by_side():
    params = [
        SamplingParams(greedy=True, temperature=0.5),
        SamplingParams(temperature=0),
        SamplingParams(top_k=1, temperature=2.0),
        SamplingParams(temperature=2.0),
    ]
    rows = RowSampling.of(params, [0, 1, 2, 3], 6, CPU)
    tokens, log_probs = sample(LOGITS.expand(4, -1), rows, np.zeros(4, dtype=np.int64))
    assert tokens[:3].tolist() == [0, 0, 0]
    for row, scale in enumerate([0.5, 1.0, 2.0, 2.0]):
        torch.testing.assert_close(log_probs[row], (LOGITS / scale).log_softmax(-1)[tokens[row]], atol=1e-6, rtol=0)


def test_rows_in_blocks_equal_rows_at_once(monkeypatch):
    logits = torch.randn(50, 33, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=1 + i % 3, top_k=[-1, 4, 7][i % 3], greedy=i % 5 == 0) for i in range(50)]
    rows, positions = RowSampling.of(params, list(range(50)), 33, CPU), np.arange(50)
    whole = sample(logits, rows, positions)
    monkeypatch.setattr(sampling, "_BLOCK_ELEMENTS", 7 * 33)
    for a, b in zip(sample(logits, rows, positions), whole, strict=True):
        assert torch.equal(a, b)


def test_a_token_without_mass_is_never_drawn_even_at_the_ends_of_the_interval():
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")]]).expand(3, -1)
    cumulative = logits.exp().cumsum(1)
    drawn = torch.tensor([0.0, 0.5, 1.0])  # 1.0 is what float32 makes of a float64 just below it
    assert sampling._invert(cumulative, cumulative[:, -1:], drawn).tolist() == [1, 3, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"greedy": True}, {"top_k": 2}])
def test_non_finite_logits_show_in_the_log_prob(bad, params):
    logits = LOGITS.clone()
    logits[1] = bad
    _, log_probs = _draws(SamplingParams(**params), 4, logits)
    assert not torch.isfinite(log_probs).any()


def test_bfloat16_logits_are_normalised_in_float32():
    logits = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = RowSampling.of([SamplingParams()], [3], 5000, CPU)
    tokens, log_probs = sample(logits, rows, np.zeros(1, dtype=np.int64))
    torch.testing.assert_close(log_probs[0], logits[0].float().log_softmax(-1)[tokens[0]], atol=1e-5, rtol=0)
