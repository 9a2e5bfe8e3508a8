"""The small operations between a Llama-like model's matrix products, in fewer passes over memory.

On a CPU a pass over an activation costs as much as a twentieth of the matrix product beside it, and autograd makes and
keeps an activation for every step of a formula. Each function here is one node with its derivative written out: half
the passes, and less to keep. The numbers agree with the family's own to rounding; `check_packing` holds the one against
the other whenever a model is loaded.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ppo_lib.workers.attention import packed_attention

__all__ = ["fuse_layers", "gated_linear", "rms_norm", "rotate", "swiglu"]

_NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"}
_MLPS = {"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"}
_ATTENTIONS = {"LlamaAttention", "Qwen2Attention", "Qwen3Attention"}


def fuse_layers(network: nn.Module, packed: bool = True) -> None:
    """Let the layers of known kinds in a network compute with the functions below; others stay as they are.

    Without `packed` the attention layers too stay as they are: the rows of the network are not packed ones.
    """
    for module in network.modules():
        kind = type(module).__name__
        if kind in _NORMS:
            module.forward = MethodType(_norm_forward, module)
        elif kind in _MLPS and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation"):
            module.forward = MethodType(_mlp_forward, module)
        elif kind in _ATTENTIONS and packed:
            module.forward = MethodType(_attention_forward, module)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019); x (..., H), weight (H)."""
    if not torch.is_grad_enabled():
        return _normed(x, _norm_scale(x, eps), weight)
    return _RMSNorm.apply(x, weight, eps)


def rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al. 2021): with x1, x2 the halves of a head, (x1 cos - x2 sin, x2 cos + x1 sin).

    Args:
        states: (1, N, heads, head_dim).
        cos, sin: (1, N, head_dim), without gradient.
    """
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    if not torch.is_grad_enabled():
        return _turned(states.to(torch.promote_types(states.dtype, cos.dtype)), cos, sin, -1)
    return _Rotate.apply(states, cos, sin)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer 2020); of the three only the arguments are kept for backward.

    Where no gradient is computed, the result takes the place of `gate`.
    """
    if not torch.is_grad_enabled():
        return F.silu(gate, inplace=True).mul_(up)
    return _SwiGLU.apply(gate, up)


def gated_linear(gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """swiglu(gate, up) @ weight.T; the product of the two is computed again in backward, a seventh less to keep."""
    return _GatedLinear.apply(gate, up, weight)


def _norm_scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps): (..., 1) float32."""
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x * scale).mul_(weight).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        scale = _norm_scale(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return _normed(x, scale, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """With s the scale: dx = s w g - x s^3 mean(w g x), dw = sum of g x s."""
        x, weight, scale = ctx.saved_tensors
        shape, dtype = x.shape, x.dtype
        x, grad, scale = (part.flatten(0, -2).float() for part in (x, grad, scale))  # (N, H), (N, H), (N, 1)
        product = grad * x
        coefficient = product.mv(weight.float()).unsqueeze(1).mul_(scale**3).div_(-shape[-1])
        grad_x = (grad * weight).mul_(scale).addcmul_(x, coefficient)
        grad_weight = product.t().mv(scale.squeeze(1)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return grad_x.to(dtype).view(shape), grad_weight, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = states.dtype
        return _turned(states.to(torch.promote_types(states.dtype, cos.dtype)), cos, sin, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        half = cos.shape[-1] // 2
        # the transpose takes the sines of the other half
        swapped = torch.cat([sin[..., half:], sin[..., :half]], dim=-1)
        return _turned(grad, cos, swapped, 1).to(ctx.dtype), None, None


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=sign)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=-sign)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, F.silu(gate).mul_(grad)


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.weight_dtype, weight = weight.dtype, weight.to(gate.dtype)
        ctx.save_for_backward(gate, up, weight)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """With a = silu(gate), g = grad @ weight: d weight = grad.T @ (a up), d up = g a, d gate = g up silu'(gate)."""
        gate, up, weight = ctx.saved_tensors
        active, grad_weight = F.silu(gate), None
        if ctx.needs_input_grad[2]:
            product = (active * up).flatten(0, -2)
            grad_weight = (grad.flatten(0, -2).t() @ product).to(ctx.weight_dtype)
            del product
        grad = grad @ weight
        grad_up = active.mul_(grad)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad)
        return grad, grad_up, grad_weight


def _norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    down = self.down_proj
    if torch.is_grad_enabled() and type(down) is nn.Linear and down.bias is None:  # no adapter around it
        return gated_linear(gate, up, down.weight)
    return down(swiglu(gate, up))


def _attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (project(hidden_states).view(heads) for project in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    query, key = (rotate(states, *position_embeddings).transpose(1, 2) for states in (query, key))
    kwargs.setdefault("sliding_window", getattr(self, "sliding_window", None))
    out, _ = packed_attention(self, query, key, value.transpose(1, 2), attention_mask, scaling=self.scaling, **kwargs)
    return self.o_proj(out.flatten(-2)), None
