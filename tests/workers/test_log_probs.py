from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_lib.workers.log_probs import default_chunk_size, log_probs_and_entropy

M, H, V = 23, 7, 31


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((M, H), (V, H), (V,)))
    labels = torch.randint(0, V, (M,), generator=generator)
    return (*(tensor.to(dtype).requires_grad_() for tensor in (hidden, weight, bias)), labels)


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    log_softmax = (torch.nn.functional.linear(hidden, weight, bias).float() / temperature).log_softmax(-1)
    return log_softmax.gather(1, labels[:, None]).squeeze(1), -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("chunk", [None, 1, 5, 23])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_the_whole_softmax(
    chunk: int | None, temperature: float, with_bias: bool
) -> None:
    *ours, labels = inputs()
    *theirs, _ = inputs()
    if not with_bias:
        ours[2] = theirs[2] = None
    weights = torch.linspace(-1, 2, M)
    log_probs, entropy, _ = log_probs_and_entropy(
        *ours, labels, temperature=temperature, with_entropy=True, chunk_size=chunk
    )
    expected, expected_entropy = plain(*theirs, labels, temperature)
    torch.testing.assert_close(log_probs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    (log_probs * weights + 0.3 * entropy * weights.flip(0)).sum().backward()
    (expected * weights + 0.3 * expected_entropy * weights.flip(0)).sum().backward()
    for mine, other in zip(ours, theirs):
        if mine is not None:
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [None, 5])
def test_sum_of_squared_probabilities_is_that_of_the_whole_softmax_and_has_no_gradient(chunk: int | None) -> None:
    hidden, weight, bias, labels = inputs()
    found = log_probs_and_entropy(
        hidden, weight, bias, labels, temperature=0.6, with_sum_pi_squared=True, chunk_size=chunk
    )
    expected = torch.softmax((hidden @ weight.T + bias) / 0.6, dim=-1).square().sum(-1)
    torch.testing.assert_close(found[2], expected, rtol=1e-5, atol=1e-6)
    assert not found[2].requires_grad
    assert found[1] is None
    found[0].sum().backward()
    assert hidden.grad is not None


@pytest.mark.parametrize("through", ["log_probs", "entropy"])
def test_gradient_through_one_result_alone(through: str) -> None:
    *ours, labels = inputs()
    *theirs, _ = inputs()
    results = log_probs_and_entropy(*ours, labels, with_entropy=True, chunk_size=4)[:2]
    expected = plain(*theirs, labels, 1.0)
    which = ["log_probs", "entropy"].index(through)
    results[which].square().sum().backward()
    expected[which].square().sum().backward()
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_logits_of_more_than_a_chunk_never_exist_forward_or_backward() -> None:
    tokens, width, vocabulary, chunk = 200, 4, 50, 8
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    largest_legitimate = max(tokens * width, chunk * vocabulary)
    with LargestTensor() as seen:
        log_probs, entropy, _ = log_probs_and_entropy(hidden, weight, None, labels, with_entropy=True, chunk_size=chunk)
        (log_probs + entropy).sum().backward()
    assert seen.numel <= largest_legitimate
    with LargestTensor() as seen:  # the measure itself sees whole logits where they are
        plain(hidden, weight, None, labels, 1.0)
    assert seen.numel == tokens * vocabulary


def test_half_precision_products_still_give_an_fp32_softmax() -> None:
    hidden, weight, _, labels = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_probs, entropy, _ = log_probs_and_entropy(hidden, weight, None, labels, with_entropy=True, chunk_size=5)
    expected, expected_entropy = plain(hidden.bfloat16(), weight.bfloat16(), None, labels, 1.0)
    assert log_probs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(log_probs, expected)
    torch.testing.assert_close(entropy, expected_entropy)
    (log_probs + entropy).sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_default_chunk_fits_64_mib_on_a_cpu() -> None:
    assert default_chunk_size(49152, torch.device("cpu")) == (64 << 20) // (4 * 49152)
    assert default_chunk_size(1 << 40, torch.device("cpu")) == 1


def test_no_labels_give_no_results_and_zero_gradients() -> None:
    hidden, weight = torch.zeros(0, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    log_probs, entropy, _ = log_probs_and_entropy(
        hidden, weight, None, torch.zeros(0, dtype=torch.int64), with_entropy=True
    )
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert not weight.grad.any()
