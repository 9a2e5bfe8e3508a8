from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from workers_testing import save_tiny_model

from ppo_lib.workers.attention import PACKED_ATTENTION, PackedLayout, register_packed_attention
from ppo_lib.workers.fused import fuse_layers, gated_linear, rms_norm, rotate, swiglu


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def plain_rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    one, two = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(2) + torch.cat([-two, one], dim=-1) * sin.unsqueeze(2)


@pytest.mark.parametrize(
    ("ours", "plain", "inputs", "differentiable"),
    [
        (lambda x, w: rms_norm(x, w, 1e-5), plain_norm, [draw(2, 5, 6), draw(6)], 2),
        (rotate, plain_rotation, [draw(1, 5, 3, 8), draw(1, 5, 8), draw(1, 5, 8).flip(0, 1)], 1),
        (swiglu, lambda gate, up: F.silu(gate) * up, [draw(4, 6), draw(4, 6).flip(0)], 2),
        (
            gated_linear,
            lambda gate, up, w: (F.silu(gate) * up) @ w.T,
            [draw(1, 4, 6), draw(1, 4, 6).flip(1), draw(5, 6)],
            3,
        ),
    ],
    ids=["norm", "rotation", "swiglu", "gated linear"],
)
def test_values_and_gradients_are_those_of_the_formula(
    ours: Callable[..., torch.Tensor],
    plain: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    differentiable: int,
) -> None:
    results = []
    for function in (ours, plain):
        leaves = [x.float().requires_grad_(i < differentiable) for i, x in enumerate(inputs)]
        out = function(*leaves)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves[:differentiable])])
    for mine, other in zip(*results):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_without_gradient_are_those_with_it_bit_for_bit(dtype: torch.dtype) -> None:
    calls = [
        (lambda x, w: rms_norm(x, w, 1e-5), [draw(2, 5, 6), draw(6)]),
        (rotate, [draw(1, 5, 3, 8), draw(1, 5, 8), draw(1, 5, 8).flip(0, 1)]),
        (swiglu, [draw(4, 6), draw(4, 6).flip(0)]),
    ]
    for function, inputs in calls:
        with_gradient = function(*(x.to(dtype).requires_grad_(i == 0) for i, x in enumerate(inputs)))
        with torch.no_grad():
            without = function(*(x.to(dtype) for x in inputs))
        assert with_gradient.requires_grad
        assert torch.equal(with_gradient, without)


def test_norm_in_bfloat16_sums_its_gradients_in_fp32() -> None:
    x, weight, grad = draw(64, 32).bfloat16(), draw(32).bfloat16(), draw(64, 32).flip(0).bfloat16()
    results = []
    for dtype in (torch.float64, torch.bfloat16):
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (x, weight)]
        function = plain_norm if dtype == torch.float64 else lambda x, w: rms_norm(x, w, 1e-5)
        function(*leaves).backward(grad.to(dtype))
        results.append([leaf.grad.double() for leaf in leaves])
    for exact, rounded in zip(*results):
        assert (exact - rounded).norm() <= 3e-3 * exact.norm()  # bfloat16 has 8 bits: one rounding and no more


def test_rotation_by_known_angles() -> None:
    quarter = torch.tensor([[[0.0, 1.0, 0.0, 1.0]]]), torch.tensor([[[1.0, 0.0, 1.0, 0.0]]])  # 90 degrees, 0 degrees
    states = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]])
    assert rotate(states, *quarter).tolist() == [[[[-3.0, 2.0, 1.0, 4.0]]]]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_network_gives_the_same_outputs_and_gradients_fused(family: str, autocast: bool, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    register_packed_attention()
    path = save_tiny_model(tmp_path, family)
    ids = torch.randint(1, 60, (1, 11), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(7), torch.arange(4)]).unsqueeze(0)
    layout = PackedLayout((7, 4), torch.device("cpu"))
    results = []
    for fused in (False, True):
        network = AutoModelForCausalLM.from_pretrained(path, attn_implementation=PACKED_ATTENTION)
        if fused:
            fuse_layers(network)
            changed = {type(m).__name__.lower().removeprefix(family) for m in network.modules() if "forward" in vars(m)}
            assert changed == {"rmsnorm", "mlp"} | ({"attention"} if family != "mistral" else set())
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = network(input_ids=ids, position_ids=positions, use_cache=False, packed_rows=layout).logits
        out.float().log_softmax(-1)[..., 0].sum().backward()
        results.append((out.float(), torch.cat([p.grad.flatten() for p in network.parameters()])))
    tolerance = 3e-2 if autocast else 2e-6
    assert (results[0][0] - results[1][0]).norm() <= tolerance * results[0][0].norm()
    assert (results[0][1] - results[1][1]).norm() <= tolerance * results[0][1].norm()
