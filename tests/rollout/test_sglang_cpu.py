"""The stand-ins that let SGLang be imported on a CPU; they do not need SGLang itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from ppo_lib.sglang_cpu import CpuStandIns


def test_importing_the_module_costs_nothing_and_registers_one_finder():
    code = (
        "import sys, ppo_lib.sglang_cpu, importlib; importlib.reload(ppo_lib.sglang_cpu);"
        "print('torch' in sys.modules, sum(type(f).__name__ == 'CpuStandIns' for f in sys.meta_path))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "1"]


def test_kernels_can_be_imported_by_name_and_not_called():
    spec = CpuStandIns().find_spec("sgl_kernel")
    kernels = importlib.util.module_from_spec(spec)
    assert callable(kernels.silu_and_mul)
    with pytest.raises(RuntimeError, match=r"sgl_kernel.silu_and_mul is a compiled kernel of SGLang"):
        kernels.silu_and_mul(torch.zeros(2))
    with pytest.raises(AttributeError):
        kernels.__path__  # noqa: B018 - no package: submodules are not found
    assert CpuStandIns().find_spec("sgl_kernel.flash_attn") is None


def test_nothing_steps_in_where_torch_has_cuda_or_for_other_names(monkeypatch):
    assert CpuStandIns().find_spec("sgl_kernels") is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert CpuStandIns().find_spec("sgl_kernel") is None
