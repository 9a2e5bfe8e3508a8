"""A whole GRPO (or PPO) step of a 3.2M Llama on one CPU thread, against the arithmetic it needs at the least.

16 prompts of 24 tokens, 8 rollouts each, 64 new tokens, EOS suppressed: 128 rows. Everything from the dataloader to
the weights' arrival at the rollout engine is counted, in CPU-seconds of the whole process, the fastest of several steps
after two that warm up. Each case runs in a process of its own, so that its peak memory is its own.

The floor is what the matrix products of the same step take at the rate this machine multiplies matrices of these
shapes. It counts the work as it is usually done, every token of every row: forward of 2 operations a weight and token,
backward of twice that, one forward to read each prompt and to write each new token. A prompt's rollouts share its
computation here, so that the ratio may fall below what one would think possible.

    OMP_NUM_THREADS=1 python benchmarks/grpo_step.py [--quick] [--case NAME]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from common import (
    ROOT,
    SHAPES,
    in_own_process,
    machine,
    matmul_rate,
    peak_rss_mib,
    print_table,
    save_model,
    write_prompts,
)

PROMPTS, N, PROMPT, RESPONSE, MODEL = 16, 8, 24, 64, "3.2M"

# name: (dtype, recompute_old_log_probs, skewed, where a critic and a reference's KL come in, CPU-seconds to stay under)
CASES = {
    "fp32 auto": ("float32", "auto", False, None, 4.6),
    "fp32 always": ("float32", "always", False, None, 5.6),
    "bf16 auto": ("bfloat16", "auto", False, None, 3.3),
    "fp32 auto, lengths 4:1": ("float32", "auto", True, None, 2.2),
    "fp32, critic and reference": ("float32", "always", False, "reward", 8.0),
    "fp32 auto, critic and KL loss": ("float32", "auto", False, "loss", 8.0),
}


def overrides(folder: Path, dtype: str, recompute: str, skewed: bool, kl: str | None) -> list[str]:
    fsdp = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
    return [
        f"actor_rollout_ref.model.path={folder}/model",
        f"critic.model.path={folder}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "critic.model.enable_gradient_checkpointing=false",
        f"data.train_files={folder}/data.jsonl",
        f"data.val_files={folder}/data.jsonl",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={PROMPT}",
        f"data.max_response_length={RESPONSE}",
        "data.dataloader_num_workers=0",
        "actor_rollout_ref.rollout.name=hf",
        f"actor_rollout_ref.rollout.n={N}",
        f"actor_rollout_ref.rollout.dtype={dtype}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        "actor_rollout_ref.rollout.agent.num_workers=0",
        f"actor_rollout_ref.rollout.agent.default_agent_loop={'skewed' if skewed else 'single_turn_agent'}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.recompute_old_log_probs={recompute}",
        *[f"{section}.dtype={dtype}" for section in fsdp],
        *(
            [
                "algorithm.adv_estimator=gae",
                f"algorithm.use_kl_in_reward={str(kl == 'reward').lower()}",
                f"actor_rollout_ref.actor.use_kl_loss={str(kl == 'loss').lower()}",
            ]
            if kl
            else ["algorithm.adv_estimator=grpo"]
        ),
        "reward.num_workers=0",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.worker_group=local",
        "trainer.val_before_train=false",
        "trainer.resume_mode=disable",
        "trainer.logger=[file]",
        "trainer.total_epochs=1",
        f"trainer.default_local_dir={folder}/run",
    ]


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return sum(map(str.isdigit, solution_str)) / max(1, len(solution_str))


def register_skewed_lengths() -> None:
    """An agent loop that lets one rollout in four run to the full length and stops the others at a quarter of it."""
    from ppo_lib.rollout.agent_loop.base import AgentLoopOutput, AgentSample, register_agent_loop
    from ppo_lib.rollout.agent_loop.single_turn import SingleTurnAgentLoop

    @register_agent_loop("skewed")
    class SkewedLoop(SingleTurnAgentLoop):
        """Lengths 4:1, the same every time."""

        async def run(self, sample: AgentSample) -> AgentLoopOutput:
            limit = RESPONSE if sample.session % 4 == 0 else RESPONSE // 4
            return await super().run(replace(sample, params=replace(sample.params, max_tokens=limit)))


def response_tokens(skewed: bool) -> int:
    return PROMPTS * N * RESPONSE if not skewed else PROMPTS * N * (RESPONSE + 3 * RESPONSE // 4) // 4


def operations(recompute: str, skewed: bool, kl: str | None) -> float:
    """Multiplications and additions of a step's matrix products, attention left out."""
    hidden, layers, ffn, heads, kv_heads = SHAPES[MODEL]
    head = hidden // heads
    weights = layers * (hidden * head * (2 * heads + 2 * kv_heads) + 3 * hidden * ffn)
    response = response_tokens(skewed)
    tokens = PROMPTS * N * PROMPT + response
    generation = 2 * weights * (PROMPTS * PROMPT + response)
    forward, training = 2 * weights * tokens, 6 * weights * tokens
    passes = {"auto": 0, "always": 1}[recompute] + (2 if kl else 0)  # old log-probs; reference and values
    return generation + passes * forward + (2 if kl else 1) * training


def measure(name: str, steps: int, profile: bool) -> dict[str, Any]:
    """Run one case in this process."""
    torch.set_num_threads(1)
    from ppo_lib import RayPPOTrainer, load_config

    dtype, recompute, skewed, kl, _ = CASES[name]
    register_skewed_lengths()
    measured: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        save_model(MODEL, folder / "model")
        write_prompts(folder / "data.jsonl", (steps + 2) * PROMPTS, PROMPT)
        config = load_config(overrides=overrides(folder, dtype, recompute, skewed, kl))
        trainer = RayPPOTrainer(config, reward_fn=score)
        try:
            trainer.init_workers()
            trainer.checkpoint_manager.update_weights(0)
            for index, batch_dict in enumerate(trainer.train_dataloader):
                took = run_step(trainer, batch_dict, profile and index == 2)
                if index >= 2:
                    measured.append(took)
        finally:
            trainer.close()
    rate = matmul_rate(torch.float32 if dtype == "float32" else torch.bfloat16, 2048, *SHAPES[MODEL][0:3:2])
    floor = operations(recompute, skewed, kl) / rate
    return {
        "stages": min(measured, key=lambda took: took["step"]),
        "floor": floor,
        "rss": peak_rss_mib(),
    }


def run_step(trainer: Any, batch_dict: dict[str, Any], profile: bool) -> dict[str, float]:
    """CPU-seconds by stage; `step` is their sum with the metrics at the end."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    took: dict[str, float] = {}
    watch = profiler(activities=[ProfilerActivity.CPU]) if profile else None
    if watch:
        watch.start()
    began = last = time.process_time()
    for stage, _, _ in trainer.step_through(batch_dict):
        now = time.process_time()
        took[stage] = now - last
        last = now
    took["step"] = time.process_time() - began
    if watch:
        watch.stop()
        print(watch.key_averages().table(sort_by="self_cpu_time_total", row_limit=45, max_name_column_width=60))
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one step of one case")
    parser.add_argument("--case", choices=CASES, help="only this case, in this process")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    parser.add_argument("--profile", action="store_true", help="print where the first measured step's time goes")
    options = parser.parse_args()
    steps = 1 if options.quick else options.steps
    if options.json:
        print(json.dumps(measure(options.case, steps, options.profile)))
        return
    names = [options.case] if options.case else ["fp32 auto"] if options.quick else list(CASES)
    results = {}
    for name in names:
        if options.profile:
            results[name] = measure(name, steps, True)
        else:
            results[name] = json.loads(in_own_process(["--json", "--case", name, "--steps", str(steps)]))
    print(machine())
    rows = []
    for name, result in results.items():
        step = result["stages"]["step"]
        rows.append(
            [name, step, CASES[name][4], step / CASES[name][4], result["floor"], step / result["floor"], result["rss"]]
        )
    header = ["case", "CPU-s a step", "target", "of target", "floor", "of floor", "peak RSS MiB"]
    print_table("One step: 16 prompts x 8 rollouts x 64 tokens, 3.2M Llama", header, rows)
    order = ["gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "update_weights"]
    rows = []
    for name, result in results.items():
        took = result["stages"]
        known = [took.get(stage, 0.0) for stage in order]
        rows.append([name, *[f"{value:.3f}" if value else "" for value in known], f"{took['step'] - sum(known):.3f}"])
    print_table("CPU-seconds by stage", ["case", *order, "the rest"], rows)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "benchmarks"))
    main()
