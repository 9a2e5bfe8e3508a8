from __future__ import annotations

import logging

import pytest
import torch

from ppo_lib.errors import ConfigError
from ppo_lib.models import dtypes
from ppo_lib.models.dtypes import computed_dtype, parse_dtype
from ppo_lib.workers.precision import Precision

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def cpu_with(monkeypatch: pytest.MonkeyPatch):
    def install(**capabilities: bool) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
        dtypes._say_float32.cache_clear()

    return install


@pytest.mark.parametrize("instruction", ["avx512_bf16", "amx_bf16"])
def test_bfloat16_is_autocast_on_a_cpu_that_computes_it(instruction: str, cpu_with) -> None:
    cpu_with(**{instruction: True})
    mixed = Precision.of("bfloat16", CPU)
    assert mixed.autocast_dtype == torch.bfloat16
    with mixed.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert computed_dtype("bfloat16", CPU) == torch.bfloat16


def test_bfloat16_is_fp32_with_one_warning_on_other_cpus(cpu_with, caplog: pytest.LogCaptureFixture) -> None:
    cpu_with(avx512_bf16=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            plain = Precision.of("bfloat16", CPU)
    assert plain == Precision("cpu")
    with plain.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert [record.message for record in caplog.records] == [
        "this CPU has no bfloat16 arithmetic (AVX512-bf16 or AMX): dtype bfloat16 is computed in float32"
    ]
    assert computed_dtype("bfloat16", CPU) == torch.float32


def test_fp32_says_nothing(cpu_with, caplog: pytest.LogCaptureFixture) -> None:
    cpu_with()
    assert Precision.of("float32", CPU).autocast_dtype is None
    assert not caplog.records


def test_cuda_takes_its_type_as_fsdp_policy() -> None:
    assert Precision.of("bf16", CUDA) == Precision("cuda", param_dtype=torch.bfloat16)


def test_unknown_type_is_an_error() -> None:
    with pytest.raises(ConfigError, match="float16"):
        parse_dtype("float16")
