"""An adapter in place of the weights: what is trained, what the reference is, what leaves the ranks, what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from workers_ranks import load_and_train, memory_of_sending, sent_weights, train_and_save, train_both
from workers_testing import config, new_actor, new_critic, padded_batch, run_ranks, save_tiny_model, worker_batch

from ppo_lib.errors import CheckpointError, ConfigError, ModelError
from ppo_lib.workers.fsdp_engine import full_tensor, local_tensor

LORA = ("actor_rollout_ref.model.lora_rank=3", "actor_rollout_ref.model.lora_alpha=6", "critic.model.lora_rank=4")


def trained(worker: Any) -> set[str]:
    return {name for name, parameter in worker.engine.named_parameters() if parameter.requires_grad}


def step(actor: Any, seed: int = 0) -> Any:
    td = worker_batch(padded_batch(8, seed=seed))
    td["old_log_probs"] = actor.compute_log_prob(td)["log_probs"]
    actor.update_actor(td)
    return td


def test_only_the_adapter_is_trained_and_a_value_head_beside_it(tiny_model: str) -> None:
    cfg = config(tiny_model, *LORA)
    actor, critic = new_actor(cfg), new_critic(cfg)
    layers = [f"model.layers.{i}.{part}" for i in (0, 1) for part in ("self_attn.q_proj", "mlp.down_proj")]
    assert {f"{layer}.lora_{side}.weight" for layer in layers for side in "AB"} <= trained(actor.actor)
    assert all(".lora_" in name for name in trained(actor.actor))
    assert len(trained(actor.actor)) == 2 * 7 * 2  # two layers of seven linear ones, A and B
    assert {name for name in trained(critic.critic) if ".lora_" not in name} == {"score.weight", "score.bias"}
    shapes = {n: tuple(p.shape) for n, p in actor.actor.engine.named_parameters()}
    assert shapes["model.layers.0.mlp.down_proj.lora_A.weight"] == (3, 48)
    assert shapes["model.layers.0.mlp.down_proj.lora_B.weight"] == (32, 3)


def test_an_untrained_adapter_changes_nothing_and_the_reference_stays_the_base(tiny_model: str) -> None:
    plain, adapted = new_actor(config(tiny_model)), new_actor(config(tiny_model, *LORA))
    td = worker_batch(padded_batch(8))
    base = plain.compute_log_prob(td)["log_probs"].values()
    assert torch.equal(adapted.compute_log_prob(td)["log_probs"].values(), base)
    step(adapted)
    assert (adapted.compute_log_prob(td)["log_probs"].values() - base).abs().max() > 1e-3
    assert torch.equal(adapted.compute_ref_log_prob(td)["log_probs"].values(), base)
    assert adapted.ref is adapted.actor  # no second model
    assert (adapted.compute_log_prob(td)["log_probs"].values() - base).abs().max() > 1e-3  # and on again


def test_the_policy_learns_what_w_plus_s_b_a_says(tiny_model: str) -> None:
    """The merged weights, in a model that knows no adapter, give the same log-probs as the adapted one."""
    adapted = new_actor(config(tiny_model, *LORA))
    td = step(adapted)
    parts = {n: full_tensor(p.detach()) for n, p in adapted.actor.engine.named_parameters()}
    merged = adapted.full_state_dict()
    name = "model.layers.1.self_attn.v_proj"
    a, b = (parts[f"{name}.lora_{side}.weight"] for side in "AB")
    assert b.abs().max() > 0
    torch.testing.assert_close(merged[f"{name}.weight"], parts[f"{name}.weight"] + 6 / 3 * b @ a)
    assert torch.equal(merged["model.embed_tokens.weight"], parts["model.embed_tokens.weight"])
    plain = new_actor(config(tiny_model))
    with torch.no_grad():
        for key, parameter in plain.actor.engine.named_parameters():
            local_tensor(parameter).copy_(merged[key])
    one, other = (worker.compute_log_prob(td)["log_probs"].values() for worker in (plain, adapted))
    torch.testing.assert_close(one, other, rtol=0, atol=2e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_rollouts_get_merged_weights_under_the_names_of_the_base(ranks: int, tiny_model: str) -> None:
    plain, _ = sent_weights(0, 1, config(tiny_model))
    for sent, spec in run_ranks(sent_weights, ranks, config(tiny_model, *LORA)):
        assert [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in sent] == spec
        assert [name for name, _ in sent] == [name for name, _ in plain]
        assert all(torch.equal(tensor, value) for (_, tensor), (_, value) in zip(sent, plain))


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), LORA], ids=["plain", "lora"])
def test_sending_weights_makes_no_copy_of_the_model_on_any_rank(lora: tuple[str, ...], tmp_path: Path) -> None:
    """25M parameters, 100 MB: one gathered tensor and one bucket of 8 MB exist at a time, besides each rank's half."""
    model = save_tiny_model(
        tmp_path, hidden_size=512, intermediate_size=1408, num_hidden_layers=8, head_dim=128, vocab_size=2048
    )
    for sent, rose in run_ranks(memory_of_sending, 2, config(model, *lora), 8 << 20):
        print(f"sent {sent / 1e6:.0f} MB, memory rose by {rose / 1e6:.1f} MB")
        assert sent > 90e6
        assert rose < 0.4 * sent


def test_two_ranks_train_as_one(tiny_model: str) -> None:
    cfg = config(tiny_model, *LORA, "actor_rollout_ref.actor.use_kl_loss=true")
    one, *two = run_ranks(train_both, 1, cfg) + run_ranks(train_both, 2, cfg)
    for ranks in two:
        for ours, theirs in zip(ranks["metrics"], one["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        for model in ("actor", "critic"):
            for name, tensor in one[model].items():
                assert (tensor - ranks[model][name]).norm() <= 1e-4 * tensor.norm(), name


@pytest.fixture(scope="module")
def saved(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("lora")
    return folder, run_ranks(train_and_save, 2, config(tiny_model, *LORA), str(folder))[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_resuming_goes_on_on_any_number_of_ranks(ranks: int, tiny_model: str, saved: Any) -> None:
    folder, through = saved
    resumed = run_ranks(load_and_train, ranks, config(tiny_model, *LORA), str(folder))[0]
    for ours, theirs in zip(resumed["metrics"], through["metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for model in ("actor", "critic"):
        for name, tensor in through[model].items():
            assert (tensor - resumed[model][name]).norm() <= 1e-4 * tensor.norm(), name


def test_export_is_merged_and_the_adapter_is_what_peft_reads(tiny_model: str, saved: Any) -> None:
    from peft import PeftModel

    folder, _ = saved
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(folder / "actor/huggingface")(input_ids=ids).logits
        base = AutoModelForCausalLM.from_pretrained(tiny_model)
        before = base(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(base, folder / "actor/adapter")(input_ids=ids).logits
        torch.testing.assert_close(merged, adapted, rtol=0, atol=1e-4)
        assert (merged - before).abs().max() > 1e-2
        values = AutoModelForTokenClassification.from_pretrained(folder / "critic/huggingface")(input_ids=ids).logits
        base = AutoModelForTokenClassification.from_pretrained(tiny_model, num_labels=1)
        adapted = PeftModel.from_pretrained(base, folder / "critic/adapter")(input_ids=ids).logits
        torch.testing.assert_close(values, adapted, rtol=0, atol=1e-4)


def test_going_on_from_an_adapter_with_its_own_settings(tiny_model: str, saved: Any) -> None:
    folder, _ = saved
    first = new_actor(config(tiny_model, *LORA))
    first.load_checkpoint(str(folder / "actor"))
    cfg = config(
        tiny_model,
        f"actor_rollout_ref.model.lora_adapter_path={folder}/actor/adapter",
        f"critic.model.lora_adapter_path={folder}/critic/adapter",
    )
    other, critic = new_actor(cfg), new_critic(cfg)
    assert other.get_fingerprint() == first.get_fingerprint()
    assert other.actor.engine.adapted["model.layers.0.mlp.up_proj.weight"].scaling == {"default": 2.0}
    head = load_file(folder / "critic/adapter/adapter_model.safetensors")["base_model.model.score.weight"]
    assert torch.equal(critic.full_state_dict()["score.weight"], head)
    td = worker_batch(padded_batch(4))
    base = new_actor(config(tiny_model)).compute_log_prob(td)["log_probs"].values()
    assert torch.equal(other.compute_ref_log_prob(td)["log_probs"].values(), base)


def test_resuming_with_other_settings_or_another_base_is_refused(tiny_model: str, saved: Any, tmp_path: Path) -> None:
    folder = str(saved[0] / "actor")
    with pytest.raises(CheckpointError, match="saved with LoRA and this run is without"):
        new_actor(config(tiny_model)).load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="r=3, this run has 5"):
        new_actor(config(tiny_model, LORA[1], "actor_rollout_ref.model.lora_rank=5")).load_checkpoint(folder)
    with pytest.raises(CheckpointError, match="lora_alpha=6, this run has 16"):
        new_actor(config(tiny_model, LORA[0])).load_checkpoint(folder)
    other = save_tiny_model(tmp_path / "other", initializer_range=0.1)
    with pytest.raises(CheckpointError, match="another base model"):
        new_actor(config(other, *LORA)).load_checkpoint(folder)
    plain = new_actor(config(tiny_model), role="actor")
    plain.save_checkpoint(str(tmp_path / "plain"), 1)
    with pytest.raises(CheckpointError, match="saved without LoRA and this run is with"):
        new_actor(config(tiny_model, *LORA)).load_checkpoint(str(tmp_path / "plain"))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("[q_proj,nope]", None),
        ("[nope]", r"target_modules=\('nope',\).* does not fit LlamaForCausalLM"),
        ("[lm_head]", "names 'lm_head', a Linear; only linear layers inside"),
        ("[embed_tokens]", "names 'model.embed_tokens', a Embedding"),
    ],
)
def test_targets_are_checked(targets: str, message: str | None, tiny_model: str) -> None:
    cfg = config(tiny_model, *LORA, f"actor_rollout_ref.model.target_modules={targets}")
    if message is None:
        assert {name.split(".")[-3] for name in trained(new_actor(cfg).actor)} == {"q_proj"}
        return
    with pytest.raises(ConfigError, match=message):
        new_actor(cfg)


def test_excluded_layers_and_regular_expressions(tiny_model: str) -> None:
    model = "actor_rollout_ref.model."
    actor = new_actor(config(tiny_model, *LORA, f"{model}exclude_modules=[gate_proj,up_proj,down_proj]"))
    assert {name.split(".")[-3] for name in trained(actor.actor)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    actor = new_actor(config(tiny_model, *LORA, model + "target_modules='.*layers.1.*q_proj'"))
    assert {name.rpartition(".lora")[0] for name in trained(actor.actor)} == {"model.layers.1.self_attn.q_proj"}


@pytest.mark.parametrize(("change", "message"), [({"use_dora": True}, "use_dora"), ({"bias": "all"}, "bias=all")])
def test_adapters_that_are_more_than_lora_are_refused(
    change: dict[str, Any], message: str, tiny_model: str, saved: Any, tmp_path: Path
) -> None:
    source = saved[0] / "actor/adapter"
    settings = json.loads((source / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings | change))
    (tmp_path / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=message):
        new_actor(config(tiny_model, f"actor_rollout_ref.model.lora_adapter_path={tmp_path}"))


def test_an_adapter_of_another_model_or_none_is_an_error(saved: Any, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "wide", hidden_size=64)
    with pytest.raises(ModelError, match="was made for another model"):
        new_actor(config(other, f"actor_rollout_ref.model.lora_adapter_path={saved[0]}/actor/adapter"))
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        new_actor(config(other, f"actor_rollout_ref.model.lora_adapter_path={tmp_path}"))
