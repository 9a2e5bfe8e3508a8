"""What the benchmarks share: models to run, CPU time, the machine's own rate, tables."""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:  # `python benchmarks/NAME.py` from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

# name: (hidden, layers, FFN, heads, key-value heads); the vocabulary is the character tokenizer's
SHAPES = {
    "tiny": (128, 2, 320, 4, 2),
    "3.2M": (256, 4, 688, 4, 4),
    "5M": (256, 6, 704, 8, 4),
    "25M": (512, 8, 1408, 8, 4),
    "30M": (512, 9, 1536, 8, 4),
}


def save_model(name: str, folder: Path) -> str:
    """A Llama of random weights and its character tokenizer in `folder`; returns the path."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ppo_lib.models.tiny_llama import VOCABULARY, character_tokenizer

    hidden, layers, ffn, heads, kv_heads = SHAPES[name]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return str(folder)


def write_prompts(path: Path, rows: int, length: int) -> None:
    """A data file of random prompts, one token a character."""
    from ppo_lib.models.tiny_llama import CHARACTERS

    generator = torch.Generator().manual_seed(0)
    with open(path, "w") as file:
        for row in torch.randint(1, len(CHARACTERS), (rows, length), generator=generator).tolist():
            prompt = "".join(CHARACTERS[i] for i in row)
            line = {"data_source": "bench", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": ""}}
            file.write(json.dumps(line) + "\n")


def cpu_seconds(work: Callable[[], Any], at_least_s: float = 0.3, at_most: int = 1000) -> float:
    """CPU-seconds of one call of `work`: the least of several, since what disturbs a run only ever adds to it."""
    work()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < at_least_s and len(times) < at_most):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def cpu_seconds_in_turn(*sides: Callable[[], Any], times: int = 5) -> list[float]:
    """The least CPU-seconds of each side, which run in turn, so that what disturbs the machine disturbs them all."""
    taken: list[list[float]] = [[] for _ in sides]
    for _ in range(times):
        for side, seen in zip(sides, taken):
            began = time.process_time()
            side()
            seen.append(time.process_time() - began)
    return list(map(min, taken))


def matmul_rate(dtype: torch.dtype, rows: int, inner: int, outer: int) -> float:
    """Operations per CPU-second of (rows, inner) @ (inner, outer), two for each multiply and add."""
    a, b = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
    return 2.0 * rows * inner * outer / cpu_seconds(lambda: torch.nn.functional.linear(a, b))


def peak_rss_mib() -> float:
    """The most memory this process has had, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB here
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def in_own_process(arguments: Sequence[str]) -> str:
    """The last line that this script prints when it is run with these arguments: peak memory is a process's own."""
    done = subprocess.run([sys.executable, sys.argv[0], *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout.strip().splitlines()[-1]


def machine() -> str:
    """One line on what this was measured with."""
    bf16 = torch.cpu.get_capabilities()
    kinds = [kind for kind in ("avx2", "avx512_f", "avx512_bf16", "amx_bf16") if bf16.get(kind)]
    return f"{platform.machine()}, {', '.join(kinds)}; torch {torch.__version__}, {torch.get_num_threads()} thread(s)"


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table in Markdown: the first column to the left, numbers to the right."""
    cells = [list(header), *[[_cell(value) for value in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(v.ljust(w) if i == 0 else v.rjust(w) for i, (v, w) in enumerate(zip(row, widths))) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (w + 1) + ("-" if i == 0 else ":") for i, w in enumerate(widths)) + "|")
    print(f"\n{title}\n\n" + "\n".join(lines), flush=True)


def _cell(value: Any) -> str:
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 100
        else (f"{value:.0f}" if isinstance(value, float) else str(value))
    )
