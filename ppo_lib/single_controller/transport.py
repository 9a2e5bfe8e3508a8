"""What travels between driver and ranks: TensorDicts as numpy buffers, everything else as it is.

Ray moves numpy arrays ten times faster than tensors. `DataProto` does the same in its own pickling, and needs nothing
here. A rank whose worker uses no TensorDict does not load torch on account of this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["pack", "unpack"]


@dataclass(frozen=True)
class _Packed:
    """A TensorDict on its way."""

    payload: dict[str, Any]


def pack(value: Any) -> Any:
    """`value` with every TensorDict in it encoded; looks into plain dicts, lists and tuples."""
    tensordict = sys.modules.get("tensordict")  # where it was never imported, nothing can be one
    if tensordict is not None and isinstance(value, tensordict.TensorDictBase):
        from protocol.wire import serialize_tensordict

        return _Packed(serialize_tensordict(value, in_block=True))
    return _inside(value, pack)


def unpack(value: Any) -> Any:
    """The inverse of `pack`. Tensors that come out own writable memory."""
    if isinstance(value, _Packed):
        from protocol.wire import deserialize_tensordict

        return deserialize_tensordict(value.payload)
    return _inside(value, unpack)


def _inside(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(change(item) for item in value)
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    return value
