"""Packed rows against padded ones: forward and backward of the log-probabilities, a quarter of the tokens real.

The padded side is what most trainers do: rows of one width with an attention mask through the family's own
`scaled_dot_product_attention`, logits at every response position, `log_softmax`, gather. The packed side is this
library's, as a training rank computes it, and once more with the family's own layers, so that the gain of packing is
seen apart from that of fused layers. Loss and weights are equal; a run stops where the losses differ. No prompt is
shared.

    OMP_NUM_THREADS=1 python benchmarks/packing.py [--quick]
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from common import cpu_seconds_in_turn, machine, print_table, save_model
from tensordict import TensorDict

from ppo_lib.workers.attention import PACKED_ATTENTION, register_packed_attention
from ppo_lib.workers.fused import fuse_layers
from ppo_lib.workers.modules import PolicyModule
from ppo_lib.workers.packing import JaggedRows, MicroBatching, pack_rows, plan_micro_batches
from protocol import tensordict_utils as tu

CPU = torch.device("cpu")


def make_rows(rows: int, width: int) -> list[torch.Tensor]:
    """Rows of random tokens whose lengths average a quarter of the width; at least one is as long as the width."""
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.rand(rows, generator=generator) ** 3 * width).long().clamp(8, width)
    lengths[0] = width
    while (excess := int(lengths.sum()) - rows * width // 4) != 0:  # to the token
        row = 1 + int(torch.randint(rows - 1, (1,), generator=generator))
        lengths[row] = (lengths[row] - (1 if excess > 0 else -1) * min(abs(excess), 8)).clamp(8, width)
    return [torch.randint(4, 90, (int(length),), generator=generator) for length in lengths]


def padded_side(model: Any, rows: list[torch.Tensor], width: int, micro: int) -> Callable[[], float]:
    ids = torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in rows])
    mask = torch.stack([torch.arange(width) < len(row) for row in rows]).long()

    def run() -> float:
        model.zero_grad()
        total = 0.0
        for start in range(0, len(rows), micro):
            part, part_mask = ids[start : start + micro], mask[start : start + micro]
            logits = model(input_ids=part, attention_mask=part_mask, use_cache=False).logits[:, :-1]
            log_probs = logits.float().log_softmax(-1).gather(-1, part[:, 1:, None]).squeeze(-1)
            loss = -(log_probs * part_mask[:, 1:]).sum() / mask.sum()
            loss.backward()
            total += loss.item()
        return total

    return run


def packed_side(model: Any, rows: list[torch.Tensor]) -> Callable[[], float]:
    columns = {"input_ids": rows, "position_ids": [torch.arange(len(row)) for row in rows]}
    batch: dict[str, Any] = {name: tu.nested_tensor_from_tensor_list(values) for name, values in columns.items()}
    batch["response_lens"] = torch.tensor([len(row) - 1 for row in rows])
    jagged = JaggedRows(TensorDict(batch, batch_size=[len(rows)]))
    # rows of one token would seem to share a prompt; each is its own here
    jagged.__dict__["prompts"] = [(number, 1) for number in range(len(rows))]
    module, tokens = PolicyModule(model), sum(map(len, rows))

    def run() -> float:
        model.zero_grad()
        total = 0.0
        size = MicroBatching(max_tokens=16384).on(CPU, max(jagged.lengths), training=True)
        for part in plan_micro_batches(jagged.lengths, size, prompts=jagged.prompts):
            loss = -module(pack_rows(jagged, part, CPU), 1.0, False)["log_probs"].sum() / tokens
            loss.backward()
            total += loss.item()
        return total

    return run


def compare(name: str, rows: int, width: int) -> list[Any]:
    from transformers import AutoModelForCausalLM

    register_packed_attention()
    data = make_rows(rows, width)
    real = sum(map(len, data)) / (rows * width)
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(name, Path(folder))
        padded = padded_side(AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa"), data, width, 4)
        stock, fused = (
            AutoModelForCausalLM.from_pretrained(path, attn_implementation=PACKED_ATTENTION) for _ in range(2)
        )
    fuse_layers(fused)
    packed, own_layers = packed_side(fused, data), packed_side(stock, data)
    one = padded()
    for side in (packed, own_layers):
        if abs(one - (other := side())) > 1e-4 * abs(one):
            raise SystemExit(f"{name}: the losses differ, {one} padded and {other} packed")
    slow, fast, plain = cpu_seconds_in_turn(padded, packed, own_layers)
    return [f"{name}, {rows} rows x {width}", f"{real:.0%}", slow, fast, slow / fast, plain, slow / plain]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    cases = [("tiny", 8, 128)] if quick else [("5M", 16, 512), ("5M", 8, 1024), ("30M", 8, 512), ("30M", 8, 1024)]
    print(machine())
    rows = [compare(*case) for case in cases]
    header = ["model", "real", "padded CPU-s", "packed CPU-s", "ratio (target 4.5)", "own layers CPU-s", "ratio"]
    print_table("Forward and backward of log-probabilities, fp32", header, rows)


if __name__ == "__main__":
    main()
