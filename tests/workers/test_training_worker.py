from __future__ import annotations

from typing import Any

import pytest
import torch
from workers_ranks import collectives_of_an_update, train_both, train_in_mixed_precision, uneven, with_old
from workers_testing import (
    PROMPT_WIDTH,
    Gradients,
    config,
    new_actor,
    one_unit_below,
    padded_batch,
    run_ranks,
    worker_batch,
)

from ppo_lib.algorithms import agg_loss
from ppo_lib.algorithms.metric import Metric
from ppo_lib.algorithms.names import POLICY_LOSSES
from ppo_lib.errors import BatchMismatchError
from protocol import tensordict_utils as tu

ACTOR = "actor_rollout_ref.actor."
ALONE = (f"{ACTOR}ppo_micro_batch_size_per_gpu=1", "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1")
NO_STEP = (f"{ACTOR}optim.lr=0", f"{ACTOR}grad_clip=null", f"{ACTOR}optim.weight_decay=0")


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_any_number_of_micro_batches_gives_the_same_loss_and_gradient(mode: str, tiny_model: str) -> None:
    results = {}
    for rows in (8, 4, 2, 1):
        overrides = (
            f"{ACTOR}loss_agg_mode={mode}",
            f"{ACTOR}ppo_micro_batch_size_per_gpu={rows}",
            f"{ACTOR}use_kl_loss=true",
            f"{ACTOR}kl_loss_coef=0.1",
            f"{ACTOR}entropy_coeff=0.05",
        )
        actor = new_actor(config(tiny_model, *NO_STEP, *overrides))
        td = with_old(actor, worker_batch(padded_batch(8), mini_batches=1))
        recorded = Gradients(actor.actor.engine)
        results[rows] = actor.update_actor(td), recorded.seen[0]
    metrics, gradient = results[8]
    assert gradient.norm() > 0.1
    for rows in (4, 2, 1):
        other_metrics, other = results[rows]
        assert (other - gradient).norm() <= 1e-5 * gradient.norm()
        assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)


COVARIANCE = tuple(
    f"{ACTOR}policy_loss.{setting}" for setting in ("clip_cov_ratio=0.2", "clip_cov_lb=-1", "kl_cov_ratio=0.2")
)


@pytest.mark.parametrize("loss", sorted(name for name, row in POLICY_LOSSES.items() if not row.bypass))
def test_no_policy_loss_depends_on_micro_batches(loss: str, tiny_model: str) -> None:
    results = []
    for rows in (8, 2):
        overrides = (f"{ACTOR}policy_loss.loss_mode={loss}", f"{ACTOR}ppo_micro_batch_size_per_gpu={rows}", *COVARIANCE)
        actor = new_actor(config(tiny_model, *NO_STEP, *overrides), role="actor")
        td = with_old(actor, worker_batch(padded_batch(8), mini_batches=1))
        recorded = Gradients(actor.actor.engine)
        results.append((actor.update_actor(td), recorded.seen[0]))
    (metrics, gradient), (other_metrics, other) = results
    assert gradient.norm() > 0.1
    assert (other - gradient).norm() <= 1e-5 * gradient.norm()
    assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-7)


def loss_with_metrics(old_log_prob, log_prob, advantages, response_mask, mode, config, rollout_is_weights=None):
    """The policy gradient, with one metric of each kind under names that say nothing, or the wrong thing."""
    loss = agg_loss(-advantages * log_prob, response_mask, mode, config.denominators)
    kept = log_prob.detach()[response_mask.bool()]
    rows = torch.tensor(float(len(log_prob)))
    kinds = {
        "minimal_rows": Metric(rows, "sum"),
        "max_of_it": Metric(kept.min(), "min"),
        "b": Metric(kept.max(), "max"),
    }
    return loss, {
        **kinds,
        "latest": Metric(rows, "last"),
        "mini_share": agg_loss(rows.expand_as(log_prob), response_mask, "token-mean", config.denominators),
    }


def test_a_metric_is_reduced_as_it_declares_whatever_its_name_says(tiny_model: str) -> None:
    cfg = config(
        tiny_model,
        *NO_STEP,
        f"{ACTOR}policy_loss.loss_mode={__name__}:loss_with_metrics",
        f"{ACTOR}ppo_micro_batch_size_per_gpu=2",
    )
    actor = new_actor(cfg, role="actor")
    td = worker_batch(padded_batch(8), mini_batches=2)
    log_probs = actor.compute_log_prob(td)["log_probs"].values()
    kept = log_probs[td["response_mask"].values().bool()]
    metrics = actor.update_actor(td)
    assert metrics["actor/minimal_rows"] == 8
    assert metrics["actor/max_of_it"] == pytest.approx(float(kept.min()), rel=1e-5)
    assert metrics["actor/b"] == pytest.approx(float(kept.max()), rel=1e-5)
    assert metrics["actor/latest"] == metrics["actor/mini_share"] == pytest.approx(2)


def test_packing_under_a_token_cap_gives_the_same_update_as_fixed_rows(tiny_model: str) -> None:
    final = []
    for sizes in ("ppo_max_token_len_per_gpu=25", "ppo_micro_batch_size_per_gpu=2"):
        cfg = config(tiny_model, ACTOR + sizes, f"{ACTOR}use_kl_loss=true")
        final.append(train_both(0, 1, cfg))
    for one, other in zip(final[0]["metrics"], final[1]["metrics"]):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("size", ["max_token_len_per_gpu=70", "max_token_len_per_gpu=30", "micro_batch_size_per_gpu=4"])
def test_prompts_computed_once_for_their_group_change_nothing(size: str, tiny_model: str) -> None:
    batch = padded_batch(12)
    for name in ("input_ids", "attention_mask", "position_ids"):  # three prompts of four responses each
        batch[name][:, :PROMPT_WIDTH] = batch[name][[0] * 4 + [4] * 4 + [8] * 4, :PROMPT_WIDTH]
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    results = []
    for sizes in ((f"{ACTOR}ppo_{size}", f"actor_rollout_ref.rollout.log_prob_{size}"), ALONE):
        actor = new_actor(config(tiny_model, *NO_STEP, *sizes, f"{ACTOR}entropy_coeff=0.05"), role="actor")
        td = worker_batch(batch, mini_batches=1, calculate_entropy=True)
        before = actor.compute_log_prob(td)
        recorded = Gradients(actor.actor.engine)
        metrics = actor.update_actor(with_old(actor, td))
        results.append((metrics, recorded.seen[0], before["log_probs"].values(), before["entropys"].values()))
    ours, alone = results
    assert ours[0] == pytest.approx(alone[0], rel=1e-5, abs=1e-6)
    assert (ours[1] - alone[1]).norm() <= 1e-6 * alone[1].norm()
    torch.testing.assert_close(ours[2], alone[2], rtol=0, atol=2e-6)
    torch.testing.assert_close(ours[3], alone[3], rtol=0, atol=2e-6)


def test_padding_of_the_batch_changes_no_gradient(tiny_model: str) -> None:
    seen = []
    for left, right in ((0, 0), (4, 6)):
        actor = new_actor(config(tiny_model, *NO_STEP), role="actor")
        td = with_old(actor, worker_batch(padded_batch(6, left=left, right=right), mini_batches=1))
        recorded = Gradients(actor.actor.engine)
        actor.update_actor(td)
        seen.append(recorded.seen[0])
    assert (seen[0] - seen[1]).norm() <= 1e-6 * seen[0].norm()


def test_rows_of_zero_weight_change_nothing(tiny_model: str) -> None:
    whole = padded_batch(8)
    whole["response_mask"][[1, 6]] = 0
    kept = {name: column[[0, 2, 3, 4, 5, 7]] for name, column in whole.items()}
    seen = []
    for batch in (whole, kept):
        actor = new_actor(config(tiny_model, *NO_STEP), role="actor")
        recorded = Gradients(actor.actor.engine)
        metrics = actor.update_actor(with_old(actor, worker_batch(batch, mini_batches=1)))
        seen.append((metrics, recorded.seen[0]))
    assert seen[0][0] == pytest.approx(seen[1][0], rel=1e-6)
    assert (seen[0][1] - seen[1][1]).norm() <= 1e-6 * seen[0][1].norm()


def test_mini_batch_without_weight_moves_nothing_and_reports_zero(tiny_model: str) -> None:
    batch = padded_batch(4)
    batch["response_mask"].zero_()
    actor = new_actor(config(tiny_model), role="actor")
    before = actor.get_fingerprint()
    metrics = actor.update_actor(with_old(actor, worker_batch(batch, mini_batches=1)))
    assert actor.get_fingerprint() == before
    assert metrics["actor/pg_loss"] == metrics["actor/grad_norm"] == 0.0
    assert metrics["actor/empty_mini_batches"] == 1


def test_mini_batch_without_weight_is_in_no_mean(tiny_model: str) -> None:
    batch = padded_batch(8)
    batch["response_mask"][1::2] = 0  # the whole of the second mini-batch
    both, alone = (
        new_actor(config(tiny_model), role="actor").update_actor(worker_batch(rows, mini_batches))
        for rows, mini_batches in ((batch, 2), ({name: column[::2] for name, column in batch.items()}, 1))
    )
    assert both.pop("actor/empty_mini_batches") == 1
    assert alone.pop("actor/empty_mini_batches") == 0
    assert both.pop("actor/lr") == alone.pop("actor/lr") == 1e-2
    assert both == pytest.approx(alone, rel=1e-5, abs=1e-7)


def test_gradient_that_is_not_finite_is_left_out_and_counted(tiny_model: str) -> None:
    batch = padded_batch(8)
    batch["advantages"][0, 0] = float("inf")
    batch["response_mask"][0, 0] = 1
    actor = new_actor(config(tiny_model), role="actor")
    before = actor.full_state_dict()
    td = with_old(actor, worker_batch(batch, mini_batches=2))
    metrics = actor.update_actor(td)
    assert metrics["actor/nonfinite_grad_steps"] == 1
    after = actor.full_state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
    assert any(not torch.equal(before[name], after[name]) for name in before)  # the other mini-batch's step was taken


def test_gradient_is_clipped_to_the_configured_norm(tiny_model: str) -> None:
    norms = {}
    for clip in ("0.01", "null"):
        actor = new_actor(config(tiny_model, *NO_STEP, f"{ACTOR}grad_clip={clip}"), role="actor")
        recorded = Gradients(actor.actor.engine)
        metrics = actor.update_actor(with_old(actor, worker_batch(padded_batch(8), mini_batches=1)))
        norms[clip] = metrics["actor/grad_norm"], recorded.seen[0].norm().item()
    assert norms["0.01"][0] == pytest.approx(norms["null"][0])  # reported before clipping
    assert norms["null"][1] == pytest.approx(norms["null"][0], rel=1e-5)
    assert norms["0.01"][1] == pytest.approx(0.01, rel=1e-3)


def test_epochs_and_mini_batches_are_optimizer_steps_in_a_seeded_order(tiny_model: str) -> None:
    def run(*overrides: str, step: int = 1) -> dict[str, int]:
        actor = new_actor(config(tiny_model, f"{ACTOR}ppo_epochs=2", *overrides), role="actor")
        td = worker_batch(padded_batch(8), mini_batches=4)
        actor.update_actor(with_old(actor, tu.assign_non_tensor(td, global_steps=step)))
        assert actor.actor.engine.optimizer_steps == 8
        return actor.get_fingerprint()

    shuffled = run(f"{ACTOR}shuffle=true")
    assert run() == run()
    assert shuffled == run(f"{ACTOR}shuffle=true")
    assert shuffled != run()
    assert shuffled != run(f"{ACTOR}shuffle=true", step=2)
    assert shuffled != run(f"{ACTOR}shuffle=true", f"{ACTOR}data_loader_seed=1")


def test_mini_batch_without_denominators_is_an_error_naming_the_row(tiny_model: str) -> None:
    actor = new_actor(config(tiny_model), role="actor")
    td = with_old(actor, worker_batch(padded_batch(4), mini_batches=2))
    td["mini_batch"] += 1
    with pytest.raises(BatchMismatchError, match="row 1 is in mini-batch 2, but there are denominators for 2"):
        actor.update_actor(td)


SETTINGS = {
    "plain": (),
    "one_unit": (*one_unit_below(10**6), f"{ACTOR}ppo_micro_batch_size_per_gpu=1"),
    "no_resharding": (
        f"{ACTOR}fsdp_config.reshard_after_forward=false",
        f"{ACTOR}fsdp_config.forward_prefetch=true",
        f"{ACTOR}ppo_micro_batch_size_per_gpu=1",
    ),
    "one_reduction": (
        f"{ACTOR}fsdp_config.use_no_sync_for_gradient_accumulation=true",
        f"{ACTOR}ppo_micro_batch_size_per_gpu=1",
    ),
    "checkpointing": ("actor_rollout_ref.model.enable_gradient_checkpointing=true",),
    "replicas": (f"{ACTOR}fsdp_config.fsdp_size=1", f"{ACTOR}ppo_micro_batch_size_per_gpu=1"),
}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for ours, theirs in zip(one["metrics"], other["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for model in ("actor", "critic"):
        for name, tensor in one[model].items():
            assert (tensor - other[model][name]).norm() <= 1e-4 * tensor.norm(), name


@pytest.mark.parametrize("setting", SETTINGS)
def test_two_ranks_give_what_one_gives(setting: str, tiny_model: str) -> None:
    losses = (f"{ACTOR}use_kl_loss=true", f"{ACTOR}entropy_coeff=0.01")
    alone = train_both(0, 1, config(tiny_model, *losses), 3)
    together = run_ranks(train_both, 2, config(tiny_model, *losses, *SETTINGS[setting]), 3)
    assert together[0]["metrics"] == together[1]["metrics"]
    assert_same(together[0], alone)


def test_a_small_model_is_gathered_and_reduced_once_a_mini_batch(tiny_model: str) -> None:
    """Four micro-batches a rank. In units of a layer each would gather embedding, two layers in forward and in backward
    (the last not again), and reduce all three.
    """
    found = {}
    for name, limit in (("by layer", 0), ("at once", 10**6)):
        cfg = config(tiny_model, f"{ACTOR}ppo_micro_batch_size_per_gpu=1", *one_unit_below(limit))
        found[name] = run_ranks(collectives_of_an_update, 2, cfg)[1]
    assert found["at once"] == {"gathered": 1, "reduced": 1}
    assert found["by layer"] == {"gathered": 20, "reduced": 12}


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov"])
def test_two_ranks_choose_the_tokens_that_one_chooses(loss: str, tiny_model: str) -> None:
    overrides = (f"{ACTOR}policy_loss.loss_mode={loss}", f"{ACTOR}ppo_micro_batch_size_per_gpu=1", *COVARIANCE)
    alone = train_both(0, 1, config(tiny_model, *overrides))
    together = run_ranks(train_both, 2, config(tiny_model, *overrides))
    assert_same(together[0], alone)


def test_replicas_of_shards_give_what_one_rank_gives(tiny_model: str) -> None:
    """Four ranks as two replicas of two shards: gradients are summed inside a shard group, then over the replicas."""
    sizes = (f"{ACTOR}fsdp_config.fsdp_size=2", "critic.fsdp.fsdp_size=2", f"{ACTOR}ppo_micro_batch_size_per_gpu=1")
    alone = train_both(0, 1, config(tiny_model), 2)
    together = run_ranks(train_both, 4, config(tiny_model, *sizes), 2)
    assert all(result["metrics"] == together[0]["metrics"] for result in together)
    for result in together:
        assert_same(result, alone)


def test_rank_without_rows_of_a_mini_batch_joins_in(tiny_model: str) -> None:
    cfg = config(tiny_model, f"{ACTOR}ppo_micro_batch_size_per_gpu=1")
    alone = uneven(0, 1, cfg)
    for result in run_ranks(uneven, 2, cfg):
        assert_same(result, alone)


@pytest.mark.parametrize(("world_size", "one_unit"), [(1, False), (2, False), (2, True)])
def test_mixed_precision_through_fsdp_stays_near_fp32(world_size: int, one_unit: bool, tiny_model: str) -> None:
    """The first step has one mini-batch: behind an update, a ratio that rounding moves across the clip range takes a
    token's whole gradient with it, and norms that rounding moves by 2% were up to 38% apart.
    """
    cfg = config(tiny_model, f"{ACTOR}use_kl_loss=true", *one_unit_below(10**6 if one_unit else 0))
    exact = train_both(0, 1, cfg, mini_batches=1)
    mixed = run_ranks(train_in_mixed_precision, world_size, cfg)[0]
    first, rounded = exact["metrics"][0], mixed["metrics"][0]
    for name in ("actor/grad_norm", "critic/grad_norm", "critic/vf_loss"):
        assert rounded[name] == pytest.approx(first[name], rel=0.02)
        assert rounded[name] != first[name]
    assert all(tensor.dtype == torch.float32 for tensor in mixed["actor"].values())
    moved = sum((tensor - mixed["actor"][name]).square().sum() for name, tensor in exact["actor"].items()).sqrt()
    assert moved < 0.05 * sum(tensor.square().sum() for tensor in exact["actor"].values()).sqrt()
