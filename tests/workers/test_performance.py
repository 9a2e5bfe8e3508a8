from __future__ import annotations

import pytest
import torch
from workers_testing import config, new_actor, new_critic, padded_batch, worker_batch

from ppo_lib.workers.attention import PackedLayout
from ppo_lib.workers.packing import JaggedRows, pack_rows
from ppo_lib.workers.performance import Arithmetic, attended_pairs, device_peak

CPU = torch.device("cpu")


def test_attended_pairs_are_counted_with_prefixes_and_windows() -> None:
    assert attended_pairs(PackedLayout((3, 2), CPU)) == (1 + 2 + 3) + (1 + 2)
    assert attended_pairs(PackedLayout((3, 2, 2), CPU, (-1, 0, 0))) == (1 + 2 + 3) + 2 * (4 + 5)
    assert attended_pairs(PackedLayout((5,), CPU), window=2) == 1 + 2 + 2 + 2 + 2
    assert attended_pairs(PackedLayout((3, 2), CPU, (-1, 0)), window=4) == (1 + 2 + 3) + (4 + 4)


def test_arithmetic_of_a_small_model_by_hand(tiny_model: str) -> None:
    actor = new_actor(config(tiny_model), role="actor")
    arithmetic = Arithmetic.of(actor.actor.engine.module)
    assert arithmetic is not None
    # two layers, hidden 32, heads 4 x 8, two key-value heads, FFN 48, vocabulary 61
    weights = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48)
    assert (arithmetic.weights, arithmetic.head, arithmetic.attention) == (weights, 32 * 61, 32)
    rows = pack_rows(JaggedRows(worker_batch(padded_batch(4))), [0, 1, 2, 3], CPU)
    tokens, pairs = rows.input_ids.shape[1], attended_pairs(rows.layout)
    forward = 2 * weights * tokens + 2 * 32 * 61 * len(rows.labels) + 4 * 32 * pairs * 2
    assert arithmetic.forward(rows) == forward
    assert arithmetic.backward(rows) == 2 * forward


def test_workers_report_each_pass_once(tiny_model: str) -> None:
    cfg, batch = config(tiny_model), padded_batch(4)
    actor, critic = new_actor(cfg), new_critic(cfg)
    td = worker_batch(batch, mini_batches=1)
    td["old_log_probs"] = actor.compute_log_prob(td)["log_probs"]
    infer = actor.performance()["actor_infer"]
    actor.compute_ref_log_prob(td)
    actor.update_actor(td)
    report = actor.performance()
    assert report.keys() == {"actor", "ref"}
    # here every row counts in the update too, so it does three times the arithmetic of a forward pass
    assert report["actor"]["operations"] == pytest.approx(3 * infer["operations"])
    assert report["ref"]["operations"] == infer["operations"]
    assert all(work["seconds"] > 0 and work["peak"] > 0 and work["memory_gb"] > 0 for work in report.values())
    assert actor.performance() == {}
    td["values"] = critic.compute_values(td)["values"]
    critic.update_critic(td)
    assert critic.performance().keys() == {"critic", "critic_infer"}


def test_peak_of_a_gpu_is_looked_up_and_of_a_cpu_measured() -> None:
    assert device_peak("NVIDIA H100 80GB HBM3", torch.bfloat16, 1) == 989e12
    assert device_peak("NVIDIA L40S", torch.bfloat16, 1) == 362e12
    assert device_peak("NVIDIA H100 80GB HBM3", torch.float32, 1) is None
    assert device_peak("some other GPU", torch.bfloat16, 1) is None
    measured = device_peak("cpu", torch.float32, 1)
    assert measured is not None
    assert measured > 1e8
    assert device_peak("cpu", torch.float32, 1) == measured  # once
