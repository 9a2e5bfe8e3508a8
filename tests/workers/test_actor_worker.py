from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from workers_ranks import sent_weights, with_old
from workers_testing import (
    RESPONSE_WIDTH,
    Gradients,
    config,
    new_actor,
    padded,
    padded_batch,
    run_ranks,
    worker_batch,
)

from ppo_lib.errors import ConfigError, FieldMissingError

ACTOR = "actor_rollout_ref.actor."
NO_CLIP = f"{ACTOR}grad_clip=null"
BF16 = f"{ACTOR}fsdp_config.dtype=bfloat16"


def plain_loss(
    path: str, batch: dict[str, torch.Tensor], old: torch.Tensor, ref: torch.Tensor
) -> tuple[torch.Tensor, dict[str, float], Any]:
    """Clipped loss - 0.05 entropy + 0.1 k3 on padded rows with whole logits, written out."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
    ).logits
    log_softmax = (logits[:, -RESPONSE_WIDTH - 1 : -1] / 0.7).log_softmax(-1)
    log_probs = log_softmax.gather(2, batch["responses"][..., None]).squeeze(2)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    mask, advantages = batch["response_mask"].bool(), batch["advantages"]

    ratio = (log_probs - old).exp()
    clipped = -advantages * ratio.clamp(0.8, 1.2)
    losses = torch.maximum(-advantages * ratio, clipped)
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * 3.0), losses)
    k3 = (ref - log_probs).exp() - 1 - (ref - log_probs)
    terms = {"pg_loss": losses, "entropy": entropy, "kl_loss": k3}
    means = {name: term[mask].sum() / mask.sum() for name, term in terms.items()}
    loss = means["pg_loss"] - 0.05 * means["entropy"] + 0.1 * means["kl_loss"]
    return loss, {f"actor/{name}": value.item() for name, value in means.items()}, model


def test_update_follows_the_gradient_of_the_loss_written_out(tiny_model: str) -> None:
    cfg = config(
        tiny_model,
        NO_CLIP,
        f"{ACTOR}entropy_coeff=0.05",
        f"{ACTOR}use_kl_loss=true",
        f"{ACTOR}kl_loss_coef=0.1",
        f"{ACTOR}ppo_micro_batch_size_per_gpu=2",
        f"{ACTOR}entropy_from_logits_chunk_size=4",
    )
    actor, batch = new_actor(cfg), padded_batch(8)
    td = with_old(actor, worker_batch(batch, mini_batches=1))
    loss, expected, model = plain_loss(
        tiny_model, batch, padded(td["old_log_probs"], td), padded(td["ref_log_prob"], td)
    )
    loss.backward()
    recorded = Gradients(actor.actor.engine)
    metrics = actor.update_actor(td)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)  # of terms up to 1
    assert metrics["actor/kl_coef"] == 0.1
    assert 0 < metrics["actor/pg_clipfrac"] < 1
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (recorded.seen[0] - gradient).norm() <= 1e-5 * gradient.norm()


def test_entropy_alone_moves_the_policy_when_it_has_weight(tiny_model: str) -> None:
    batch = padded_batch(8)
    batch["advantages"].zero_()
    entropies = {}
    for coefficient in (0.0, 1.0):
        actor = new_actor(config(tiny_model, f"{ACTOR}entropy_coeff={coefficient}", f"{ACTOR}calculate_entropy=true"))
        td = worker_batch(batch, mini_batches=1)
        entropies[coefficient] = [actor.update_actor(td)["actor/entropy"] for _ in range(3)]
    assert entropies[0.0][2] == pytest.approx(entropies[0.0][0], rel=1e-2)  # weight decay alone
    assert entropies[1.0][2] > entropies[1.0][0] + 0.1


@pytest.mark.parametrize("precision", [(), (BF16,)])
def test_first_ratio_is_exactly_one(precision: tuple[str, ...], tiny_model: str) -> None:
    actor = new_actor(config(tiny_model, *precision), role="actor")
    td = worker_batch(padded_batch(8), mini_batches=1)
    td["old_log_probs"] = actor.compute_log_prob(td)["log_probs"]
    metrics = actor.update_actor(td)
    assert metrics["actor/ppo_kl"] == metrics["actor/pg_clipfrac"] == 0.0
    assert actor.update_actor(td)["actor/ppo_kl"] != 0.0


def test_left_out_old_log_probs_are_those_of_the_pass_that_was_skipped(tiny_model: str) -> None:
    results = []
    for skipped in (False, True):
        actor = new_actor(config(tiny_model), role="actor")
        td = worker_batch(padded_batch(8), mini_batches=1)
        if not skipped:
            td["old_log_probs"] = actor.compute_log_prob(td)["log_probs"]
        results.append((actor.update_actor(td), actor.get_fingerprint()))
    assert results[1][0].pop("actor/entropy") > 0  # no pass before the update measured it
    assert results[0] == results[1]


def test_reference_stays_while_the_policy_moves(tiny_model: str) -> None:
    actor = new_actor(config(tiny_model, f"{ACTOR}use_kl_loss=true"))
    td = worker_batch(padded_batch(8), mini_batches=1, calculate_entropy=True)
    before = actor.compute_ref_log_prob(td)["log_probs"].values()
    policy = actor.compute_log_prob(td)
    assert torch.equal(policy["log_probs"].values(), before)
    td["old_log_probs"], td["ref_log_prob"] = policy["log_probs"], policy["log_probs"]
    assert actor.update_actor(td)["actor/kl_loss"] == 0.0
    assert actor.update_actor(td)["actor/kl_loss"] > 0.0
    assert torch.equal(actor.compute_ref_log_prob(td)["log_probs"].values(), before)
    assert not torch.allclose(actor.compute_log_prob(td)["log_probs"].values(), before, atol=1e-3)


def test_entropy_is_computed_where_it_is_asked_for(tiny_model: str) -> None:
    actor = new_actor(config(tiny_model), role="actor")
    td = worker_batch(padded_batch(4))
    assert set(actor.compute_log_prob(td).keys()) == {"log_probs"}
    with_entropy = worker_batch(padded_batch(4), calculate_entropy=True)
    output = actor.compute_log_prob(with_entropy)
    assert set(output.keys()) == {"log_probs", "entropys"}
    assert output["entropys"].values().min() > 0
    assert output["log_probs"].dtype == output["entropys"].dtype == torch.float32
    assert "actor/entropy" not in actor.update_actor(with_old(actor, td))


def test_a_column_the_loss_needs_is_named_when_it_is_missing(tiny_model: str) -> None:
    actor = new_actor(config(tiny_model, f"{ACTOR}use_kl_loss=true"))
    with pytest.raises(FieldMissingError, match="'ref_log_prob'"):
        actor.update_actor(worker_batch(padded_batch(4)))


def test_rollout_weights_scale_the_loss(tiny_model: str) -> None:
    losses = []
    for weight in (1.0, 0.5):
        actor = new_actor(config(tiny_model), role="actor")
        td = worker_batch(padded_batch(8), mini_batches=1)
        td["rollout_is_weights"] = torch.full_like(td["advantages"], weight)
        losses.append(actor.update_actor(td)["actor/pg_loss"])
    assert losses[1] == pytest.approx(losses[0] / 2)


def test_unknown_role_is_an_error(tiny_model: str) -> None:
    with pytest.raises(ConfigError, match="actor_rollout_ref"):
        new_actor(config(tiny_model), role="policy")


@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_go_out_whole_under_the_names_of_the_files_in_the_rollouts_type(
    world_size: int, tiny_model: str
) -> None:
    cfg = config(tiny_model, "actor_rollout_ref.rollout.dtype=bfloat16")
    results = run_ranks(sent_weights, world_size, cfg)
    files = load_file(f"{tiny_model}/model.safetensors")
    for tensors, spec in results:
        assert [(name, tuple(t.shape), "bfloat16") for name, t in tensors] == spec
        assert {name for name, _ in tensors} == set(files)
        assert all(torch.equal(tensor, files[name].bfloat16()) for name, tensor in tensors)
