"""What SGLang needs to be imported where torch has no CUDA.

Two packages that SGLang imports expect CUDA builds to be there: its own compiled kernels (`sgl_kernel`), of which our
paths on a CPU call one, and torchvision, which declares rules for two operators that only exist in builds that match
torch's. `write_pth`, the last step of `make setup-sglang-cpu`, leaves a `.pth` file that imports this module in every
interpreter of the environment, since with torchvision installed transformers imports it too.

Importing this module only registers a finder. It imports torch when, and only when, one of the two packages is asked
for, and then does nothing where torch has CUDA or the real `sgl_kernel` is installed.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_LOW = 0xFFFFFFFF
_NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: dict[str, Any] = {}  # torch forgets a schema when its library is collected


class _Kernels(ModuleType):
    """Any name can be imported from it, since SGLang does so at its head; calling one is an error."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def absent(*_: Any, **__: Any) -> Any:
            raise RuntimeError(
                f"sgl_kernel.{name} is a compiled kernel of SGLang, which an installation for the CPU does not have; "
                "choose engine arguments that do without it (attention_backend=torch_native, sampling_backend=pytorch)"
            )

        return absent


class _KernelsLoader(Loader):
    """Makes the stand-in. It is no package: SGLang has answers of its own where a submodule cannot be imported."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Kernels(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        import torch

        library = torch.library.Library("sgl_kernel", "FRAGMENT")
        library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
        library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
        _libraries["sgl_kernel"] = library


def murmur_hash32(seed: Any, positions: Any, columns: Any) -> Any:
    """The one kernel that is called, in deterministic mode: MurmurHash3 (x86, 32 bits, from 0) of 16 bytes.

    They are the seed (64 bits), the position and the column, so that every cell has a random number of its own.

    Args:
        seed: (n,) integers.
        positions: (n,) integers.
        columns: (m,) integers.

    Returns:
        (n, m) uint32.
    """
    import torch

    def rotate(x: Any, bits: int) -> Any:
        return ((x << bits) | (x >> (32 - bits))) & _LOW

    def mix(state: Any, word: Any) -> Any:
        word = rotate(word * 0xCC9E2D51 & _LOW, 15) * 0x1B873593 & _LOW
        return rotate(state ^ word, 13) * 5 + 0xE6546B64 & _LOW

    wide = seed.to(torch.int64).view(-1, 1)
    state = torch.zeros_like(wide)
    for word in (wide & _LOW, (wide >> 32) & _LOW, positions.view(-1, 1) & _LOW, columns.view(1, -1) & _LOW):
        state = mix(state, word.to(torch.int64))
    state = state ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> shift)) * factor & _LOW
    return (state ^ (state >> 16)).to(torch.uint32)


class CpuStandIns(MetaPathFinder):
    """Steps in when `sgl_kernel` or torchvision is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec of the stand-in for `sgl_kernel`; None (let others find it) for everything else."""
        if fullname == "torchvision":
            self._declare_operators()
        elif fullname == "sgl_kernel" and not self._is_cuda() and not self._is_installed():
            return ModuleSpec(fullname, _KernelsLoader())
        return None

    def _declare_operators(self) -> None:
        if "torchvision" in _libraries or self._is_cuda():
            return
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                library.define(f"{name}{_NMS}")
        _libraries["torchvision"] = library

    @staticmethod
    def _is_cuda() -> bool:
        import torch

        return torch.version.cuda is not None

    def _is_installed(self) -> bool:
        others = [finder for finder in sys.meta_path if type(finder).__name__ != type(self).__name__]
        return any(finder.find_spec("sgl_kernel", None) is not None for finder in others)


def write_pth() -> Path:
    """Have every interpreter of this environment import this module, if it finds the package. Returns the file."""
    file = Path(sysconfig.get_path("purelib")) / "ppo_lib_sglang_cpu.pth"
    file.write_text('import importlib.util as u; u.find_spec("ppo_lib") and __import__("ppo_lib.sglang_cpu")\n')
    return file


if not any(type(finder).__name__ == CpuStandIns.__name__ for finder in sys.meta_path):
    sys.meta_path.insert(0, CpuStandIns())
