"""The rollout engines side by side: start, tokens per CPU-second, a whole weight update.

    python benchmarks/rollout_engines.py            # SmolLM2-135M
    python benchmarks/rollout_engines.py --quick    # the tiny model, a smoke run

Every engine gets the same weights, prompts and lengths. CPU-seconds are those of this process and of the engine's own
processes together, so that an engine which works elsewhere is not seen as free.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from ppo_lib.config import load_config
from ppo_lib.models import resolve_model_path
from ppo_lib.rollout.engine import GenerationRequest, RolloutEngine, SamplingParams, TokenOutput
from ppo_lib.rollout.engines import engine_class
from ppo_lib.rollout.sglang.versions import is_installed
from ppo_lib.rollout.weights import buckets

PROMPT_TOKENS = 32


@dataclass(frozen=True)
class Measured:
    """One engine's row; seconds are wall time, CPU-seconds those of all its processes."""

    start_s: float
    start_cpu_s: float
    generate_s: float
    tokens_per_s: float
    tokens_per_cpu_s: float
    update_s: float


def cpu_seconds() -> float:
    """Of this process and all below it, those that have ended included."""
    me = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in [me, *me.children(recursive=True)]) + sum(me.cpu_times()[2:4])


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """(wall seconds, CPU-seconds)."""
    begin, cpu = time.perf_counter(), cpu_seconds()
    action()
    return time.perf_counter() - begin, cpu_seconds() - cpu


def requests(vocab: int, prompts: int, n: int, tokens: int) -> list[GenerationRequest]:
    """`prompts` x `n` requests of one length, drawn with seeds of their own."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, vocab, (prompts, PROMPT_TOKENS), generator=generator).tolist()
    return [
        GenerationRequest(f"{row}/{k}", ids[row], SamplingParams(max_tokens=tokens, ignore_eos=True, seed=row * n + k))
        for row in range(prompts)
        for k in range(n)
    ]


async def generate(engine: RolloutEngine, asked: list[GenerationRequest]) -> list[TokenOutput]:
    return list(await asyncio.gather(*(engine.generate(request) for request in asked)))


async def update(engine: RolloutEngine, model: PreTrainedModel) -> None:
    await engine.begin_update()
    for bucket in buckets(model.named_parameters(), 64 << 20):
        await engine.update_bucket(bucket)
    await engine.finish_update(0)


def measure(name: str, path: str, model: PreTrainedModel, prompts: int, n: int, tokens: int) -> Measured:
    overrides = [
        f"actor_rollout_ref.model.path={path}",
        f"actor_rollout_ref.rollout.name={name}",
        f"actor_rollout_ref.rollout.max_num_seqs={prompts * n}",
        f"data.max_prompt_length={PROMPT_TOKENS}",
        f"data.max_response_length={tokens}",
        "actor_rollout_ref.rollout.dtype=float32",
    ]
    section = load_config(overrides=overrides).actor_rollout_ref
    engines: list[RolloutEngine] = []
    build = engine_class(name)
    start, start_cpu = timed(lambda: engines.append(build(section, path)))  # type: ignore[call-arg]
    (engine,) = engines
    try:
        updated, _ = timed(lambda: asyncio.run(update(engine, model)))
        asked = requests(model.config.vocab_size, prompts, n, tokens)
        asyncio.run(generate(engine, asked[:n]))  # the first call of anything is slower
        outputs: list[TokenOutput] = []
        seconds, cpu = timed(lambda: outputs.extend(asyncio.run(generate(engine, asked))))
    finally:
        asyncio.run(engine.shutdown())
    made = sum(len(output.token_ids) for output in outputs)
    gc.collect()
    return Measured(start, start_cpu, seconds, made / seconds, made / cpu, updated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tiny model and few tokens")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    name, prompts, n, tokens = ("builtin:tiny-llama", 4, 4, 16) if quick else ("builtin:smollm2-135m", 8, 6, 64)
    path = resolve_model_path(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    print(f"{name}, float32, {prompts} prompts x {n}, {PROMPT_TOKENS} + {tokens} tokens, one thread")
    names = ["hf", "sglang"] if is_installed() else ["hf"]
    rows = {engine: measure(engine, path, model, prompts, n, tokens) for engine in names}
    titles = {
        "start_s": "start, s",
        "start_cpu_s": "start, CPU-s",
        "update_s": "weight update, s",
        "generate_s": "generation, s",
        "tokens_per_s": "tokens/s",
        "tokens_per_cpu_s": "tokens/CPU-s",
    }
    print(f"{'':18}" + "".join(f"{engine:>10}" for engine in rows) + (f"{'ratio':>10}" if len(rows) > 1 else ""))
    for field, title in titles.items():
        values = [getattr(row, field) for row in rows.values()]
        ratio = f"{values[1] / values[0]:>10.2f}" if len(values) > 1 else ""
        print(f"{title:18}" + "".join(f"{value:>10.2f}" for value in values) + ratio)
    if len(names) == 1:
        print("sglang is not installed: make setup-sglang-cpu")


if __name__ == "__main__":
    main()
