"""What the ranks of a test run. They import this module and no test, which keeps their start short."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch.profiler import ProfilerActivity, profile
from workers_testing import new_actor, new_critic, padded_batch, shard, worker_batch

from ppo_lib.errors import ModelError
from ppo_lib.rollout.weights import buckets
from ppo_lib.workers import ActorRolloutRefWorker
from ppo_lib.workers.precision import Precision
from protocol import tensordict_utils as tu


def states(rank: int, world_size: int, cfg: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    actor, critic = new_actor(cfg, "actor"), new_critic(cfg)
    held = sum(p.to_local().numel() for p in actor.actor.engine.module.parameters())
    return actor.full_state_dict(), critic.full_state_dict(), held


def with_old(actor: Any, td: TensorDict, noise: float = 0.3) -> TensorDict:
    """Old log-probs some way from the present ones, so that ratios differ from 1 and some are clipped."""
    now = actor.compute_log_prob(td)["log_probs"]
    td["old_log_probs"] = now + noise * td["noise"]
    td["ref_log_prob"] = now - noise * td["noise"]
    return td


def train_both(
    rank: int, world_size: int, cfg: Any, steps: int = 2, rows: int = 8, mini_batches: int = 2
) -> dict[str, Any]:
    """Some steps of actor and critic on recorded rows; metrics of each step, and the final parameters."""
    actor, critic = new_actor(cfg), new_critic(cfg)
    history = []
    for step in range(steps):
        whole = worker_batch(padded_batch(rows, seed=step), mini_batches, calculate_entropy=True)
        td = shard(whole, rank, world_size)
        td["old_log_probs"] = actor.compute_log_prob(td)["log_probs"]
        td["ref_log_prob"] = actor.compute_ref_log_prob(td)["log_probs"]
        td["values"] = critic.compute_values(td)["values"]
        history.append(actor.update_actor(td) | critic.update_critic(td))
    return {"metrics": history, "actor": actor.full_state_dict(), "critic": critic.full_state_dict()}


def train_off_policy(rank: int, world_size: int, cfg: Any, steps: int = 2) -> dict[str, Any]:
    """Some steps of the actor against log-probs that are not its own; metrics of each, and the final parameters."""
    actor, history = new_actor(cfg, "actor"), []
    for step in range(steps):
        history.append(
            actor.update_actor(with_old(actor, shard(worker_batch(padded_batch(8, seed=step)), rank, world_size)))
        )
    return {"metrics": history, "actor": actor.full_state_dict()}


def collectives_of_an_update(rank: int, world_size: int, cfg: Any) -> dict[str, int]:
    """How often a rank gathers parameters and reduces gradients in an update of one mini-batch."""
    actor = new_actor(cfg, "actor")
    td = shard(worker_batch(padded_batch(8), mini_batches=1), rank, world_size)
    td = with_old_exact(actor, td)
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        actor.update_actor(td)
    events = {event.key: event.count for event in watched.key_averages()}
    return {"gathered": events["c10d::_allgather_base_"], "reduced": events["c10d::_reduce_scatter_base_"]}


def uneven(rank: int, world_size: int, cfg: Any) -> dict[str, Any]:
    """Mini-batch 0 lies on rank 0 alone, mini-batch 1 on rank 1 but for a row; one row carries no weight."""
    actor, critic = new_actor(cfg, "actor"), new_critic(cfg)
    batch = padded_batch(6)
    batch["response_mask"][2] = 0
    td = worker_batch(batch, mini_batches=2)
    td["mini_batch"] = torch.tensor([0, 0, 1, 1, 1, 1])
    tokens = batch["response_mask"].sum(1)
    tu.assign_non_tensor(
        td, mini_batch_num_tokens=[float(tokens[:2].sum()), float(tokens[2:].sum())], mini_batch_num_seqs=[2.0, 3.0]
    )
    td = shard(td, rank, world_size)
    td["values"] = critic.compute_values(td)["values"]
    metrics = actor.update_actor(with_old(actor, td)) | critic.update_critic(td)
    return {"metrics": [metrics], "actor": actor.full_state_dict(), "critic": critic.full_state_dict()}


def fails_to_load(rank: int, world_size: int, cfg: Any) -> str:
    try:
        new_actor(cfg, "actor")
    except ModelError as error:
        return str(error)
    return "no error"


class Collect:
    """A sender that keeps what it is given."""

    def send(self, rank: int, world_size: int, named_tensors: Any) -> None:
        self.place = rank, world_size
        self.tensors = [(name, tensor.clone()) for name, tensor in named_tensors]


def sent_weights(rank: int, world_size: int, cfg: Any) -> tuple[list[tuple[str, torch.Tensor]], list[Any]]:
    actor, sender = new_actor(cfg, "actor"), Collect()
    actor.send_weights(sender)
    assert sender.place == (rank, world_size)
    return sender.tensors, actor.weight_spec()


def train_and_save(rank: int, world_size: int, cfg: Any, folder: str) -> dict[str, Any]:
    """Two steps, a checkpoint of both models, and two steps more."""
    actor, critic = new_actor(cfg, "actor"), new_critic(cfg)
    steps(actor, critic, rank, world_size, (0, 1))
    actor.save_checkpoint(f"{folder}/actor", 2)
    critic.save_checkpoint(f"{folder}/critic", 2)
    metrics = steps(actor, critic, rank, world_size, (2, 3))
    return {"metrics": metrics, "actor": actor.full_state_dict(), "critic": critic.full_state_dict()}


def load_and_train(rank: int, world_size: int, cfg: Any, folder: str) -> dict[str, Any]:
    """The two steps more, from the checkpoint."""
    actor, critic = new_actor(cfg, "actor"), new_critic(cfg)
    assert actor.load_checkpoint(f"{folder}/actor") == critic.load_checkpoint(f"{folder}/critic") == 2
    metrics = steps(actor, critic, rank, world_size, (2, 3))
    return {"metrics": metrics, "actor": actor.full_state_dict(), "critic": critic.full_state_dict()}


def steps(actor: Any, critic: Any, rank: int, world_size: int, seeds: tuple[int, ...]) -> list[dict[str, float]]:
    metrics = []
    for seed in seeds:
        td = shard(worker_batch(padded_batch(8, seed=seed)), rank, world_size)
        td["values"] = critic.compute_values(td)["values"]
        metrics.append(actor.update_actor(with_old_exact(actor, td)) | critic.update_critic(td))
    return metrics


def with_old_exact(actor: Any, td: TensorDict) -> TensorDict:
    td["old_log_probs"] = actor.compute_log_prob(td)["log_probs"]
    return td


def train_in_mixed_precision(rank: int, world_size: int, cfg: Any) -> dict[str, Any]:
    """What CUDA does, in the layers of a CPU: FSDP gathers bfloat16 parameters and reduces fp32 gradients."""
    cuda = staticmethod(lambda dtype, device: Precision("cpu", param_dtype=torch.bfloat16))
    original, Precision.of = Precision.of, cuda
    try:
        return train_both(rank, world_size, cfg, mini_batches=1)
    finally:
        Precision.of = original


def train_on(rank: int, world_size: int, cfg: Any, device_name: str) -> dict[str, Any]:
    """Two steps of the actor on a device, and where its tensors lie afterwards."""
    actor = ActorRolloutRefWorker(cfg.actor_rollout_ref, "actor", device_name, total_optimizer_steps=10)
    actor.init_model()
    metrics = [actor.update_actor(with_old_exact(actor, worker_batch(padded_batch(8, seed=seed)))) for seed in (0, 1)]
    engine = actor.actor.engine
    moments = [value for state in engine.optimizer.state.values() for value in state.values() if value.dim() > 0]
    return {
        "metrics": metrics,
        "parameters": {tensor.device.type for tensor in engine.module.parameters()},
        "moments": {tensor.device.type for tensor in moments},
    }


class Drop:
    """A sender that packs buckets as the real one does, and lets go of each before the next is made."""

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes, self.sent = bucket_bytes, 0

    def send(self, rank: int, world_size: int, named_tensors: Any) -> None:
        for bucket in buckets(iter(named_tensors), self.bucket_bytes):
            self.sent += bucket.data.nbytes


def memory_of_sending(rank: int, world_size: int, cfg: Any, bucket_bytes: int) -> tuple[int, int]:
    """(bytes sent, how far the process's memory rose above what it held before), once warmed up."""
    actor = new_actor(cfg, "actor")
    actor.send_weights(Drop(bucket_bytes))
    sender = Drop(bucket_bytes)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from what is held now
    before = _memory("VmHWM")
    actor.send_weights(sender)
    return sender.sent, _memory("VmHWM") - before


def _memory(kind: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) * 1024
