"""One model sharded over the ranks with FSDP2: forward passes, accumulated gradients, optimizer steps, full tensors.

Gradients are summed over ranks, not averaged: the driver sends denominators that count all ranks, so each rank's loss
is already its contribution to the whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ppo_lib.workers.lora import adapted_layers, file_name, is_adapter, merge
from ppo_lib.workers.optim import LearningRate, build_optimizer
from ppo_lib.workers.precision import Precision

__all__ = ["FSDPEngine", "StepReport", "full_tensor", "local_tensor", "shard_module"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did; `skipped` where the gradient was not finite."""

    grad_norm: float
    lr: float
    skipped: bool


def shard_module(
    module: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, config: Any, precision: Precision
) -> None:
    """Shard in place: every block (decoder layer) by itself, the rest with the root; a small model as one unit.

    Gathering a small layer costs less than meeting for it, so a small model is better gathered at once.

    One rank goes the same way, so that what is learned on one holds on many. It has nothing to gather from others, so
    its parameters stay gathered between forward and backward: one copy of the model less to make.

    Args:
        module: the root; its forward must touch every parameter that it uses.
        blocks: submodules gathered one at a time.
        mesh: of `build_mesh`.
        config: an `fsdp_config` section.
        precision: what the arithmetic runs in.
    """
    if sum(p.numel() for p in module.parameters()) < config.wrap_policy.min_num_params:
        blocks = []
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=precision.param_dtype, reduce_dtype=torch.float32)
        if precision.param_dtype is not None
        else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy()
        if config.offload_policy and precision.device_type != "cpu"
        else OffloadPolicy(),
    }
    for block in blocks:
        fully_shard(block, reshard_after_forward=config.reshard_after_forward and mesh.size() > 1, **options)
    fully_shard(module, reshard_after_forward=False, **options)  # it is the last in forward and the first in backward
    if mesh.size() > 1:
        for unit in _units(module):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # the other way to a factor of 1 is one gloo does not know
    if config.forward_prefetch:
        for block, following in pairwise(blocks):
            cast(FSDPModule, block).set_modules_to_forward_prefetch([cast(FSDPModule, following)])


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor; a collective. On one rank it may share the tensor's memory."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _units(module: nn.Module) -> list[FSDPModule]:
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


class FSDPEngine:
    """Owns a module and, where it is trained, its optimizer.

    Args:
        module: after `shard_module`.
        config: an `fsdp_config` section.
        device: where it computes.
        mesh: over which it is sharded.
        precision: what the arithmetic runs in.
        optim: an `optim` section; None for a frozen model.
        total_optimizer_steps: of the whole run, for the schedule.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        config: Any,
        device: torch.device,
        mesh: DeviceMesh,
        precision: Precision,
        optim: Any = None,
        total_optimizer_steps: int = 0,
    ) -> None:
        self.module, self.config, self.device, self.mesh, self.precision = module, config, device, mesh, precision
        # With mixed precision FSDP2 keeps the gradients in a type and a place of its own.
        self._alone = mesh.size() == 1 and precision.param_dtype is None
        self._one_unit = len(_units(module)) == 1
        self.adapted = {f"{name}.weight": layer for name, layer in adapted_layers(cast(Any, module).model).items()}
        """Name in the model's files -> layer whose weight a LoRA adapter changes; empty without one."""
        self.optimizer: torch.optim.Optimizer | None = None
        self.optimizer_steps = 0
        """Optimizer steps attempted so far; the schedule's clock."""
        if optim is None:
            module.requires_grad_(False)
        else:
            self.learning_rate = LearningRate.from_config(optim, total_optimizer_steps)
            self.max_grad_norm = optim.clip_grad or math.inf
            self.optimizer = build_optimizer([p for p in module.parameters() if p.requires_grad], optim)
        self._offload_params = self._on_cuda_only("param_offload")
        self._offload_optimizer = self._on_cuda_only("optimizer_offload")
        self._on_cuda_only("offload_policy")
        if self._offload_params:
            self._move_params("cpu")

    def _on_cuda_only(self, key: str) -> bool:
        wanted = bool(getattr(self.config, key, False))
        if wanted and self.device.type == "cpu" and dist.get_rank() == 0:
            logger.warning("%s changes nothing on a CPU: the memory it would free is the one it would move to", key)
        return wanted and self.device.type != "cpu"

    # ---------------------------------------------------------------------------------------------- computing

    @contextmanager
    def inference(self) -> Iterator[nn.Module]:
        """The module, ready for forward passes without gradient."""
        with self.resident():
            self.module.eval()
            try:
                with torch.no_grad(), self.precision.autocast():
                    yield self.module
            finally:
                # Without a backward pass nothing else frees the gathered root, and a saved optimizer state would
                # then be looked up under the wrong parameters.
                for unit in _units(self.module):
                    unit.reshard()

    @contextmanager
    def training(self) -> Iterator[nn.Module]:
        """The module, ready for forward and backward passes and `step`."""
        with self.resident(optimizer=True):
            self.module.train()
            yield self.module

    def backward(self, loss: torch.Tensor, last: bool) -> None:
        """Add this micro-batch's gradient; `last` is the mini-batch's last, after which `step` is called."""
        self._announce_backward(cast(FSDPModule, self.module), last)
        loss.backward()

    def _announce_backward(self, root: FSDPModule, last: bool) -> None:
        """Gather parameters and reduce gradients once a mini-batch instead of once a micro-batch, where that is wanted.

        It costs the memory of whole parameters and gradients, which one rank holds in any case, and in every backward
        a rank whose model is one unit.
        """
        root.set_is_last_backward(last)
        if self._alone:
            root.set_requires_gradient_sync(False)  # see _adopt_gradients
            root.set_reshard_after_backward(False)
            return
        if self._one_unit or self.config.use_no_sync_for_gradient_accumulation:
            root.set_requires_gradient_sync(last)
        if self._one_unit or not self.config.reshard_after_forward:
            root.set_reshard_after_backward(last)

    def _adopt_gradients(self) -> None:
        """On one rank the gradients of the gathered parameters are the sums already; hand them over as they are.

        Reducing them would copy each three times: a quarter of an update of a 135M model on a CPU.
        """
        gathered = dict(self.module.named_parameters())
        gradients = {name: parameter.grad for name, parameter in gathered.items()}
        for parameter in gathered.values():
            parameter.grad = None
        for unit in _units(self.module):
            unit.reshard()
        for name, parameter in self.module.named_parameters():
            gradient = gradients.pop(name)
            if gradient is not None and isinstance(parameter, DTensor):
                parameter.grad = DTensor.from_local(gradient, parameter.device_mesh, parameter.placements)

    def step(self, apply: bool = True) -> StepReport:
        """Clip the accumulated gradient, step the optimizer, clear the gradient.

        Without `apply` only the clock advances and the gradient is cleared: Adam would move on its moments and its
        weight decay alone.

        A gradient that is not finite would destroy the parameters and the optimizer's moments: the step is left out.
        The schedule's clock advances all the same, so that the learning rate depends on the step alone.
        """
        optimizer = self._trained_by()
        lr = self.learning_rate.at(self.optimizer_steps)
        if self._alone:
            self._adopt_gradients()
        gradients = [local_tensor(p.grad) for p in self.module.parameters() if p.grad is not None]
        norm = self._norm(gradients)
        finite = math.isfinite(norm)
        if finite and apply:
            if norm > self.max_grad_norm:
                torch._foreach_mul_(gradients, self.max_grad_norm / (norm + 1e-6))
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        return StepReport(norm, lr, skipped=not finite)

    def _trained_by(self) -> torch.optim.Optimizer:
        if self.optimizer is None:
            raise RuntimeError("a frozen model has no optimizer")
        return self.optimizer

    def _norm(self, gradients: list[torch.Tensor]) -> float:
        """The norm over all ranks. Replicas hold equal gradients, so the sum runs over one shard group."""
        squares = torch.nn.utils.get_total_norm(gradients).double().square().to(self.device)
        if self.mesh.size() > 1:
            dist.all_reduce(squares, group=self.mesh.get_group("shard"))
        return squares.sqrt().item()

    # ------------------------------------------------------------------------------------------------- memory

    @contextmanager
    def resident(self, optimizer: bool = False) -> Iterator[None]:
        """Bring offloaded parameters (and optimizer states) to the device for as long as the context lasts."""
        if self._offload_params:
            self._move_params(self.device)
        if self._offload_optimizer and optimizer:
            self._move_optimizer(self.device)
        try:
            yield
        finally:
            if self._offload_params:
                self._move_params("cpu")
            if self._offload_optimizer and optimizer:
                self._move_optimizer("cpu")

    def _move_params(self, device: torch.device | str) -> None:
        self.module.to(device)
        torch.cuda.empty_cache()

    def _move_optimizer(self, device: torch.device | str) -> None:
        for state in self._trained_by().state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:
                    state[name] = value.to(device)
        torch.cuda.empty_cache()

    # --------------------------------------------------------------------------------------------- parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Sharded parameters under the names that the model's own files use; tied ones once.

        Those of an adapter are among them, see `lora.is_adapter`.
        """
        for name, parameter in self.module.named_parameters():
            yield file_name(name.removeprefix("model.")), parameter

    def named_persistent_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers that belong to the model's files; most families have none."""
        held = self.module.state_dict(keep_vars=True)
        for name, buffer in self.module.named_buffers():
            if name in held:
                yield name.removeprefix("model."), buffer

    def whole(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of the tensor with this name, an adapter merged into it; a collective."""
        whole = full_tensor(tensor.detach())
        if name not in self.adapted:
            return whole
        layer = self.adapted[name]
        (adapter,) = layer.scaling
        a, b = (full_tensor(part[adapter].weight.detach()) for part in (layer.lora_A, layer.lora_B))
        return merge(whole, a, b, layer.scaling[adapter])

    def named_full_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the model's files, whole, one at a time; a collective on each step.

        An adapter is merged into the weights as they pass, so that no copy of the model comes into being.

        Args:
            dtype: cast floating-point tensors to it; None leaves them in the stored type.

        Yields:
            (name, tensor). On one rank a tensor may share memory with the parameter: copy what is to be kept.
        """
        with self.resident(), torch.no_grad():
            for name, parameter in self.named_parameters():
                if not is_adapter(name):
                    yield name, _cast(self.whole(name, parameter), dtype)
            for name, buffer in self.named_persistent_buffers():
                yield name, _cast(buffer.detach(), dtype)


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
