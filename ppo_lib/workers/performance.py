"""How much arithmetic a rank's passes did, in how many seconds, of how much it could have done, in how much memory.

Counted is what the model has to compute for the tokens that were packed: a prompt that several rollouts share counts
once, the output embedding counts at response positions only, recomputation under activation checkpointing not at all.
Forward costs 2 operations a weight of every linear layer and token, and in each attention layer 4 per query-key pair,
head and component of a head; backward twice that, once where the weights are frozen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import psutil
import torch
from torch import nn

from ppo_lib.workers.attention import PackedLayout
from ppo_lib.workers.packing import PackedRows

__all__ = ["Arithmetic", "Meter", "attended_pairs", "device_peak"]

# Dense bfloat16 operations a second, as the makers state them; the first name that a device's name contains counts.
_GPU_PEAKS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


@cache
def device_peak(device_name: str, dtype: torch.dtype, threads: int) -> float | None:
    """Operations per second a device can do at most: from a table on CUDA, measured on a CPU.

    Args:
        device_name: "cpu", or what CUDA calls the device.
        dtype: what the matrix products run in.
        threads: of this process; the CPU's rate depends on them.

    Returns:
        None for a GPU that is not in the table, or one that does not compute in half precision.
    """
    if device_name != "cpu":
        known = (peak for name, peak in _GPU_PEAKS.items() if name in device_name)
        return None if dtype == torch.float32 else next(known, None)
    size = 1024
    matrix = torch.ones(size, size, dtype=dtype)
    best = float("inf")
    for _ in range(6):
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def attended_pairs(layout: PackedLayout, window: int | None = None) -> int:
    """Query-key pairs of causal attention over a packed row, every token seeing at most `window` tokens."""
    pairs = 0
    for own, (_, prefix) in zip(layout.lengths, layout.before):
        first, last = prefix + 1, prefix + own  # tokens that the first and the last query see
        if window is None or last <= window:
            pairs += (first + last) * own // 2
        else:
            free = max(0, window - first)  # queries that see less than a window
            pairs += (first + first + free - 1) * free // 2 + (own - free) * window
    return pairs


@dataclass(frozen=True)
class Arithmetic:
    """What a model computes per token: `weights` of linear layers, `head` weights at response positions only,
    `attention` components of all heads, and the sliding `windows` of its layers (None: all tokens).
    """

    weights: int
    head: int
    attention: int
    windows: tuple[int | None, ...]
    trained_share: float

    @classmethod
    def of(cls, module: Any) -> Arithmetic | None:
        """Of a `PolicyModule` or `ValueModule`; None for a mixture of experts, of which a token uses some."""
        network = module.model
        config = network.config.get_text_config()
        if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
            return None
        head = module.head if hasattr(module, "head") else network.get_output_embeddings()
        linear = [m.weight for m in network.modules() if isinstance(m, nn.Linear) and m is not head]
        weights = sum(weight.numel() for weight in linear)
        trained = sum(weight.numel() for weight in linear if weight.requires_grad)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
        return cls(weights, head.weight.numel(), heads * head_dim, windows, trained / max(1, weights))

    def forward(self, rows: PackedRows) -> float:
        """Operations of a forward pass."""
        pairs = sum(attended_pairs(rows.layout, w) * self.windows.count(w) for w in set(self.windows))
        tokens, predicted = rows.input_ids.shape[1], len(rows.labels)
        return 2.0 * self.weights * tokens + 2.0 * self.head * predicted + 4.0 * self.attention * pairs

    def backward(self, rows: PackedRows) -> float:
        """Operations of a backward pass: the gradients of the inputs, and of the weights that are trained."""
        return self.forward(rows) * (1 + self.trained_share)


@dataclass
class Work:
    """What passes of one kind did since they were last asked."""

    operations: float = 0.0
    seconds: float = 0.0
    memory_gb: float = 0.0


@dataclass
class Meter:
    """Counts the work of one model on one rank, by kind of pass ("infer", "train")."""

    arithmetic: Arithmetic | None
    device: torch.device
    dtype: torch.dtype
    work: dict[str, Work] = field(default_factory=dict)

    @contextmanager
    def measuring(self, kind: str) -> Iterator[Work]:
        """Time what happens inside; the caller adds operations to what it is given."""
        work = self.work.setdefault(kind, Work())
        began = time.perf_counter()
        yield work
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        work.seconds += time.perf_counter() - began
        work.memory_gb = max(work.memory_gb, _memory(self.device) / 2**30)

    def forward(self, rows: PackedRows) -> float:
        """Operations of a forward pass over these rows; 0 where they cannot be told."""
        return 0.0 if self.arithmetic is None else self.arithmetic.forward(rows)

    def backward(self, rows: PackedRows) -> float:
        """Operations of a backward pass over these rows; 0 where they cannot be told."""
        return 0.0 if self.arithmetic is None else self.arithmetic.backward(rows)

    def report(self) -> dict[str, dict[str, float]]:
        """`operations`, `seconds`, `memory_gb` and the device's `peak` (0: unknown) by kind, and begin anew."""
        name = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        peak = device_peak(name, self.dtype, torch.get_num_threads()) or 0.0
        done, self.work = self.work, {}
        return {kind: {**vars(work), "peak": peak} for kind, work in done.items()}


def _memory(device: torch.device) -> int:
    """Bytes: what this process holds on a CPU, what tensors hold on a GPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss
