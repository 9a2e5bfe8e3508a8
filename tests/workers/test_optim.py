from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppo_lib.config.training import OptimConfig
from ppo_lib.errors import ConfigError
from ppo_lib.workers.optim import LearningRate, build_optimizer, check_optimizer


def rates(steps: int, **settings: Any) -> list[float]:
    schedule = LearningRate(peak=2.0, **settings)
    return [schedule.at(step) for step in range(steps)]


def test_constant_after_a_warm_up_that_starts_at_zero() -> None:
    assert rates(6, warmup=4) == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]


def test_counting_from_one_skips_the_step_of_rate_zero() -> None:
    assert rates(5, warmup=4, zero_indexed=False) == [0.5, 1.0, 1.5, 2.0, 2.0]


def test_linear_falls_to_its_minimum_and_stays_there() -> None:
    assert rates(6, shape="linear", total=4, min_ratio=0.5) == [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]


def test_cosine_falls_from_peak_to_minimum() -> None:
    expected = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * s / 4)) / 2) for s in range(5)]
    assert rates(6, shape="cosine", total=4, min_ratio=0.1) == pytest.approx([*expected, 0.2])


def test_two_cycles_of_a_cosine_come_back_up() -> None:
    assert rates(5, shape="cosine", total=4, num_cycles=1.0) == pytest.approx([2, 1, 0, 1, 2])


def test_warm_up_is_a_number_of_steps_or_a_share_of_all() -> None:
    share = OptimConfig(lr=1.0, lr_warmup_steps_ratio=0.1)
    assert LearningRate.from_config(share, 200).warmup == 20
    assert LearningRate.from_config(OptimConfig(lr_warmup_steps=3, lr_warmup_steps_ratio=0.1), 200).warmup == 3
    assert LearningRate.from_config(OptimConfig(total_training_steps=50, lr_warmup_steps_ratio=0.1), 200).warmup == 5


def test_schedule_without_a_total_is_an_error() -> None:
    with pytest.raises(ConfigError, match="total_training_steps"):
        LearningRate.from_config(OptimConfig(lr_scheduler_type="cosine"), 0)


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(3))


def test_settings_reach_the_optimizer() -> None:
    optim = OptimConfig(lr=0.1, betas=(0.8, 0.9), weight_decay=0.3, override_optimizer_config={"eps": 1e-3})
    built = build_optimizer([parameter()], optim)
    assert type(built) is torch.optim.AdamW
    assert {k: built.defaults[k] for k in ("lr", "betas", "weight_decay", "eps", "fused")} == {
        "lr": 0.1,
        "betas": (0.8, 0.9),
        "weight_decay": 0.3,
        "eps": 1e-3,
        "fused": True,
    }


def test_another_optimizer_by_name_takes_what_it_knows() -> None:
    built = build_optimizer([parameter()], OptimConfig(optimizer="SGD", override_optimizer_config={"momentum": 0.5}))
    assert type(built) is torch.optim.SGD
    assert built.defaults["momentum"] == 0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "AdamWW"}, "optim.optimizer='AdamWW' is not in optim.optimizer_impl='torch.optim'"),
        ({"optimizer_impl": "no_such_module"}, "no_such_module"),
        ({"override_optimizer_config": {"momemtum": 1}}, "momemtum"),
        ({"optimizer": "LBFGS"}, "optimizer='LBFGS' evaluates the loss several times a step"),
    ],
)
def test_unknown_optimizers_and_arguments_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer([parameter()], SimpleNamespace(**{**OptimConfig().model_dump(), **settings}))


def test_an_optimizer_that_cannot_step_is_told_before_there_is_a_model() -> None:
    check_optimizer(OptimConfig())
    check_optimizer(OptimConfig(optimizer="SGD"))
    with pytest.raises(ConfigError, match=r"torch\.optim\.Muon: Muon only supports 2D"):
        check_optimizer(OptimConfig(optimizer="Muon"))
    with pytest.raises(
        ConfigError, match="optimizer='SparseAdam' cannot take a step: SparseAdam does not support dense"
    ):
        check_optimizer(OptimConfig(optimizer="SparseAdam"))
