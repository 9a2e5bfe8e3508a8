"""Advantages, balancing and validation statistics against plain code for the same.

    python benchmarks/algorithms.py            # the figures: 4096 rows of 2048 tokens, one thread, two minutes
    python benchmarks/algorithms.py --quick    # the same tables on small inputs, in seconds

Each pair runs in turn in this process, after one call that is not counted; shown is the best of some rounds, in
CPU-milliseconds. The plain side is written here: it does what textbooks and loops do, and no more. Freed memory stays
with the process: page faults on new memory cost more than the arithmetic, and who pays them is a matter of luck.
"""

from __future__ import annotations

import argparse
import ctypes
import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppo_lib.algorithms.names import ADV_ESTIMATORS
from ppo_lib.algorithms.registry import get_adv_estimator_fn
from ppo_lib.trainer.balance import balanced_partitions
from ppo_lib.trainer.metrics import process_validation_metrics

GAMMA, LAM = 0.99, 0.95
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description="Advantages, balancing and validation statistics against plain code")
    parser.add_argument("--quick", action="store_true", help="small inputs, for a look")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    keep_freed_memory()
    advantages(*((256, 256) if quick else (4096, 2048)), rounds=2 if quick else 3)
    balancing(512 if quick else 4096, rounds=1 if quick else 2)
    validation(prompts=16 if quick else 256, rollouts=8, resamples=50 if quick else 1000)


# ---------------------------------------------------------------- advantages


def advantages(rows: int, width: int, rounds: int) -> None:
    """Every estimator beside one masked sum and one broadcast multiply, and the token-level ones beside their loop."""
    fields = batch(rows, width)
    rewards, mask = fields["token_level_rewards"], fields["response_mask"]
    plain = {
        "gae": lambda: gae_by_columns(rewards, mask, fields["values"]),
        "reinforce_plus_plus": lambda: reinforce_by_columns(rewards, mask),
    }
    names = [name for name in ADV_ESTIMATORS if not name.endswith("_vectorized")]
    contenders = {name: lambda name=name: get_adv_estimator_fn(name)(**fields) for name in names}
    contenders |= {f"{name}, a loop over columns": function for name, function in plain.items()}
    seconds = best_of(rounds, {"floor": lambda: masked_sum_and_multiply(rewards, mask), **contenders})

    print(f"\nAdvantages, {rows} x {width} float32, one thread")
    print(f"{'':<44}{'CPU ms':>10}{'/ floor':>10}{'loop /':>10}")
    print(f"{'one masked sum and one broadcast multiply':<44}{seconds['floor'] * 1e3:>10.1f}")
    for name in names:
        loop = seconds.get(f"{name}, a loop over columns")
        against = f"{loop / seconds[name]:>9.1f}x" if loop else ""
        print(f"{name:<44}{seconds[name] * 1e3:>10.1f}{seconds[name] / seconds['floor']:>9.2f}x{against}")
    for name in plain:
        print(f"{name + ', a loop over columns':<44}{seconds[f'{name}, a loop over columns'] * 1e3:>10.1f}")


def batch(rows: int, width: int, rollouts: int = 8) -> dict[str, Any]:
    """Responses of all lengths with a 0/1 outcome on the last token, and every keyword an estimator may name."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(width // 8, width + 1, (rows,), generator=generator)
    mask = (torch.arange(width) < lengths[:, None]).float()
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), lengths - 1] = torch.randint(0, 2, (rows,), generator=generator).float()
    probabilities = torch.rand(rows, width, generator=generator).clamp(min=1e-3)
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "index": np.array([f"prompt {row // rollouts}" for row in range(rows)], dtype=object),
        "values": torch.rand(rows, width, generator=generator),
        "old_log_probs": probabilities.log(),
        "sum_pi_squared": probabilities.square(),
        "reward_baselines": torch.rand(rows, generator=generator),
        "gamma": GAMMA,
        "lam": LAM,
    }


def masked_sum_and_multiply(rewards: Tensor, mask: Tensor) -> Tensor:
    """The least that spreading an outcome over tokens can cost."""
    return (rewards * mask).sum(dim=-1)[:, None] * mask


def gae_by_columns(rewards: Tensor, mask: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written, one column after the other from the right."""
    later_value = later_advantage = torch.zeros(len(rewards))
    columns = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * later_value - values[:, t]
        advantage = delta + GAMMA * LAM * later_advantage
        later_value = values[:, t] * mask[:, t] + (1 - mask[:, t]) * later_value
        later_advantage = advantage * mask[:, t] + (1 - mask[:, t]) * later_advantage
        columns.append(later_advantage)
    result = torch.stack(columns[::-1], dim=1)
    return whitened(result, mask), result + values


def reinforce_by_columns(rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The discounted sum as it is written."""
    returns, later = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in reversed(range(rewards.shape[1])):
        later = rewards[:, t] + GAMMA * later
        returns[:, t] = later
        later = later * mask[:, t]
    return whitened(returns, mask), returns


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Zero mean and unit variance over the mask."""
    count = mask.sum()
    mean = (values * mask).sum() / count
    variance = ((values - mean).square() * mask).sum() / (count - 1)
    return (values - mean) * (variance + 1e-8).rsqrt() * mask


# ---------------------------------------------------------------- balancing


def balancing(rows: int, rounds: int) -> None:
    """Lengths of a long-tailed distribution in 8 and 64 parts, beside largest differencing."""
    lengths = np.random.default_rng(0).lognormal(6.5, 0.8, rows).astype(int).clip(16, 16384).tolist()
    print(f"\nBalancing {rows} sequences: CPU ms, and how many tokens the fullest part has above the emptiest")
    print(f"{'':<28}{'ours':>10}{'spread':>8}{'differencing':>14}{'spread':>8}{'ratio':>9}")
    for parts in (8, 64):
        for equal_size in (False, True):
            contenders: dict[str, Callable[[], list[list[int]]]] = {
                "ours": lambda: balanced_partitions(lengths, parts, equal_size),  # noqa: B023
                "plain": lambda: largest_differencing(lengths, parts, equal_size),  # noqa: B023
            }
            seconds = best_of(rounds, contenders)
            spread = {name: spread_of(lengths, run()) for name, run in contenders.items()}
            kind = f"{parts} parts, {'equal size' if equal_size else 'free size'}"
            ratio = seconds["plain"] / seconds["ours"]
            print(
                f"{kind:<28}{seconds['ours'] * 1e3:>10.1f}{spread['ours']:>8}{seconds['plain'] * 1e3:>14.1f}"
                f"{spread['plain']:>8}{ratio:>8.1f}x"
            )


def largest_differencing(lengths: Sequence[int], parts: int, equal_size: bool) -> list[list[int]]:
    """Karmarkar and Karp: merge the two states of largest difference, fullest part with emptiest, until one is left."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    step = parts if equal_size else 1
    heap = []
    for start in range(0, len(order), step):
        sets = [{index} for index in order[start : start + step]]
        heap.append(_state(sets + [set() for _ in range(parts - len(sets))], lengths, len(heap)))
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a + b, x | y) for (a, x), (b, y) in zip(first, reversed(second))]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    return [sorted(members) for _, members in heap[0][2]]


def _state(sets: list[set[int]], lengths: Sequence[int], serial: int) -> tuple[int, int, list[tuple[int, set[int]]]]:
    totals = sorted(((sum(lengths[i] for i in members), members) for members in sets), key=lambda part: -part[0])
    return totals[-1][0] - totals[0][0], serial, totals


def spread_of(lengths: Sequence[int], partition: Sequence[Sequence[int]]) -> int:
    """Tokens of the fullest part less those of the emptiest."""
    totals = [sum(lengths[index] for index in part) for part in partition]
    return max(totals) - min(totals)


# ---------------------------------------------------------------- validation


def validation(prompts: int, rollouts: int, resamples: int) -> None:
    """mean, std, best, worst and maj of reward, acc and pred, beside resampling in a loop."""
    generator = np.random.default_rng(0)
    rows = prompts * rollouts
    sources, uids = ["task"] * rows, [f"prompt {row // rollouts}" for row in range(rows)]
    acc = (generator.random(rows) < 0.4).astype(float).tolist()
    infos = {
        "reward": (np.array(acc) + 0.1 * generator.random(rows)).tolist(),
        "acc": acc,
        "pred": [str(answer) for answer in generator.integers(0, 4, rows)],
    }
    seconds = best_of(1, {"ours": lambda: process_validation_metrics(sources, uids, infos)}, warm=False)
    seconds |= best_of(1, {"plain": lambda: resampled_metrics(uids, infos, resamples)}, warm=False)
    print(f"\nValidation statistics, {prompts} prompts x {rollouts}, of reward and acc with votes on pred: CPU ms")
    print(f"closed forms {seconds['ours'] * 1e3:.1f}, {resamples} resamples in a loop {seconds['plain'] * 1e3:.1f}")
    print(f"ratio {seconds['plain'] / seconds['ours']:.0f}x (the first call of each)")


def resampled_metrics(uids: Sequence[str], infos: dict[str, list[Any]], resamples: int) -> dict[str, float]:
    """The same statistics by drawing responses again and again."""
    generator = np.random.default_rng(0)
    rows_of: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        rows_of.setdefault(uid, []).append(row)
    per_prompt: dict[str, list[float]] = {}
    for rows in rows_of.values():
        size = len(rows)
        for name in ("reward", "acc"):
            values, votes = [infos[name][row] for row in rows], [infos["pred"][row] for row in rows]
            found = {f"mean@{size}": float(np.mean(values)), f"std@{size}": float(np.std(values))}
            draws = 2
            while draws <= size:
                drawn: dict[str, list[float]] = {"best": [], "worst": [], "maj": []}
                for chosen in generator.integers(0, size, (resamples, draws)).tolist():
                    picked = [values[i] for i in chosen]
                    winner = Counter(votes[i] for i in chosen).most_common(1)[0][0]
                    drawn["best"].append(max(picked))
                    drawn["worst"].append(min(picked))
                    drawn["maj"].append(next(values[i] for i in chosen if votes[i] == winner))
                for kind, results in drawn.items():
                    found[f"{kind}@{draws}/mean"] = float(np.mean(results))
                    found[f"{kind}@{draws}/std"] = float(np.std(results))
                draws *= 2
            for metric, value in found.items():
                per_prompt.setdefault(f"{name}/{metric}", []).append(value)
    return {name: float(np.mean(values)) for name, values in per_prompt.items()}


# ---------------------------------------------------------------- the clock


def keep_freed_memory() -> None:
    """Let glibc give no memory back to the system, so that it is warm after the first round; elsewhere do nothing."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_MMAP_MAX, 0)


def best_of(rounds: int, contenders: dict[str, Callable[[], Any]], warm: bool = True) -> dict[str, float]:
    """The fewest CPU-seconds of each over some rounds, all of them in turn each round."""
    if warm:
        for run in contenders.values():
            run()
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    return best


if __name__ == "__main__":
    main()
