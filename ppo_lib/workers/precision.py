"""What `dtype` (of the arithmetic) and `model_dtype` (of the stored parameters) mean on the device at hand."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch

from ppo_lib.errors import ConfigError

__all__ = ["Precision", "parse_dtype", "rollout_dtype"]

logger = logging.getLogger(__name__)

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def parse_dtype(name: str) -> torch.dtype:
    """The torch type of a configured name."""
    if name not in _DTYPES:
        raise ConfigError(f"unknown dtype {name!r}; use one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


@dataclass(frozen=True)
class Precision:
    """How the arithmetic runs: `autocast` around a forward on a CPU, `param_dtype` as FSDP's policy on CUDA."""

    device_type: str
    autocast_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, dtype: str, device: torch.device) -> Precision:
        """Resolve a configured `dtype`; bfloat16 on a CPU without instructions for it is fp32, and says so once."""
        wanted = parse_dtype(dtype)
        if device.type != "cpu":
            return cls(device.type, param_dtype=wanted)
        if wanted == torch.float32:
            return cls("cpu")
        if not cpu_computes_bf16():
            _warn_no_bf16()
            return cls("cpu")
        return cls("cpu", autocast_dtype=wanted)

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which to run a forward pass."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)


def cpu_computes_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices faster than float32 ones (AVX512-bf16 or AMX)."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@cache
def _warn_no_bf16() -> None:
    logger.warning("this CPU has no bfloat16 arithmetic (AVX512-bf16 or AMX): dtype bfloat16 is computed in float32")


def rollout_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type in which weights are handed to rollout replicas; float32 where a CPU lacks bfloat16 arithmetic."""
    wanted = parse_dtype(name)
    if device.type == "cpu" and wanted != torch.float32 and not cpu_computes_bf16():
        return torch.float32
    return wanted
