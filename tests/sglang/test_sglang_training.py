"""The engine under the real actor and in the real trainer."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from rollout_testing import gen_batch_of, ppo_config, prompts_of
from sglang_testing import host_of, signal_while_it_generates

from ppo_lib import RayPPOTrainer, load_config
from ppo_lib.models import load_tokenizer, resolve_model_path
from ppo_lib.rollout import AgentLoopManager, CheckpointEngineManager, LLMServerManager
from ppo_lib.single_controller import LocalWorkerGroup, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from ppo_lib.workers import ActorRolloutRefWorker
from protocol import DataProto, left_right_2_no_padding, no_padding_2_padding
from protocol import tensordict_utils as tu

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from runs import GRPO, TINY

OVERRIDES = (
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)
TEMPERATURE = 0.7


def _worker_batch(output: DataProto, **columns: torch.Tensor):
    keys = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
    td = output.select(batch_keys=keys, non_tensor_batch_keys=[], meta_info_keys=[]).to_tensordict()
    for name, column in columns.items():
        td[name] = column
    td = left_right_2_no_padding(td)
    tu.assign_non_tensor(td, temperature=TEMPERATURE, global_steps=1, calculate_entropy=False)
    return td


def _update_batch(output: DataProto, old_log_probs: torch.Tensor, seed: int):
    mask = output.batch["response_mask"]
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed)) * mask
    td = _worker_batch(output, old_log_probs=old_log_probs, advantages=advantages)
    td["mini_batch"] = torch.zeros(len(output), dtype=torch.int64)
    tu.assign_non_tensor(td, mini_batch_num_tokens=[float(mask.sum())], mini_batch_num_seqs=[float(mask.any(1).sum())])
    return td


def _generate_and_compare(loops, group, batch) -> tuple[DataProto, torch.Tensor]:
    """A batch whose log-probs are those that the actor computes."""
    output = loops.generate_sequences(batch)
    mask = output.batch["response_mask"].bool()
    recomputed = no_padding_2_padding(group.compute_log_prob(_worker_batch(output))["log_probs"], mask.shape[1])
    torch.testing.assert_close(output.batch["rollout_log_probs"][mask], recomputed[mask], atol=1e-4, rtol=0)
    return output, recomputed


def test_log_probs_stay_those_of_a_two_rank_actor_over_five_updates_sleep_and_a_kill(
    ray_cluster, model_dirs, no_leftovers
):
    path = model_dirs["qwen3"]
    settings = {"load_format": "dummy", "name": "sglang", "max_num_seqs": 16, "n": 4, "agent.num_workers": 1}
    # two buckets or more, so that they are sent one after the other
    config = ppo_config(path, *OVERRIDES, "trainer.n_gpus_per_node=2", **settings)
    section = config.actor_rollout_ref
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny-llama"))
    pool = RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(
        pool,
        RayClassWithInitArgs(
            cls=ActorRolloutRefWorker, config=section, role="actor_rollout", device_name="cpu", total_optimizer_steps=9
        ),
        timeout_s=240,
    )
    group.init_model()
    servers = LLMServerManager.create(section, path, tokenizer, "sglang", "cpu", pool, 1, timeout_s=240)
    loops = AgentLoopManager(config, tokenizer, servers)
    checkpoints = CheckpointEngineManager(section.rollout.checkpoint_engine, group, servers)
    batch = gen_batch_of(prompts_of([3, 21, 9, 14]), n=4, temperature=TEMPERATURE)
    try:
        responses = []
        for step in range(6):  # as trained so far, then five updates
            assert checkpoints.update_weights(step) == step
            output, recomputed = _generate_and_compare(loops, group, batch)
            checkpoints.sleep_replicas()
            assert output.batch["weight_version_min"].unique().tolist() == [step]
            responses.append(output.batch["responses"].tolist())
            if step < 5:
                group.update_actor(_update_batch(output, recomputed, step))
        assert len({str(one) for one in responses}) == 6
        checkpoints.wake_replicas()
        _generate_and_compare(loops, group, batch)

        many = gen_batch_of(prompts_of([3, 21, 9, 14]), n=32, temperature=TEMPERATURE)
        handles = loops.submit(many)
        signal_while_it_generates(servers, handles, lambda: host_of(servers), signal.SIGKILL)
        output = loops.collate(list(loops.collect(handles)), many)
        assert output.batch["weight_version_max"].unique().tolist() == [5]
        assert servers.replicas[0].restarts == 1
        _generate_and_compare(loops, group, batch)
    finally:
        loops.shutdown()
        servers.shutdown()
        group.shutdown()


def test_weights_of_a_lora_actor_arrive_merged(model_dirs):
    path = model_dirs["llama"]
    lora = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=16")
    config = ppo_config(path, *OVERRIDES, *lora, load_format="dummy", name="sglang", max_num_seqs=16, n=4)
    section = config.actor_rollout_ref
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny-llama"))
    group = LocalWorkerGroup(
        None,
        RayClassWithInitArgs(
            cls=ActorRolloutRefWorker, config=section, role="actor_rollout", device_name="cpu", total_optimizer_steps=2
        ),
    )
    group.init_model()
    servers = LLMServerManager.create(section, path, tokenizer, "sglang", "cpu", None, 1, timeout_s=240)
    loops = AgentLoopManager(config, tokenizer, servers)
    checkpoints = CheckpointEngineManager(section.rollout.checkpoint_engine, group, servers)
    batch = gen_batch_of(prompts_of([3, 21, 9, 14]), n=4, temperature=TEMPERATURE)
    try:
        for step in range(2):
            checkpoints.update_weights(step)
            output, recomputed = _generate_and_compare(loops, group, batch)
            group.update_actor(_update_batch(output, recomputed, step))
    finally:
        loops.shutdown()
        servers.shutdown()
        group.shutdown()


def test_the_trainer_runs_on_it_with_the_actors_log_probs_and_versions_that_count_updates(tmp_path):
    overrides = [
        *TINY,
        *GRPO,
        "actor_rollout_ref.rollout.name=sglang",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "actor_rollout_ref.rollout.stop=[9]",  # as text, so that the engine has a tokenizer
        "trainer.total_training_steps=3",
        "trainer.test_freq=3",
        f"trainer.default_local_dir={tmp_path}",
    ]
    versions: list[list[int]] = []

    def note(stage: str, batch: DataProto, metrics: dict) -> None:
        if stage == "gen":
            versions.append(batch.batch["weight_version_min"].unique().tolist())
            for response, mask in zip(batch.batch["responses"], batch.batch["response_mask"].bool(), strict=True):
                text = trainer.tokenizer.decode(response[mask])
                assert "9" not in text[:-1]  # the stop string ends the response and stays in it

    trainer = RayPPOTrainer(load_config(overrides=overrides))
    try:
        trainer.init_workers()
        trainer.fit(on_stage=note)
    finally:
        trainer.close()
    assert versions == [[0], [1], [2]]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        assert line["training/rollout_probs_diff_max"] < 1e-3
        assert line["training/rollout_actor_probs_pearson_corr"] > 0.999
    assert any(name.startswith("val-core/") for name in lines[-1])


@pytest.mark.slow
def test_it_learns_as_the_embedded_engine_does(tmp_path):
    """The tiny model from scratch on both engines: the same task, the same length, the same level."""
    final = {}
    for engine in ("hf", "sglang"):
        overrides = [
            *TINY,
            *GRPO,
            f"actor_rollout_ref.rollout.name={engine}",
            "actor_rollout_ref.rollout.n=8",
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "actor_rollout_ref.actor.use_kl_loss=false",
            "actor_rollout_ref.actor.optim.lr=2e-3",
            "actor_rollout_ref.actor.optim.betas=[0.9,0.95]",
            "actor_rollout_ref.actor.optim.lr_warmup_steps=5",
            "trainer.total_training_steps=60",
            f"trainer.default_local_dir={tmp_path / engine}",
        ]
        trainer = RayPPOTrainer(load_config(overrides=overrides))
        try:
            trainer.init_workers()
            trainer.fit()
        finally:
            trainer.close()
        lines = [json.loads(line) for line in (tmp_path / engine / "metrics.jsonl").read_text().splitlines()]
        final[engine] = sum(line["critic/score/mean"] for line in lines[-5:]) / 5
    assert final["hf"] > 0.9
    assert final["sglang"] > 0.9
