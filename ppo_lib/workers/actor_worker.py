"""The policy on one rank: its log-probabilities, its update, its weights on their way to the rollout replicas."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from ppo_lib.config.needs import uses_lora
from ppo_lib.errors import ConfigError
from ppo_lib.models.dtypes import computed_dtype
from ppo_lib.single_controller import Dispatch, Worker, register
from ppo_lib.workers.checkpoint import load_checkpoint, save_checkpoint
from ppo_lib.workers.distributed import build_mesh, ensure_process_group
from ppo_lib.workers.draws import token_draws
from ppo_lib.workers.fsdp_engine import FSDPEngine
from ppo_lib.workers.loading import build_engine, load_policy
from ppo_lib.workers.lora import adapter_off, is_adapter
from ppo_lib.workers.losses import draws_tokens, observe_correction, of_mini_batch, policy_loss
from ppo_lib.workers.metrics import StepMetrics, gpu_memory_metrics
from ppo_lib.workers.packing import JaggedRows, MicroBatching, PackedRows
from ppo_lib.workers.training_worker import Forward, TrainingWorker
from protocol import tensordict_utils as tu

__all__ = ["ActorRolloutRefWorker"]

_ACTOR_ROLES = ("actor", "actor_rollout", "actor_rollout_ref")
_REF_ROLES = ("ref", "actor_rollout_ref")


class ActorRolloutRefWorker(Worker):
    """The policy, or its frozen reference, or both, as the role says.

    Args:
        config: section `actor_rollout_ref`.
        role: "actor", "actor_rollout", "ref" or "actor_rollout_ref".
        device_name: "cpu" or "cuda".
        total_optimizer_steps: of the whole run, for learning-rate schedules.
        rollout_correction: section `algorithm.rollout_correction`, which in bypass mode chooses the loss and is applied
            in the update; None is none.
    """

    def __init__(
        self,
        config: Any,
        role: str,
        device_name: str = "cpu",
        total_optimizer_steps: int = 0,
        rollout_correction: Any = None,
    ) -> None:
        if role not in (*_ACTOR_ROLES, *_REF_ROLES):
            raise ConfigError(f"unknown role {role!r}; use one of {', '.join({*_ACTOR_ROLES, *_REF_ROLES})}")
        self.config, self.role, self.device_name = config, role, device_name
        self.total_optimizer_steps, self.rollout_correction = total_optimizer_steps, rollout_correction

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load and shard the models of this role."""
        device = ensure_process_group(self.device_name, self.config.nccl_timeout)
        if self.role in _ACTOR_ROLES:
            fsdp = self.config.actor.fsdp_config
            self.actor = self._build(fsdp, device, self.config.actor.optim)
            self._loss_fn = policy_loss(self.config.actor, self.rollout_correction)
            self._of_mini_batch = of_mini_batch(self.config.actor, self.rollout_correction)
        if self.role in _ACTOR_ROLES and self.role in _REF_ROLES and uses_lora(self.config.model):
            self.ref = self.actor  # without its adapter the policy is the reference: no second model
        elif self.role in _REF_ROLES:
            self.ref = self._build(self.config.ref.fsdp_config, device, None)

    def _build(self, fsdp: Any, device: torch.device, optim: Any) -> TrainingWorker:
        engine = build_engine(
            load_policy,
            self.config.model,
            fsdp,
            device=device,
            mesh=build_mesh(device, fsdp.fsdp_size),
            optim=optim,
            total_optimizer_steps=self.total_optimizer_steps,
        )
        return TrainingWorker(engine)

    # ------------------------------------------------------------------------------------------------- log-probs

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        """`log_probs` (B, r_i) float32 of the responses under the policy.

        With `calculate_entropy` there are `entropys` too, with `calculate_sum_pi_squared` `sum_pi_squared`.
        """
        asked = (bool(tu.get(data, f"calculate_{name}")) for name in ("entropy", "sum_pi_squared"))
        forward = _forward(data, *asked)
        return self.actor.infer_batch(data, forward, self._log_prob_size(self.config.rollout))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict:
        """`log_probs` (B, r_i) float32 of the responses under the reference."""
        with adapter_off(self.ref.engine.module):
            return self.ref.infer_batch(data, _forward(data, with_entropy=False), self._log_prob_size(self.config.ref))

    @staticmethod
    def _log_prob_size(section: Any) -> MicroBatching:
        return MicroBatching.from_sizes(
            dynamic=section.log_prob_use_dynamic_bsz,
            rows=section.log_prob_micro_batch_size_per_gpu,
            max_tokens=section.log_prob_max_token_len_per_gpu,
        )

    # ---------------------------------------------------------------------------------------------------- update

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update_actor(self, data: TensorDict) -> dict[str, float]:
        """Take the optimizer steps of one batch; metrics under `actor/`, and in bypass mode `rollout_corr/`.

        Columns besides those of `TrainingWorker.train`: `advantages`, and optionally `old_log_probs`, `ref_log_prob`,
        `rollout_is_weights`. The entropy is measured where the loss needs it, the config or the batch's
        `calculate_entropy` asks for it, or there are no `old_log_probs`, so that this is the only pass over the rows.
        """
        config, corrected = self.config.actor, StepMetrics()
        if draws_tokens(config, self.rollout_correction):
            rows = JaggedRows(data)
            drawn = token_draws(rows, tu.get(data, "global_steps", 0))
            data = data.copy().set("draws", rows.as_jagged(drawn))
        optional = [name for name in ("old_log_probs", "rollout_is_weights", "draws") if name in data.keys()]  # noqa: SIM118
        metrics = self.actor.train(
            data,
            _forward(
                data,
                bool(config.entropy_coeff)
                or config.calculate_entropy
                or tu.get(data, "calculate_entropy", "old_log_probs" not in optional),
            ),
            self._loss_fn,
            ["advantages", *optional, *(["ref_log_prob"] if config.use_kl_loss else [])],
            MicroBatching.from_sizes(
                dynamic=config.use_dynamic_bsz,
                rows=config.ppo_micro_batch_size_per_gpu,
                max_tokens=config.ppo_max_token_len_per_gpu,
            ),
            horizon=config.loss_scale_factor or self.config.rollout.response_length,
            of_mini_batch=self._of_mini_batch,
            observe=observe_correction(config, self.rollout_correction, corrected),
            epochs=config.ppo_epochs,
            shuffle_seed=shuffle_seed(config, data),
        )
        if config.use_kl_loss:
            metrics.add("last", {"kl_coef": config.kl_loss_coef})
        return metrics.reduce("actor") | corrected.reduce() | gpu_memory_metrics(self.actor.engine.device)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def performance(self) -> dict[str, dict[str, float]]:
        """What this rank's passes did since the last call, see `Meter.report`: `actor`, `actor_infer`, `ref`."""
        report: dict[str, dict[str, float]] = {}
        for worker, names in (("actor", {"train": "actor", "infer": "actor_infer"}), ("ref", {"infer": "ref"})):
            if hasattr(self, worker):
                done = getattr(self, worker).meter.report()
                report |= {names[kind]: work for kind, work in done.items() if kind in names}
        return report

    # ------------------------------------------------------------------------------------- weights and checkpoints

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def send_weights(self, sender: Any) -> None:
        """Give `sender.send(rank, world_size, named_tensors)` this model's tensors, whole, in the rollout's type.

        Tensors are gathered one by one on all ranks together, so every rank must take all of them. They may share
        memory with the parameters: a receiver copies.
        """
        sender.send(self.rank, self.world_size, self._rollout_tensors())

    def _rollout_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        engine = self.actor.engine
        return engine.named_full_tensors(computed_dtype(self.config.rollout.dtype, engine.device))

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def weight_spec(self) -> list[tuple[str, tuple[int, ...], str]]:
        """(name, shape, dtype) of every tensor that `send_weights` hands over, in order."""
        engine = self.actor.engine
        dtype = computed_dtype(self.config.rollout.dtype, engine.device)
        tensors = [*engine.named_parameters(), *engine.named_persistent_buffers()]
        tensors = [(name, tensor) for name, tensor in tensors if not is_adapter(name)]
        return [
            (name, tuple(t.shape), str(dtype if t.is_floating_point() else t.dtype).removeprefix("torch."))
            for name, t in tensors
        ]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, global_step: int) -> None:
        """Write what `actor.checkpoint.save_contents` names into a folder."""
        contents = self.config.actor.checkpoint.save_contents
        save_checkpoint(self.actor.engine, Path(path), contents, global_step)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> int:
        """Read what `actor.checkpoint.load_contents` names; returns the global step at which it was saved."""
        return load_checkpoint(self.actor.engine, Path(path), self.config.actor.checkpoint.load_contents)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_fingerprint(self) -> dict[str, int]:
        """A checksum of every tensor's bytes, to compare models across ranks, groups and runs."""
        return fingerprint(self.actor.engine)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Every tensor, whole, on every rank: for small models and comparisons."""
        return {name: tensor.cpu().clone() for name, tensor in self.actor.engine.named_full_tensors()}


def fingerprint(engine: FSDPEngine) -> dict[str, int]:
    """CRC-32 of the bytes of every whole tensor; a collective."""
    return {
        name: zlib.crc32(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        for name, tensor in engine.named_full_tensors()
    }


def shuffle_seed(config: Any, data: TensorDict) -> int | None:
    """The seed of the order of mini-batches: another one each step, the same on all ranks; None leaves the order."""
    return config.data_loader_seed + tu.get(data, "global_steps", 0) if config.shuffle else None


def _forward(data: TensorDict, with_entropy: bool, with_sum_pi_squared: bool = False) -> Forward:
    temperature = float(tu.get(data, "temperature", 1.0))

    def forward(module: nn.Module, rows: PackedRows) -> dict[str, torch.Tensor]:
        return module(rows, temperature, with_entropy, with_sum_pi_squared)

    return forward
