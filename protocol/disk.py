"""One file for one envelope, in the safetensors format: readable anywhere, and nothing in it can be executed.

Every tensor and array is one entry of bytes, under its number; the entry "structure" is JSON that says what they are
and where they belong. Containers are tagged, {"tuple": [...]}, so that everything comes back as it was. Objects that
occur twice come back as two, but arrays and tensors that were one are one again.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.lib.format import descr_to_dtype, dtype_to_descr
from safetensors import SafetensorError

from protocol.errors import FileFormatError, NotStorableError
from protocol.packed import Packed, PackedJagged

FORMAT = "protocol.DataProto 1"
_STRUCTURE = "structure"
_AS_IS = {np.dtype(kind) for kind in (np.uint8, np.int8, np.int16, np.int32)}
_CONTAINERS: tuple[type, ...] = (list, tuple, set, frozenset)


def save(filepath: str | os.PathLike[str], state: tuple[Any, Any]) -> None:
    """Write the state of an envelope: beside the file first, then in its place."""
    batch, (rest, _) = state
    buffers: dict[str, np.ndarray] = {}
    writer = _Writer(buffers)
    try:
        structure = {"batch": writer.plain(batch, "batch"), "rest": {k: writer.plain(v, k) for k, v in rest.items()}}
    except RecursionError:
        raise NotStorableError(
            "a value is nested too deeply, or holds itself, and cannot be written to a file"
        ) from None
    buffers[_STRUCTURE] = np.frombuffer(json.dumps(structure).encode(), dtype=np.uint8)
    path = Path(filepath)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} is not there; create it before saving to {path.name}")
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        safetensors.numpy.save_file(buffers, aside, metadata={"format": FORMAT})
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def load(filepath: str | os.PathLike[str]) -> tuple[Any, Any]:
    """The state that `save` was given. FileFormatError where the file is of another kind or damaged."""
    try:
        with safetensors.safe_open(filepath, framework="numpy") as file:
            found = (file.metadata() or {}).get("format")
            if found != FORMAT:
                raise FileFormatError(f"{filepath} has format {found!r}; expected {FORMAT!r}")
            buffers = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        structure = json.loads(buffers.pop(_STRUCTURE).tobytes())
        reader = _Reader(buffers)
        rest = {key: reader.value(entry) for key, entry in structure["rest"].items()}
        return reader.value(structure["batch"]), (rest, True)
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        with open(filepath, "rb") as file:
            pickled = file.read(1) == b"\x80"
        why = "it is a pickle, and those are not loaded, since they can run code" if pickled else f"{error}"
        raise FileFormatError(f"{filepath} is not a whole file of DataProto.save_to_disk: {why}") from error


class _Writer:
    """Turns values into what JSON holds, and sets bytes aside in `buffers`."""

    def __init__(self, buffers: dict[str, np.ndarray]) -> None:
        self.buffers = buffers
        self.known: dict[int, tuple[Any, str]] = {}  # id -> (what keeps it the id's own, number of its buffer)

    def plain(self, value: Any, path: str) -> Any:
        """JSON for `value`, which stands at `path`."""
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if kind is int:
            return value if value.bit_length() < 64 else {"int": hex(value)}
        if kind is bytes:
            return {"bytes": base64.b64encode(value).decode()}
        if kind is dict:
            return {
                "dict": [[self.plain(k, f"a key of {path}"), self.plain(v, f"{path}[{k!r}]")] for k, v in value.items()]
            }
        if kind is Packed:
            return {"tensor": [value.dtype, list(value.shape), self.number(value.data)]}
        if kind is PackedJagged:
            return {"jagged": [self.plain(value.values, path), self.plain(value.offsets, path), value.dim]}
        if kind in _CONTAINERS:
            return {kind.__name__: [self.plain(entry, f"{path}[{at}]") for at, entry in enumerate(value)]}
        if isinstance(value, (np.ndarray, np.generic)) and (kind is np.ndarray or isinstance(value, np.generic)):
            return self.array(np.asarray(value), path, kind is not np.ndarray)
        raise NotStorableError(
            f"{path} is a {kind.__module__}.{kind.__qualname__}. A file holds tensors, arrays, None, bool, int, float, "
            "str, bytes, list, tuple, set and dict; turn it into one of these, or leave it out with select()."
        )

    def array(self, value: np.ndarray, path: str, scalar: bool) -> Any:
        """JSON for an array, or for the numpy scalar that it was."""
        shape = list(value.shape)
        if value.dtype == object:
            entries = [self.plain(entry, f"{path}[{at}]") for at, entry in enumerate(value.ravel().tolist())]
            return {"objects": [shape, entries]}
        if value.dtype.hasobject:
            raise NotStorableError(f"{path} is an array of dtype {value.dtype}, which holds Python objects in a field")
        descr = dtype_to_descr(value.dtype)
        if scalar:
            return {"scalar": [descr, base64.b64encode(value.tobytes()).decode()]}
        return {"array": [descr, shape, self.number(value)]}

    def number(self, array: np.ndarray) -> str:
        """Number of the buffer that holds the array: as it is where a `Packed` may need its type, else its bytes."""
        if id(array) not in self.known:
            number = str(len(self.buffers))
            self.known[id(array)] = (array, number)
            as_is = array.dtype in _AS_IS
            self.buffers[number] = np.ascontiguousarray(array) if as_is else np.frombuffer(array.tobytes(), np.uint8)
        return self.known[id(array)][1]


class _Reader:
    """Builds values of the plain kinds, and no others."""

    def __init__(self, buffers: dict[str, np.ndarray]) -> None:
        self.buffers = buffers
        self.made: dict[str, Any] = {}  # by number of its buffer: what was made of it
        self.makers: dict[str, Callable[[Any], Any]] = {
            "int": lambda text: int(text, 16),
            "bytes": base64.b64decode,
            "dict": lambda items: {self.value(key): self.value(entry) for key, entry in items},
            "tensor": self.tensor,
            "jagged": lambda parts: PackedJagged(self.value(parts[0]), self.value(parts[1]), parts[2]),
            "array": self.array,
            "scalar": lambda parts: np.frombuffer(base64.b64decode(parts[1]), dtype=_dtype(parts[0]))[0],
            "objects": self.objects,
            **{kind.__name__: lambda entries, kind=kind: kind(map(self.value, entries)) for kind in _CONTAINERS},
        }

    def value(self, plain: Any) -> Any:
        """The inverse of `_Writer.plain`."""
        if not isinstance(plain, dict):
            return plain
        ((tag, content),) = plain.items()
        return self.makers[tag](content)

    def tensor(self, parts: Any) -> Packed:
        """One and the same for one number, so that columns share their offsets again."""
        dtype, shape, number = parts
        return self.made.setdefault(number, Packed(dtype, tuple(shape), self.buffers[number]))

    def array(self, parts: Any) -> np.ndarray:
        """A writable array."""
        descr, shape, number = parts
        if number not in self.made:
            own = bytearray(self.buffers[number].tobytes())
            self.made[number] = np.ndarray(tuple(shape), dtype=_dtype(descr), buffer=own)
        return self.made[number]

    def objects(self, parts: Any) -> np.ndarray:
        """An array of objects."""
        shape, entries = parts
        array = np.empty(len(entries), dtype=object)
        for at, entry in enumerate(entries):
            array[at] = self.value(entry)
        return array.reshape(shape)


def _dtype(descr: Any) -> np.dtype:
    """The dtype that a file names. One with objects in it would take the file's bytes for addresses in memory."""
    dtype = descr_to_dtype(descr)
    if dtype.hasobject:
        raise ValueError(f"an array of dtype {dtype} cannot be made of bytes")
    return dtype
