"""The critic on one rank: values of states, and their regression to returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from ppo_lib.single_controller import Dispatch, Worker, register
from ppo_lib.workers.actor_worker import fingerprint, shuffle_seed
from ppo_lib.workers.checkpoint import load_checkpoint, save_checkpoint
from ppo_lib.workers.distributed import build_mesh, ensure_process_group
from ppo_lib.workers.loading import build_engine, load_value_model
from ppo_lib.workers.losses import value_loss
from ppo_lib.workers.metrics import gpu_memory_metrics
from ppo_lib.workers.packing import MicroBatching, PackedRows
from ppo_lib.workers.training_worker import TrainingWorker
from protocol import tensordict_utils as tu

__all__ = ["CriticWorker"]


class CriticWorker(Worker):
    """A value model over the same rows as the policy.

    Args:
        config: section `critic`.
        role: names it in messages.
        device_name: "cpu" or "cuda".
        total_optimizer_steps: of the whole run, for learning-rate schedules.
        timeout_s: limit of one collective, where this worker is the first of its process to need the group.
    """

    def __init__(
        self,
        config: Any,
        role: str = "critic",
        device_name: str = "cpu",
        total_optimizer_steps: int = 0,
        timeout_s: float = 600.0,
    ) -> None:
        self.config, self.role, self.device_name = config, role, device_name
        self.total_optimizer_steps, self.timeout_s = total_optimizer_steps, timeout_s

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load and shard the model; a head that its files do not hold is drawn from `fsdp.seed`."""
        device = ensure_process_group(self.device_name, self.timeout_s)
        engine = build_engine(
            load_value_model,
            self.config.model,
            self.config.fsdp,
            device=device,
            mesh=build_mesh(device, self.config.fsdp.fsdp_size),
            optim=self.config.optim,
            total_optimizer_steps=self.total_optimizer_steps,
        )
        self.critic = TrainingWorker(engine)
        self._loss_fn = value_loss(self.config)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_values(self, data: TensorDict) -> TensorDict:
        """`values` (B, r_i) float32 of the states in which the response's tokens were chosen."""
        size = MicroBatching.from_sizes(
            dynamic=self.config.use_dynamic_bsz,
            rows=self.config.forward_micro_batch_size_per_gpu,
            max_tokens=self.config.forward_max_token_len_per_gpu,
        )
        return self.critic.infer_batch(data, _forward, size)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_critic(self, data: TensorDict) -> dict[str, float]:
        """Take the optimizer steps of one batch; metrics under `critic/`. Columns: `values`, `returns`."""
        config = self.config
        metrics = self.critic.train(
            data,
            _forward,
            self._loss_fn,
            ["values", "returns"],
            MicroBatching.from_sizes(
                dynamic=config.use_dynamic_bsz,
                rows=config.ppo_micro_batch_size_per_gpu,
                max_tokens=config.ppo_max_token_len_per_gpu,
            ),
            horizon=config.loss_scale_factor or tu.get(data, "max_response_len"),
            epochs=config.ppo_epochs,
            shuffle_seed=shuffle_seed(config, data),
        )
        return metrics.reduce("critic") | gpu_memory_metrics(self.critic.engine.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def performance(self) -> dict[str, dict[str, float]]:
        """What this rank's passes did since the last call, see `Meter.report`: `critic`, `critic_infer`."""
        names = {"train": "critic", "infer": "critic_infer"}
        return {names[kind]: work for kind, work in self.critic.meter.report().items()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, global_step: int) -> None:
        """Write what `critic.checkpoint.save_contents` names into a folder."""
        contents = self.config.checkpoint.save_contents
        save_checkpoint(self.critic.engine, Path(path), contents, global_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> int:
        """Read what `critic.checkpoint.load_contents` names; returns the global step at which it was saved."""
        return load_checkpoint(self.critic.engine, Path(path), self.config.checkpoint.load_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_fingerprint(self) -> dict[str, int]:
        """A checksum of every tensor's bytes, to compare models across ranks, groups and runs."""
        return fingerprint(self.critic.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Every tensor, whole, on every rank: for small models and comparisons."""
        return {name: tensor.cpu().clone() for name, tensor in self.critic.engine.named_full_tensors()}


def _forward(module: nn.Module, rows: PackedRows) -> dict[str, torch.Tensor]:
    return module(rows)
