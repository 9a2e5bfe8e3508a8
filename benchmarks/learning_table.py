"""How many steps each advantage estimator and each policy loss needs to learn one small task, on three seeds.

What it does not show: which is best. On a task that all of them learn it shows that every one of them does learn, end
to end, through generation, scoring, advantages and update, with four optimizer steps after each rollout.

The task: half a million random weights over characters answer "7:" with "77777777"; the score is the share of right
digits. Estimators run with the vanilla loss, losses with grpo. The number is the first step whose mean score is above
0.9.

    python benchmarks/learning_table.py            # everything that docs/algorithms_learning.md has no number for yet
    python benchmarks/learning_table.py gspo gae   # these again
    python benchmarks/learning_table.py --quick    # two methods, one seed, nothing written
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import tempfile
import time
from typing import Any

import common

from ppo_lib import RayPPOTrainer, load_config
from ppo_lib.algorithms.names import ADV_ESTIMATORS, POLICY_LOSSES

PAGE = common.ROOT / "docs" / "algorithms_learning.md"
RESULTS = PAGE.with_suffix(".json")
SEEDS = (1, 2, 3)
WANTED, MOST_STEPS = 0.9, 150

ACTOR = "actor_rollout_ref.actor"
COMMON = (
    "actor_rollout_ref.model.path=builtin:tiny-llama",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    "data.train_files=builtin:repeat-digit",
    "data.val_files=builtin:repeat-digit",
    "data.train_batch_size=20",
    "data.max_prompt_length=2",
    "data.max_response_length=8",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.agent.num_workers=0",
    f"{ACTOR}.ppo_mini_batch_size=5",
    f"{ACTOR}.entropy_coeff=0.01",
    f"{ACTOR}.optim.lr=1e-3",
    f"{ACTOR}.optim.betas=[0.9,0.95]",
    f"{ACTOR}.optim.lr_warmup_steps=5",
    f"{ACTOR}.optim.zero_indexed_step=false",
    f"{ACTOR}.fsdp_config.dtype=float32",
    "reward.num_workers=0",
    "trainer.n_gpus_per_node=1",
    "trainer.device=cpu",
    "trainer.worker_group=local",
    f"trainer.total_training_steps={MOST_STEPS}",
    "trainer.resume_mode=disable",
    "trainer.logger=[file]",
)
# Where a method's paper has another scale, or a method needs something beside its name
OWN: dict[str, tuple[str, ...]] = {
    # the sum of its rewards is whitened over the batch, not over a prompt's rollouts: it settles sooner
    "reinforce_plus_plus": (f"{ACTOR}.entropy_coeff=0.03",),
    # only a group's best rollout counts, by its distance from the second: small beside an entropy bonus, and 0 where
    # two are equal, so more and smaller groups
    "grpo_passk": (
        f"{ACTOR}.entropy_coeff=0.003",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=40",
        f"{ACTOR}.ppo_mini_batch_size=10",
    ),
    # a greedy answer is a fair baseline where rollouts are near it, not for 98 characters drawn evenly
    "remax": (
        f"{ACTOR}.entropy_coeff=0.003",
        f"{ACTOR}.optim.lr=3e-4",
        "actor_rollout_ref.rollout.temperature=0.2",
        "actor_rollout_ref.rollout.n=16",
    ),
    # as reinforce_plus_plus
    "gae": (
        f"{ACTOR}.entropy_coeff=0.03",
        "algorithm.lam=0.95",
        "critic.optim.lr=1e-3",
        "critic.optim.betas=[0.9,0.95]",
        "critic.optim.lr_warmup_steps=5",
        "critic.optim.zero_indexed_step=false",
        "critic.model.enable_gradient_checkpointing=false",
        "critic.fsdp.dtype=float32",
    ),
    "gdpo": ("algorithm.gdpo_reward_keys=[first_half,second_half]",),
    "gspo": (
        f"{ACTOR}.clip_ratio_low=3e-4",
        f"{ACTOR}.clip_ratio_high=4e-4",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    ),
    "sapo": (f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",),
    "geo_mean": (f"{ACTOR}.clip_ratio=0.4", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"),
}


def methods() -> dict[str, tuple[str, ...]]:
    """Overrides of each method by its name in the table; names of one function are one method."""
    table: dict[str, tuple[str, ...]] = {}
    seen: set[Any] = set()
    for name, estimator in ADV_ESTIMATORS.items():
        if estimator.function not in seen:
            seen.add(estimator.function)
            table[name] = (f"algorithm.adv_estimator={name}", *OWN.get(name, ()))
    for name, loss in POLICY_LOSSES.items():
        choice = (f"{ACTOR}.policy_loss.loss_mode={name}",)
        if loss.bypass:
            choice = (
                "algorithm.rollout_correction.bypass_mode=true",
                f"algorithm.rollout_correction.loss_type={name}",
            )
        if name == "vanilla":
            continue  # the row of grpo
        table[f"{name} loss"] = ("algorithm.adv_estimator=grpo", *choice, *OWN.get(name, ()))
    return table


def share_of_right_digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict:
    """The task's own score, and the two halves that it is the mean of."""
    right = [given == wanted for given, wanted in zip(solution_str.ljust(8)[:8], ground_truth)]
    halves = sum(right[:4]) / 4, sum(right[4:]) / 4
    return {"score": sum(halves) / 2, "first_half": halves[0], "second_half": halves[1]}


def learn(overrides: tuple[str, ...], seed: int, most_steps: int = MOST_STEPS) -> dict[str, Any]:
    """Train until a step's mean score is above 0.9: that step, the mean of the last five, and what it cost."""
    scores: list[float] = []
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        words = [*COMMON, *overrides, f"trainer.seed={seed}", f"trainer.default_local_dir={folder}"]
        trainer = RayPPOTrainer(load_config(overrides=words), reward_fn=share_of_right_digits)
        try:
            trainer.init_workers()
            trainer.checkpoint_manager.update_weights(0)
            while len(scores) < most_steps and not (scores and scores[-1] > WANTED):
                *_, (_, _, metrics) = trainer.step_through(trainer.train_dataloader.next_batch())
                scores.append(metrics["critic/score/mean"])
        finally:
            trainer.close()
    return {
        "step": len(scores) if scores[-1] > WANTED else None,
        "last": round(sum(scores[-5:]) / len(scores[-5:]), 3),
        "cpu_s": round(time.process_time() - began, 1),
    }


def stored() -> dict[str, dict[str, Any]]:
    """Method -> seed -> result, as far as it is known."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def store(method: str, seed: int, result: dict[str, Any]) -> None:
    """Add one result and write the page again; several runs may do so at once."""
    with open(RESULTS.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = stored()
        results.setdefault(method, {})[str(seed)] = result
        known = [name for name in methods() if name in results]
        RESULTS.write_text(json.dumps({name: results[name] for name in known}, indent=1) + "\n")
        PAGE.write_text(page({name: results[name] for name in known}))
    RESULTS.with_suffix(".lock").unlink(missing_ok=True)


def page(results: dict[str, dict[str, Any]]) -> str:
    """The table as a page."""
    lines = [
        "# How fast each estimator and each loss learns one small task",
        "",
        'A Llama of half a million random weights over characters learns to answer "7:" with "77777777". Estimators',
        "run with the vanilla loss, losses with grpo; four optimizer steps follow each rollout. The numbers are the",
        f"first step whose mean score is above {WANTED}, on three seeds. They are no ranking: the",
        "task is too small for one. `python benchmarks/learning_table.py` writes it.",
        "",
        f"| method | {' | '.join(f'seed {seed}' for seed in SEEDS)} | CPU-seconds a run | settings of its own |",
        "|---|" + "---:|" * (len(SEEDS) + 1) + "---|",
    ]
    for name, by_seed in results.items():
        cells = [cell(by_seed.get(str(seed))) for seed in SEEDS]
        cost = sum(result["cpu_s"] for result in by_seed.values()) / len(by_seed)
        own = ", ".join(f"`{word.removeprefix(f'{ACTOR}.')}`" for word in OWN.get(name.removesuffix(" loss"), ()))
        lines.append(f"| {name} | {' | '.join(cells)} | {cost:.1f} | {own} |")
    shared = "\n".join(COMMON)
    return "\n".join([*lines, "", "Settings of all runs:", "", "```", shared, "```", ""])


def cell(result: dict[str, Any] | None) -> str:
    """One run in the table."""
    if result is None:
        return ""
    return str(result["step"]) if result["step"] is not None else f"not in {MOST_STEPS} (at {result['last']})"


def main() -> None:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description="Steps to learn one task, for each estimator and each loss.")
    parser.add_argument("methods", nargs="*", help="only these, again")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--set", action="append", default=[], help="an override more; nothing is written")
    args = parser.parse_args()
    table = methods()
    chosen = args.methods or (["grpo", "cispo loss"] if args.quick else list(table))
    if unknown := [name for name in chosen if name not in table]:
        sys.exit(f"no method {unknown[0]!r}; there are {', '.join(table)}")
    for seed in SEEDS[:1] if args.quick else SEEDS:  # one column after the other, so that failures show early
        for name in chosen:
            if not args.methods and not args.quick and str(seed) in stored().get(name, {}):
                continue
            result = learn((*table[name], *args.set), seed)
            print(f"{name:30} seed {seed}: {cell(result):22} {result['cpu_s']} CPU-seconds", flush=True)
            if not args.quick and not args.set:
                store(name, seed, result)


if __name__ == "__main__":
    main()
