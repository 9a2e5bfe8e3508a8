"""The optimizer a section describes, and its learning rate as a pure function of the optimizer step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from ppo_lib.errors import ConfigError

__all__ = ["LearningRate", "build_optimizer", "check_optimizer"]


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up from 0, then constant, or falling to `min_lr_ratio` of the peak along a line or a cosine.

    With s the step (counted from 0, or from 1 where `zero_indexed` is false), W the warm-up, T the total and
    u = (s - W) / (T - W) in [0, 1]:

        s < W       peak s / W
        constant    peak
        linear      peak (1 - (1 - min) u)
        cosine      peak (min + (1 - min) (1 + cos(2 pi num_cycles u)) / 2)
    """

    peak: float
    shape: str = "constant"
    warmup: int = 0
    total: int = 0
    min_ratio: float = 0.0
    num_cycles: float = 0.5
    zero_indexed: bool = True

    @classmethod
    def from_config(cls, optim: Any, total_optimizer_steps: int) -> LearningRate:
        """Read an `optim` section; the run's number of optimizer steps counts where the section names none.

        Raises:
            ConfigError: the schedule depends on a total that nobody gave.
        """
        total = optim.total_training_steps if optim.total_training_steps > 0 else total_optimizer_steps
        by_ratio = optim.lr_warmup_steps < 0
        depends = optim.lr_scheduler_type != "constant" or (by_ratio and optim.lr_warmup_steps_ratio > 0)
        if depends and total <= 0:
            raise ConfigError(
                f"lr_scheduler_type={optim.lr_scheduler_type} with lr_warmup_steps_ratio={optim.lr_warmup_steps_ratio} "
                "needs the number of optimizer steps of the run; set optim.total_training_steps"
            )
        return cls(
            peak=optim.lr,
            shape=optim.lr_scheduler_type,
            warmup=int(optim.lr_warmup_steps_ratio * total if by_ratio else optim.lr_warmup_steps),
            total=total,
            min_ratio=optim.min_lr_ratio,
            num_cycles=optim.num_cycles,
            zero_indexed=optim.zero_indexed_step,
        )

    def at(self, step: int) -> float:
        """The learning rate of the optimizer step with this number; the first is 0."""
        step = step if self.zero_indexed else step + 1
        if step < self.warmup:
            return self.peak * step / self.warmup
        if self.shape == "constant":
            return self.peak
        done = min(1.0, (step - self.warmup) / max(1, self.total - self.warmup))
        height = 1 - done if self.shape == "linear" else (1 + math.cos(2 * math.pi * self.num_cycles * done)) / 2
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * height)


def build_optimizer(parameters: Iterable[torch.nn.Parameter], optim: Any) -> torch.optim.Optimizer:
    """The class `optim.optimizer` of the module `optim.optimizer_impl`, with the section's settings.

    Adam and AdamW of torch run fused (one pass over the memory) unless `override_optimizer_config` decides otherwise.

    Raises:
        ConfigError: there is no such class, it needs more than a gradient, or it does not take these arguments.
    """
    try:
        cls = getattr(import_module(optim.optimizer_impl), optim.optimizer)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"optim.optimizer={optim.optimizer!r} is not in optim.optimizer_impl={optim.optimizer_impl!r}: {error}"
        ) from error
    arguments: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay, "betas": tuple(optim.betas)}
    known = inspect.signature(cls).parameters
    arguments = {name: value for name, value in arguments.items() if name in known}
    if cls in (torch.optim.Adam, torch.optim.AdamW):
        arguments["fused"] = True
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optim.optimizer={optim.optimizer!r} evaluates the loss several times a step (its step needs a closure), "
            f"and here a gradient is accumulated once; use AdamW or another first-order optimizer"
        )
    override = dict(optim.override_optimizer_config or {})
    if "foreach" in override:
        arguments.pop("fused", None)
    try:
        return cls(parameters, **(arguments | override))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{optim.optimizer_impl}.{optim.optimizer}: {error}; see optim.override_optimizer_config"
        ) from error


def check_optimizer(optim: Any) -> None:
    """Build the optimizer of a section and, where it is torch's own, let it take one step on a small matrix and vector.

    Raises:
        ConfigError: as `build_optimizer`, and where the step fails.
    """
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 2), (2,))]
    optimizer = build_optimizer(parameters, optim)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    if optim.optimizer_impl.partition(".")[0] != "torch":
        return  # it may need a GPU
    try:
        optimizer.step()
    except Exception as error:
        raise ConfigError(f"optim.optimizer={optim.optimizer!r} cannot take a step: {error}") from error
