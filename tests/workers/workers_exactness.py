"""The table of exactness: training on several ranks, or by other means, gives the parameters of one plain rank.

    python tests/workers/workers_exactness.py           # prints the table of docs/exactness.md
    python tests/workers/workers_exactness.py --quick   # five steps of each case

Each case trains actor and critic over the same batches, on real ranks joined by gloo, for 20 steps of two mini-batches:
log-probs before the update, reference, values, both updates. It is compared with its base: one rank, no micro-batches,
no offload, no recomputation.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from workers_testing import (
    config,
    new_actor,
    new_critic,
    one_unit_below,
    padded_batch,
    run_ranks,
    save_tiny_model,
    shard,
    worker_batch,
)

from ppo_lib.workers.fsdp_engine import full_tensor

STEPS = 20
ACTOR, CRITIC, MODEL = "actor_rollout_ref.actor.", "critic.", "actor_rollout_ref.model."
PLAIN = (
    f"{ACTOR}use_kl_loss=true",
    f"{ACTOR}kl_loss_coef=0.05",
    f"{ACTOR}entropy_coeff=0.01",
    f"{ACTOR}optim.lr=1e-3",
    f"{CRITIC}optim.lr=1e-3",
)
LORA = (f"{MODEL}lora_rank=4", f"{MODEL}lora_alpha=8", "critic.model.lora_rank=4")


def both(name: str, value: object, critic: str = "fsdp") -> tuple[str, str]:
    """The same FSDP setting for actor and critic."""
    return f"{ACTOR}fsdp_config.{name}={value}", f"{CRITIC}{critic}.{name}={value}"


@dataclass(frozen=True)
class Case:
    """Ranks and settings, compared with one rank under `base` settings on the same rows."""

    ranks: int = 1
    settings: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    rows: int = 8
    batches: str = "even"


MICRO = (f"{ACTOR}ppo_micro_batch_size_per_gpu=1", f"{CRITIC}ppo_micro_batch_size_per_gpu=1")
TOKENS = (f"{ACTOR}ppo_max_token_len_per_gpu=25", f"{CRITIC}ppo_max_token_len_per_gpu=25")
EPOCHS = (f"{ACTOR}ppo_epochs=2", f"{CRITIC}ppo_epochs=2", f"{ACTOR}shuffle=true", f"{CRITIC}shuffle=true")
RECOMPUTE = (f"{MODEL}enable_gradient_checkpointing=true", "critic.model.enable_gradient_checkpointing=true")
ONE_REDUCTION = both("use_no_sync_for_gradient_accumulation", "true")
ONE_UNIT = tuple(one_unit_below(10**6))
EAGER = (*both("reshard_after_forward", "false"), *both("forward_prefetch", "true"))
OFFLOAD = (*both("param_offload", "true"), *both("optimizer_offload", "true"))

CASES = {
    "2 ranks": Case(2),
    "4 ranks": Case(4),
    "4 ranks as 2 replicas of 2 shards": Case(4, both("fsdp_size", 2)),
    "2 replicas": Case(2, both("fsdp_size", 1)),
    "1 row a micro-batch": Case(1, MICRO),
    "2 ranks, micro-batches of at most 25 tokens": Case(2, TOKENS),
    "2 ranks, 1 row a micro-batch, one reduction": Case(2, (*MICRO, *ONE_REDUCTION)),
    "4 ranks as 2x2, 1 row a micro-batch, one reduction": Case(4, (*MICRO, *ONE_REDUCTION, *both("fsdp_size", 2))),
    "2 ranks, the model as one unit, 1 row a micro-batch": Case(2, (*MICRO, *ONE_UNIT)),
    "2 ranks, not resharded, prefetched": Case(2, (*EAGER, *MICRO)),
    "2 ranks, activation checkpointing": Case(2, RECOMPUTE),
    "2 ranks, parameters and optimizer offloaded": Case(2, OFFLOAD),
    "2 epochs, shuffled, 2 ranks": Case(2, EPOCHS, EPOCHS),
    "2 epochs, shuffled, 4 ranks, 1 row a micro-batch": Case(4, (*EPOCHS, *MICRO), EPOCHS),
    "LoRA, 2 ranks": Case(2, LORA, LORA),
    "LoRA, 4 ranks as 2x2, checkpointing, 1 row a micro-batch": Case(
        4, (*LORA, *RECOMPUTE, *MICRO, *both("fsdp_size", 2)), LORA
    ),
    "LoRA, 4 ranks as 2x2, one unit, checkpointing, 1 row a micro-batch": Case(
        4, (*LORA, *RECOMPUTE, *MICRO, *ONE_UNIT, *both("fsdp_size", 2)), LORA
    ),
    "5 rows and 3 of padding on 2 ranks": Case(2, batches="uneven"),
    "5 rows and 3 of padding on 4 ranks, 1 row a micro-batch": Case(4, MICRO, batches="uneven"),
    "2 rows in all, 2 ranks (one a mini-batch)": Case(2, rows=2),
    "a mini-batch of masked rows, 2 ranks": Case(2, batches="masked"),
    "a mini-batch of masked rows, 4 ranks, 2 epochs": Case(4, EPOCHS, EPOCHS, batches="masked"),
}


def batch_of(case: Case, step: int) -> TensorDict:
    """The rows of one step, with whatever makes the case hard."""
    padded = padded_batch(case.rows, seed=step)
    if case.batches == "uneven":  # rows 5 to 7 are padding: all of them fall to the last rank
        padded["response_mask"][5:] = 0
    if case.batches == "masked":  # rows 0, 2, ... are mini-batch 0
        padded["response_mask"][::2] = 0
    return worker_batch(padded)


def train(rank: int, world_size: int, model: str, case: Case, settings: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Train actor and critic; every parameter, whole, of both, an adapter's too, and the metrics of each step."""
    cfg = config(model, *PLAIN, *settings)
    actor, critic = new_actor(cfg), new_critic(cfg)
    engines = {"actor": actor.actor.engine, "critic": critic.critic.engine}
    start, history = whole_parameters(engines), []
    for step in range(steps):
        td = shard(batch_of(case, step), rank, world_size)
        td["old_log_probs"] = actor.compute_log_prob(td)["log_probs"]
        td["ref_log_prob"] = actor.compute_ref_log_prob(td)["log_probs"]
        td["values"] = critic.compute_values(td)["values"]
        history.append(actor.update_actor(td) | critic.update_critic(td))
    return {"start": start, "parameters": whole_parameters(engines), "metrics": history}


def whole_parameters(engines: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of every parameter tensor, an adapter's too, under `role.name`."""
    return {
        f"{role}.{name}": full_tensor(parameter.detach()).clone()
        for role, engine in engines.items()
        for name, parameter in engine.named_parameters()
    }


@dataclass(frozen=True)
class Difference:
    """Of a case from its base."""

    parameters: float
    """The largest ||a - b|| / ||b|| of a parameter tensor."""
    where: str
    metrics: float
    """The largest |a - b| / max(|b|, 0.01) of a metric of any step."""
    moved: float
    """For comparison: how far training moved all parameters together, ||b - start|| / ||b||."""


def difference(case: Case, model: str, steps: int) -> Difference:
    """Train the case and its base, and compare."""
    base = _on_one_rank(model, replace(case, ranks=1, settings=()), steps)
    found = run_ranks(train, case.ranks, model, case, case.settings, steps)
    apart = {
        name: max(((ranks["parameters"][name] - b).norm() / b.norm()).item() for ranks in found)
        for name, b in base["parameters"].items()
    }
    metrics = max(
        abs(ours[name] - theirs[name]) / max(1e-2, abs(theirs[name]))
        for ours, theirs in zip(found[0]["metrics"], base["metrics"], strict=True)
        for name in theirs
    )
    worst = max(apart, key=lambda name: apart[name])
    moved = sum((b - base["start"][name]).square().sum() for name, b in base["parameters"].items())
    norm = sum(b.square().sum() for b in base["parameters"].values())
    return Difference(apart[worst], worst, metrics, float(moved / norm) ** 0.5)


@cache
def _on_one_rank(model: str, case: Case, steps: int) -> dict[str, Any]:
    return run_ranks(train, 1, model, case, case.base, steps)[0]


def main() -> None:
    """Print the table."""
    steps = 5 if "--quick" in sys.argv else STEPS
    print(f"| after {steps} steps of two mini-batches | parameters differ by | most in | metrics | moved |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder))
        for name, case in CASES.items():
            d = difference(case, model, steps)
            print(f"| {name} | {d.parameters:.1e} | `{d.where}` | {d.metrics:.1e} | {d.moved:.2f} |", flush=True)


if __name__ == "__main__":
    main()
