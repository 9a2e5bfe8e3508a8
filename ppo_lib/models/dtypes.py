"""What a configured dtype means on the device at hand: one rule for training ranks and rollout engines."""

from __future__ import annotations

import logging
from functools import cache

import torch

from ppo_lib.errors import ConfigError

__all__ = ["computed_dtype", "cpu_computes_bfloat16", "parse_dtype"]

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


def computed_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type that `device` computes in where `name` is asked for.

    bfloat16 on a CPU without instructions for it would be many times slower than float32; it becomes float32 there, and
    one line says so.
    """
    wanted = parse_dtype(name)
    if wanted != torch.float32 and device.type == "cpu" and not cpu_computes_bfloat16():
        _say_float32()
        return torch.float32
    return wanted


def cpu_computes_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices faster than float32 ones (AVX512-bf16 or AMX)."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


@cache
def _say_float32() -> None:
    logger.warning("this CPU has no bfloat16 arithmetic (AVX512-bf16 or AMX): dtype bfloat16 is computed in float32")
