"""The `hf` engine against `model.generate`: useful tokens per CPU-second, 64 different prompts, no end token.

`generate` computes a row until the longest of its batch is done; the engine lets finished rows leave. Both sample at
temperature 1 from the same weights; the engine returns a log-probability per token as well.

    OMP_NUM_THREADS=1 python benchmarks/rollout_hf.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from common import machine, print_table, save_model

from ppo_lib import load_config
from ppo_lib.rollout.engine import Cohort, GenerationRequest, SamplingParams
from ppo_lib.rollout.hf_engine import HFEngine

PROMPTS, PROMPT = 64, 24


def lengths_of(kind: str, longest: int) -> list[int]:
    """New tokens per row: all the same, or most short and a few long, a third of the longest on average."""
    if kind == "equal":
        return [longest] * PROMPTS
    drawn = torch.rand(PROMPTS, generator=torch.Generator().manual_seed(1)) ** 2
    return [max(1, int(longest * share)) for share in drawn / drawn.max()]


def engine_seconds(engine: HFEngine, prompts: list[list[int]], lengths: list[int], name: str) -> float:
    """CPU-seconds of the engine for all rows, as one cohort."""

    async def run() -> list[Any]:
        requests = [
            GenerationRequest(
                request_id=f"{name}/{row}",
                prompt_ids=prompt,
                params=SamplingParams(max_tokens=length, seed=row, ignore_eos=True),
                order=(row, 0),
                cohort=Cohort(name, len(prompts)),
            )
            for row, (prompt, length) in enumerate(zip(prompts, lengths))
        ]
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    began = time.process_time()
    outputs = asyncio.run(run())
    took = time.process_time() - began
    if [len(output.token_ids) for output in outputs] != lengths:
        raise SystemExit("the engine returned other lengths than were asked for")
    return took


def generate_seconds(model: Any, prompts: list[list[int]], lengths: list[int]) -> float:
    """CPU-seconds of `generate` for the longest row, all rows in one batch."""
    ids = torch.tensor(prompts)
    began = time.process_time()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(lengths),
            min_new_tokens=max(lengths),
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
    took = time.process_time() - began
    if out.shape[1] != PROMPT + max(lengths):
        raise SystemExit("generate stopped early")
    return took


def compare(name: str, longest: int, rounds: int) -> list[list[Any]]:
    from transformers import AutoModelForCausalLM

    prompts = torch.randint(4, 90, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0)).tolist()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = save_model(name, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        overrides = [
            f"actor_rollout_ref.model.path={path}",
            "actor_rollout_ref.rollout.load_format=auto",
            "actor_rollout_ref.rollout.dtype=float32",
            f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={longest}",
        ]
        engine = HFEngine(load_config(overrides=overrides).actor_rollout_ref, path)
        for kind in ("skewed", "equal"):
            lengths = lengths_of(kind, longest)
            generate_seconds(model, prompts, [2] * PROMPTS)
            engine_seconds(engine, prompts, [2] * PROMPTS, f"warm {kind}")
            theirs, ours = [], []
            for turn in range(rounds):
                ours.append(engine_seconds(engine, prompts, lengths, f"{kind} {turn}"))
                theirs.append(generate_seconds(model, prompts, lengths))
            useful = sum(lengths)
            target = 1.8 if kind == "skewed" else 1.0
            rate, other = useful / min(ours), useful / min(theirs)
            rows.append([f"{name}, {kind}", f"{useful / (PROMPTS * longest):.0%}", other, rate, rate / other, target])
        asyncio.run(engine.shutdown())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    print(machine())
    cases = [("tiny", 16, 1)] if quick else [("5M", 128, 3), ("25M", 96, 2)]
    rows = [row for case in cases for row in compare(*case)]
    header = ["model, lengths", "useful", "generate tok/CPU-s", "hf engine tok/CPU-s", "ratio", "target"]
    print_table(f"{PROMPTS} prompts, fp32", header, rows)


if __name__ == "__main__":
    main()
