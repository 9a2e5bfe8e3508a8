"""Runs inside SGLang's schedulers: copies a bucket of weights into the model and reports what it did.

SGLang calls `load` as its custom weight loader, once per tensor-parallel rank. What it raises there would end the
engine, so faults go into a report file that the host reads. A model's own `load_weights` skips names that it does not
know without a word; so the words of all tensors that arrived are summed, and in the end compared with the sum over
the model's parameters, which does not depend on how SGLang fuses them.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ppo_lib.rollout.weights import TensorEntry, WeightBucket

_MODULUS = 1 << 64  # of the sums, which wrap in 64 bits
_arrived = {"words": 0}


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader. The one name is a JSON order, its tensor is empty.

    Orders: `begin`; `bucket` with `entries`, `checksum`, `uncounted` (names that the model has under another name too,
    or not as a parameter) and either `file` (shared memory) or `ipc` (a pickled handle of device memory); `check`. All
    have `report`, the path (less the rank) of the answer.
    """
    order = json.loads(named_tensors[0][0])
    report: dict[str, Any]
    try:
        report = _ORDERS[order["order"]](model, order)
    except Exception as error:
        report = {"error": f"{type(error).__name__}: {error}"}
    path = Path(f"{order['report']}.{_rank()}")
    path.with_suffix(".part").write_text(json.dumps(report))
    os.replace(path.with_suffix(".part"), path)


def _begin(model: Any, order: dict[str, Any]) -> dict[str, Any]:
    _arrived.update(words=0)
    return {}


def _bucket(model: Any, order: dict[str, Any]) -> dict[str, Any]:
    data = _mapped(order["file"]) if "file" in order else _on_this_device(order["ipc"])
    entries = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in order["entries"])
    named = list(WeightBucket(entries, data, order["checksum"]).unpack())
    model.load_weights(iter(named))
    dtype, uncounted = next(model.parameters()).dtype, set(order["uncounted"])
    for name, tensor in named:
        if name not in uncounted:
            _arrived["words"] += _words(tensor.to(dtype))
    if "ipc" in order:
        torch.cuda.synchronize()  # the sender reuses its memory once it has the answer
    return {}


def _mapped(file: str) -> np.ndarray:
    with open(file, "r+b") as opened:
        return np.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=np.uint8)  # unmapped when the last view of it goes


def _on_this_device(handle: str) -> torch.Tensor:
    rebuild, arguments = pickle.loads(bytes.fromhex(handle))
    arguments = list(arguments)
    arguments[6] = torch.cuda.current_device()  # the sender may number the same GPU otherwise
    return rebuild(*arguments)


def _check(model: Any, order: dict[str, Any]) -> dict[str, Any]:
    """Sums of words: of what arrived, and of the model's parameters; None where SGLang stores them in several types."""
    parameters = list(model.parameters())
    comparable = len({parameter.dtype for parameter in parameters}) == 1
    held = sum(_words(parameter.data) for parameter in parameters) % _MODULUS if comparable else None
    return {"arrived": _arrived["words"] % _MODULUS, "held": held}


def _words(tensor: torch.Tensor) -> int:
    """The sum of a tensor's bit patterns as integers."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = tensor.contiguous().view(kinds[tensor.element_size()])
    if words.is_cuda:
        return int(words.sum(dtype=torch.int64))
    return int(np.add.reduce(words.numpy().reshape(-1), dtype=np.int64))  # torch sums this seven times slower


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


_ORDERS = {"begin": _begin, "bucket": _bucket, "check": _check}
