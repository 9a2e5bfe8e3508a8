"""What only a GPU can show: the flash kernel against the sliced one, offloading, and the numbers of a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from workers_ranks import train_on
from workers_testing import config, run_ranks

from ppo_lib.workers.attention import PackedLayout, packed_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ACTOR = "actor_rollout_ref.actor."


@pytest.mark.parametrize("prefixes", [None, (-1, 0, -1, 2)])
@pytest.mark.parametrize("window", [None, 3])
def test_flash_attention_equals_the_sliced_one(window: int | None, prefixes: tuple[int, ...] | None) -> None:
    lengths, device = (5, 1, 7, 7), torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 20, 64), (1, 2, 20, 64), (1, 2, 20, 64)]
    states = [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = [tensor.to(device, dtype).requires_grad_() for tensor in states]
        layout = PackedLayout(lengths, device, prefixes)
        out, _ = packed_attention(nn.Identity(), *inputs, None, packed_rows=layout, sliding_window=window)
        out.float().square().sum().backward()
        results.append([out.float(), *(tensor.grad.float() for tensor in inputs)])
    for flash, sliced in zip(*results):
        torch.testing.assert_close(flash, sliced, rtol=3e-2, atol=3e-2)


def test_fp32_on_cuda_gives_the_numbers_of_a_cpu(tiny_model: str) -> None:
    cfg = config(tiny_model)
    cpu, cuda = (run_ranks(train_on, 1, cfg, device)[0] for device in ("cpu", "cuda"))
    for ours, theirs in zip(cuda["metrics"], cpu["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("key", ["param_offload", "optimizer_offload", "offload_policy"])
def test_offloading_frees_memory_and_changes_no_number(key: str, tiny_model: str) -> None:
    bf16 = f"{ACTOR}fsdp_config.dtype=bfloat16"
    plain = run_ranks(train_on, 1, config(tiny_model, bf16), "cuda")[0]
    moved = run_ranks(train_on, 1, config(tiny_model, bf16, f"{ACTOR}fsdp_config.{key}=true"), "cuda")[0]
    for ours, theirs in zip(moved["metrics"], plain["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    where = "moments" if key == "optimizer_offload" else "parameters"
    assert (plain[where], moved[where]) == ({"cuda"}, {"cpu"})


def test_compiled_blocks_give_the_numbers_of_plain_ones(tiny_model: str) -> None:
    plain = run_ranks(train_on, 1, config(tiny_model), "cuda")[0]
    compiled = run_ranks(train_on, 1, config(tiny_model, f"{ACTOR}use_torch_compile=true"), "cuda")[0]
    for ours, theirs in zip(compiled["metrics"], plain["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-5)
