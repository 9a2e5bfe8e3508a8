"""Log-probabilities and entropies of chosen tokens from hidden states, with logits in existence a chunk at a time.

The logits of 16k tokens over a vocabulary of 150k take 10 GB in fp32, and their gradient as much again. Here neither
is ever whole: forward keeps two numbers a token, and backward computes each chunk's logits a second time. Where all
tokens fit in one chunk its log-softmax is kept and nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

__all__ = ["default_chunk_size", "log_probs_and_entropy"]

_CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}


def default_chunk_size(vocab_size: int, device: torch.device) -> int:
    """Positions whose fp32 logits fit the memory meant for them: 64 MiB on a CPU, 512 MiB on a GPU."""
    return max(1, _CHUNK_BYTES.get(device.type, 64 << 20) // (4 * vocab_size))


def log_probs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    chunk_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Log-probability of each label, and entropy, of softmax((hidden @ weight.T + bias) / temperature).

    The matrix products run in the dtype of `hidden` (or autocast's), the softmax always in fp32. Differentiable once
    in hidden, weight and bias, through log-probability and entropy.

    Args:
        hidden: (M, H), the states that predict the labels.
        weight: (V, H), the output embedding.
        bias: (V) or None.
        labels: (M) int64 in [0, V).
        temperature: divides the logits.
        with_entropy: also return the entropy in nats.
        with_sum_pi_squared: also return the sum over the vocabulary of the squared probabilities, without gradient.
        chunk_size: positions whose logits exist at once; None takes `default_chunk_size`.

    Returns:
        log_probs (M) float32, entropy (M) float32 or None, sum_pi_squared (M) float32 or None.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    chunk = chunk_size or default_chunk_size(weight.shape[0], hidden.device)
    wanted = (with_entropy, with_sum_pi_squared)
    log_probs, entropy, squared = _HeadLogProbs.apply(hidden, weight, bias, labels, temperature, wanted, chunk, dtype)
    return log_probs, entropy if with_entropy else None, squared if with_sum_pi_squared else None


class _HeadLogProbs(torch.autograd.Function):
    """With z the scaled logits and p their softmax: d log p_y = onehot_y - p, and dH = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        temperature: float,
        wanted: tuple[bool, bool],
        chunk: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log_probs, entropy, sum of squared probabilities), all (M); the last two are empty unless `wanted`."""
        ctx.set_materialize_grads(False)
        count = labels.shape[0]
        log_probs = torch.empty(count, dtype=torch.float32, device=hidden.device)
        with_entropy, with_squared = wanted
        entropy = torch.empty(count if with_entropy else 0, dtype=torch.float32, device=hidden.device)
        squared = torch.empty(count if with_squared else 0, dtype=torch.float32, device=hidden.device)
        kept = None
        with torch.autocast(hidden.device.type, enabled=False):
            states, matrix = hidden.to(dtype), weight.to(dtype)
            for part in _parts(count, chunk):
                log_softmax = _log_softmax(states[part], matrix, bias, temperature)  # (m, V)
                log_probs[part] = log_softmax.gather(1, labels[part, None]).squeeze(1)
                if with_entropy:
                    entropy[part] = -log_softmax.exp().mul_(log_softmax).sum(-1)
                if with_squared:
                    squared[part] = log_softmax.mul(2).exp_().sum(-1)
                if count <= chunk:
                    kept = log_softmax
                del log_softmax  # before the next chunk's is made
        ctx.save_for_backward(states, matrix, bias, labels, entropy, kept)
        ctx.temperature, ctx.chunk, ctx.input_dtypes = temperature, chunk, (hidden.dtype, weight.dtype)
        ctx.mark_non_differentiable(squared)
        return log_probs, entropy, squared

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_log_probs: torch.Tensor | None, grad_entropy: torch.Tensor | None, _: torch.Tensor | None
    ) -> tuple[Any, ...]:
        """Gradients of hidden, weight and bias."""
        states, matrix, bias, labels, entropy, kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        count = labels.shape[0]
        if grad_log_probs is None:
            grad_log_probs = torch.zeros(count, dtype=torch.float32, device=labels.device)
        grad_hidden = torch.empty_like(states, dtype=ctx.input_dtypes[0]) if needs_hidden else None
        grad_weight: torch.Tensor | None = None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needs_bias else None
        with torch.autocast(labels.device.type, enabled=False):
            for part in _parts(count, ctx.chunk):
                log_softmax = _log_softmax(states[part], matrix, bias, ctx.temperature) if kept is None else kept
                factor = -grad_log_probs[part, None]
                if grad_entropy is not None:
                    factor = factor - grad_entropy[part, None] * (log_softmax + entropy[part, None])
                grad_logits = log_softmax.exp().mul_(factor)  # (m, V)
                grad_logits.scatter_add_(1, labels[part, None], grad_log_probs[part, None])
                if ctx.temperature != 1:
                    grad_logits.div_(ctx.temperature)
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
                grad_logits = grad_logits.to(states.dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = grad_logits @ matrix
                if needs_weight:
                    grad_weight = _add_product(grad_weight, grad_logits.T, states[part])
        if needs_weight:
            grad_weight = torch.zeros_like(matrix) if grad_weight is None else grad_weight
            grad_weight = grad_weight.to(ctx.input_dtypes[1])
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


def _log_softmax(
    states: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, temperature: float
) -> torch.Tensor:
    logits = F.linear(states, matrix).float()
    if bias is not None:
        logits += bias
    if temperature != 1:
        logits.div_(temperature)
    return torch.log_softmax(logits, dim=-1)


def _add_product(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """total + a @ b, in place and summed in fp32 over chunks also where the product is in half precision."""
    if total is None:
        return (a @ b).float()
    return total.addmm_(a, b) if a.dtype == total.dtype else total.add_(a @ b)
