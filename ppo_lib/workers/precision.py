"""How the arithmetic of a training rank runs: autocast on a CPU, FSDP's mixed precision on CUDA."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from ppo_lib.models.dtypes import computed_dtype, parse_dtype

__all__ = ["Precision"]


@dataclass(frozen=True)
class Precision:
    """`autocast_dtype` around a forward on a CPU, `param_dtype` as FSDP's policy on CUDA."""

    device_type: str
    autocast_dtype: torch.dtype | None = None
    param_dtype: torch.dtype | None = None

    @classmethod
    def of(cls, dtype: str, device: torch.device) -> Precision:
        """Resolve a configured `dtype` for a device."""
        if device.type != "cpu":
            return cls(device.type, param_dtype=parse_dtype(dtype))
        wanted = computed_dtype(dtype, device)
        return cls("cpu", autocast_dtype=None if wanted == torch.float32 else wanted)

    def autocast(self) -> AbstractContextManager[object]:
        """The context in which to run a forward pass."""
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype)
