"""The replica beside the real training worker, both in this process."""

from __future__ import annotations

import pytest
import torch
from rollout_testing import gen_batch_of, ppo_config, prompts_of

from ppo_lib.models import load_tokenizer, resolve_model_path
from ppo_lib.rollout import AgentLoopManager, CheckpointEngineManager, LLMServerManager
from ppo_lib.single_controller import LocalWorkerGroup, RayClassWithInitArgs
from ppo_lib.workers import ActorRolloutRefWorker
from protocol import DataProto, left_right_2_no_padding, no_padding_2_padding
from protocol import tensordict_utils as tu

TEMPERATURE = 0.8


@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "qwen3"])
def test_log_probs_of_the_engine_are_those_of_the_actor_before_and_after_an_update(family, model_dirs):
    path = model_dirs[family]
    config = ppo_config(
        path,
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.actor.use_kl_loss=false",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        load_format="dummy",
        n=4,
    )
    section = config.actor_rollout_ref
    tokenizer = load_tokenizer(resolve_model_path("builtin:tiny-llama"))
    spec = RayClassWithInitArgs(
        cls=ActorRolloutRefWorker, config=section, role="actor_rollout", device_name="cpu", total_optimizer_steps=2
    )
    group = LocalWorkerGroup(None, spec)
    group.init_model()
    servers = LLMServerManager.create(section, path, tokenizer, "hf", "cpu", None, num_replicas=1, timeout_s=60)
    loops = AgentLoopManager(config, tokenizer, servers)
    checkpoints = CheckpointEngineManager(section.rollout.checkpoint_engine, group, servers)
    try:
        seen = []
        for step in range(2):
            assert checkpoints.update_weights(step) == step
            output = loops.generate_sequences(gen_batch_of(prompts_of([3, 21, 9, 14]), n=4, temperature=TEMPERATURE))
            checkpoints.sleep_replicas()
            mask = output.batch["response_mask"].bool()
            recomputed = no_padding_2_padding(group.compute_log_prob(_worker_batch(output))["log_probs"], mask.shape[1])
            torch.testing.assert_close(output.batch["rollout_log_probs"][mask], recomputed[mask], atol=1e-4, rtol=0)
            assert output.batch["weight_version_min"].unique().tolist() == [step]
            seen.append(output.batch["responses"])
            group.update_actor(_update_batch(output, recomputed))
        assert not torch.equal(*seen)
    finally:
        loops.shutdown()
        servers.shutdown()
        group.shutdown()


def _worker_batch(output: DataProto, **columns: torch.Tensor):
    keys = ["input_ids", "attention_mask", "position_ids", "responses", "response_mask"]
    td = output.select(batch_keys=keys, non_tensor_batch_keys=[], meta_info_keys=[]).to_tensordict()
    for name, column in columns.items():
        td[name] = column
    td = left_right_2_no_padding(td)
    tu.assign_non_tensor(td, temperature=TEMPERATURE, global_steps=1, calculate_entropy=False)
    return td


def _update_batch(output: DataProto, old_log_probs: torch.Tensor):
    mask = output.batch["response_mask"]
    advantages = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    td = _worker_batch(output, old_log_probs=old_log_probs, advantages=advantages)
    td["mini_batch"] = torch.zeros(len(output), dtype=torch.int64)
    tu.assign_non_tensor(td, mini_batch_num_tokens=[float(mask.sum())], mini_batch_num_seqs=[float(mask.any(1).sum())])
    return td
