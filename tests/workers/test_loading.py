from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from workers_ranks import fails_to_load, states
from workers_testing import (
    PROMPT_WIDTH,
    config,
    new_actor,
    new_critic,
    padded,
    padded_batch,
    run_ranks,
    save_tiny_model,
    worker_batch,
)

from ppo_lib.errors import ConfigError, ModelError
from ppo_lib.workers.loading import compile_blocks

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 5},
}


def reference_log_probs(path: str, batch: dict[str, torch.Tensor], temperature: float) -> torch.Tensor:
    """(B, R) by the family's own attention on padded rows with their mask."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
        ).logits
    log_probs = (logits[:, :-1] / temperature).log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None]).squeeze(2)
    return log_probs[:, -batch["responses"].shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_log_probs_equal_padded_ones(family: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, family, **FAMILIES[family])
    batch = padded_batch(8)
    td = worker_batch(batch, calculate_entropy=True)
    actor = new_actor(config(path, "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3"), role="actor")
    output = actor.compute_log_prob(td)
    attended = batch["attention_mask"][:, PROMPT_WIDTH:].bool()
    expected = reference_log_probs(path, batch, temperature=0.7)
    difference = (padded(output["log_probs"], td) - expected)[attended].abs().max().item()
    assert difference <= 1e-5
    assert expected[attended].std() > 0.5  # the model is far from uniform: a wrong row or token would show


@pytest.mark.parametrize(("left", "right"), [(5, 0), (0, 4), (3, 7)])
def test_more_padding_changes_nothing(left: int, right: int, tiny_model: str) -> None:
    actor = new_actor(config(tiny_model), role="actor")
    plain, wide = worker_batch(padded_batch(6)), worker_batch(padded_batch(6, left=left, right=right))
    torch.testing.assert_close(
        actor.compute_log_prob(wide)["log_probs"].values(),
        actor.compute_log_prob(plain)["log_probs"].values(),
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("gemma2", {}, "caps its scores"),
        ("granite", {"logits_scaling": 4.0}, "other numbers on packed rows"),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "attention sinks"),
    ],
)
def test_family_that_packing_would_get_wrong_is_refused_at_load(
    family: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, family, **settings)
    with pytest.raises(ModelError, match=message):
        new_actor(config(path), role="actor")


def test_family_outside_the_llama_line_is_computed_right_or_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gpt2", n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.3)
    batch = padded_batch(4)
    td = worker_batch(batch)
    actor = new_actor(config(path), role="actor")
    attended = batch["attention_mask"][:, PROMPT_WIDTH:].bool()
    ours = padded(actor.compute_log_prob(td)["log_probs"], td)
    assert (ours - reference_log_probs(path, batch, 0.7))[attended].abs().max() <= 1e-5
    assert {m.p for m in actor.actor.engine.module.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}


def test_value_head_is_drawn_from_the_seed_and_the_network_comes_from_the_files(tiny_model: str) -> None:
    heads = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed * 31)  # the surroundings must not matter
        state = new_critic(config(tiny_model, f"critic.fsdp.seed={seed}")).full_state_dict()
        heads.append(state["score.weight"])
        assert torch.equal(
            state["model.norm.weight"], load_file(f"{tiny_model}/model.safetensors")["model.norm.weight"]
        )
    assert heads[0].shape == (1, 32)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_missing_weights_and_modules_are_errors_with_their_names(tiny_model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(Path(tiny_model, "config.json").read_text())
    weights = load_file(f"{tiny_model}/model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack model\.layers\.1\.mlp\.up_proj\.weight"):
        new_actor(config(str(tmp_path)), role="actor")
    with pytest.raises(ConfigError, match="external_lib='no_such_module'"):
        new_actor(config(tiny_model, "actor_rollout_ref.model.external_lib=no_such_module"), role="actor")


def test_override_config_reaches_the_network(tiny_model: str) -> None:
    changed = config(tiny_model, "actor_rollout_ref.model.override_config={rms_norm_eps: 0.5}")
    td = worker_batch(padded_batch(2))
    plain, other = (new_actor(c, "actor").compute_log_prob(td)["log_probs"] for c in (config(tiny_model), changed))
    assert not torch.allclose(plain.values(), other.values(), atol=1e-2)


@pytest.mark.parametrize("fsdp_size", [-1, 1])
def test_every_rank_gets_its_shard_of_what_rank_zero_read(fsdp_size: int, tiny_model: str) -> None:
    sharding = (f"actor_rollout_ref.actor.fsdp_config.fsdp_size={fsdp_size}", f"critic.fsdp.fsdp_size={fsdp_size}")
    files = load_file(f"{tiny_model}/model.safetensors")
    results = run_ranks(states, 2, config(tiny_model, *sharding))
    for actor, critic, _ in results:
        assert actor.keys() == files.keys()
        assert all(torch.equal(actor[name], files[name]) for name in files)
        assert torch.equal(critic["score.weight"], results[0][1]["score.weight"])
    whole = sum(tensor.numel() for tensor in files.values())
    held = [numbers for _, _, numbers in results]
    if fsdp_size == 1:
        assert held == [whole, whole]
    else:
        assert sum(held) == whole
        assert max(held) < 0.51 * whole


def test_tied_embeddings_stay_one_parameter_on_ranks_that_build_the_model_empty(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3", tie_word_embeddings=True)
    files = load_file(f"{path}/model.safetensors")
    for actor, _, _ in run_ranks(states, 2, config(path)):
        assert actor.keys() == files.keys()
        assert "lm_head.weight" not in files
        assert all(torch.equal(actor[name], files[name]) for name in files)


def test_all_ranks_raise_what_rank_zero_met(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gemma2")
    messages = run_ranks(fails_to_load, 2, config(path))
    assert "caps its scores" in messages[0]
    assert messages[0] == messages[1]


@pytest.mark.slow
def test_compiled_blocks_give_the_numbers_of_plain_ones(tiny_model: str) -> None:
    """On a CPU, where a C++ compiler stands in for what a GPU would run."""
    cfg = config(tiny_model, "actor_rollout_ref.model.enable_gradient_checkpointing=true")
    plain, compiled = new_actor(cfg, role="actor"), new_actor(cfg, role="actor")
    module: Any = compiled.actor.engine.module
    blocks = list(module.model.base_model.layers)
    compile_blocks(blocks)
    assert [name for name, part in blocks[0].named_children() if part._compiled_call_impl is not None] == [
        "mlp",
        "input_layernorm",
        "post_attention_layernorm",
    ]
    for seed in (0, 1):  # other lengths, the same code
        td = worker_batch(padded_batch(6, seed=seed))
        metrics = [actor.update_actor(td) for actor in (plain, compiled)]
        assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
    one, other = plain.full_state_dict(), compiled.full_state_dict()
    assert all((tensor - other[name]).norm() <= 1e-4 * tensor.norm() for name, tensor in one.items())


def test_compiling_on_a_cpu_is_one_line(tiny_model: str, caplog: pytest.LogCaptureFixture) -> None:
    new_actor(config(tiny_model, "actor_rollout_ref.actor.use_torch_compile=true"), role="actor")
    assert [r.getMessage() for r in caplog.records if "compile" in r.getMessage()] == [
        "use_torch_compile changes nothing on a CPU, where compiled code is no faster"
    ]
