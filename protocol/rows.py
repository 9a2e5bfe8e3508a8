"""The algebra of rows: repeat, reorder, chunk, split, pad, iterate. What an envelope can do to its rows as a whole."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from protocol import tensordict_utils as tu
from protocol.base import Columns
from protocol.errors import BatchMismatchError
from protocol.values import short, whole_number

Rows = TypeVar("Rows", bound="RowOperations")


class DataProtoConfig:
    """What holds for all envelopes of this process. `DataProtoConfig.auto_padding = True` lets `chunk` add rows."""

    auto_padding: bool = False


class RowOperations(Columns):
    """Methods of DataProto that move whole rows. Everything is built on `_taken`."""

    def _taken(self, rows: torch.Tensor | builtins.slice, op: str | None = None) -> Self:
        """Envelope of the rows that `tu.row_index` chose. A slice shares memory, an index copies."""
        index = rows if isinstance(rows, builtins.slice) else rows.numpy()
        batch = None if self.batch is None else tu.take_rows(self.batch, rows)
        return self._derived(batch, {key: column[index] for key, column in self.non_tensor_batch.items()}, op)

    def select_idxs(self, idxs: Any) -> Self:
        """Rows by slice, mask, list, array or tensor; the same as `data[idxs]`."""
        return self._taken(tu.row_index(idxs, len(self)))

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """The same as `data[start:end:step]`. Shares the tensors' memory where step is 1."""
        return self.select_idxs(builtins.slice(start, end, step))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row `repeat_times` times: a a b b with `interleave`, else a b a b. Copies tensors, shares objects."""
        times = whole_number(repeat_times, "repeat_times")
        rows = torch.arange(len(self))
        rows = rows.repeat_interleave(times) if interleave else rows.repeat(times)
        return self._taken(rows, "repeat")

    def sample_level_repeat(self, repeat_times: Sequence[int] | torch.Tensor | np.ndarray) -> Self:
        """Row i `repeat_times[i]` times, copies next to each other; 0 leaves it out. Copies tensors, shares objects."""
        times = torch.as_tensor(np.zeros(0, np.int64) if np.size(repeat_times) == 0 else repeat_times).cpu()
        whole = times.shape == (len(self),) and not times.is_floating_point() and times.dtype != torch.bool
        if not whole or bool((times < 0).any()):
            raise BatchMismatchError(
                f"repeat_times must be one integer from 0 up for each of {len(self)} rows, found {short(repeat_times)}"
            )
        return self._taken(torch.arange(len(self)).repeat_interleave(times.long()), "sample_level_repeat")

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches of `mini_batch_size` rows, `epochs` times over the whole. Rows must divide.

        In the rows' own order (sharing the tensors' memory), unless `dataloader_kwargs={"shuffle": True}`: then in an
        order drawn anew for every epoch from `seed`, and "shuffle" stands in the lineage of each mini-batch. A seed
        alone shuffles nothing and is warned about.
        """
        plan = tu.minibatch_rows(len(self), mini_batch_size, epochs, seed, dataloader_kwargs)
        return (self._taken(rows, None if isinstance(rows, builtins.slice) else "shuffle") for rows in plan)

    def reorder(self, indices: torch.Tensor) -> None:
        """Permute the rows in place: row i becomes the former row `indices[i]`. Every row must be named once."""
        rows = torch.arange(len(self))[tu.row_index(indices, len(self))]
        times = torch.bincount(rows, minlength=len(self))
        if bool((times != 1).any()):
            row = int((times != 1).int().argmax())
            raise BatchMismatchError(
                f"reorder needs each of {len(self)} rows once, found {len(rows)} indices "
                f"and row {row} {int(times[row])} times. To choose rows, index the envelope instead."
            )
        moved = self._taken(rows)
        self.batch, self.non_tensor_batch = moved.batch, moved.non_tensor_batch
        self.record("reorder")

    def split(self, split_size: int) -> list[Self]:
        """Contiguous parts of `split_size` rows, the last one with what is left. They share the tensors' memory."""
        split_size = whole_number(split_size, "split_size")
        return [
            self._taken(builtins.slice(at, min(at + split_size, len(self)))) for at in range(0, len(self), split_size)
        ]

    def chunk(self, chunks: int) -> list[Self]:
        """`chunks` equal contiguous parts. They share the tensors' memory unless rows had to be added.

        Rows that do not divide are an error, or, where `is_padding_enabled`, made up by marked rows of zero weight at
        the end (see `pad_dataproto_to_divisor`); `unpad_dataproto` takes those off the concatenated parts.
        """
        chunks = whole_number(chunks, "chunks")
        whole = pad_dataproto_to_divisor(self, chunks)[0] if self.is_padding_enabled() else self
        size, rest = divmod(len(whole), chunks)
        if rest:
            raise BatchMismatchError(
                f"{len(self)} rows cannot be cut into {chunks} equal parts. "
                "Create the envelope with auto_padding=True, pad it with pad_dataproto_to_divisor, or use split."
            )
        return [whole._taken(builtins.slice(part * size, (part + 1) * size)) for part in range(chunks)]

    def is_padding_enabled(self) -> bool:
        """Whether `chunk` may add rows: this envelope has `auto_padding`, or DataProtoConfig gives it to all."""
        return self.auto_padding or DataProtoConfig.auto_padding

    def padding(self, padding_size: int, padding_candidate: str = "last") -> None:
        """Append `padding_size` marked rows of zero weight in place, copies of the "first" or the "last" row."""
        candidates = {"first": 0, "last": len(self) - 1, "": len(self) - 1}
        if padding_candidate not in candidates:
            raise BatchMismatchError(f"padding_candidate must be 'first' or 'last', found {padding_candidate!r}")
        if whole_number(padding_size, "padding_size", 0) and not len(self):
            raise BatchMismatchError(f"cannot append {padding_size} padding rows to 0 rows: there is none to copy")
        if padding_size:
            padded = self._padded(torch.full((padding_size,), candidates[padding_candidate]))
            self.batch, self.non_tensor_batch = padded.batch, padded.non_tensor_batch
            self.record("padding")

    def _padded(self, copies: torch.Tensor) -> Self:
        """Envelope with the rows `copies` appended, marked in `batch["is_padding"]` and without weight."""
        batch = TensorDict({}, batch_size=[len(self)]) if self.batch is None else self.batch
        rows = np.concatenate([np.arange(len(self)), copies.numpy()])
        columns = {key: column[rows] for key, column in self.non_tensor_batch.items()}
        return self._derived(tu.append_padding(batch, copies), columns, "padding")


def pad_dataproto_to_divisor(data: Rows, size_divisor: int) -> tuple[Rows, int]:
    """Append marked rows of zero weight until the rows divide by `size_divisor`; returns (result, rows appended).

    The appended rows repeat the first ones. They carry `is_padding` True and `response_mask` 0. With nothing to append,
    `data` itself comes back.
    """
    pad_size = -len(data) % whole_number(size_divisor, "size_divisor")
    return (data._padded(torch.arange(pad_size) % len(data)), pad_size) if pad_size else (data, 0)


def unpad_dataproto(data: Rows, pad_size: int) -> Rows:
    """Without its last `pad_size` rows, and without `is_padding` if that marks none of the rest. Shares memory."""
    if whole_number(pad_size, "pad_size", 0) > len(data):
        raise BatchMismatchError(f"cannot take {pad_size} padding rows off {len(data)} rows")
    if pad_size == 0:
        return data
    batch = None if data.batch is None else tu.unpad(data.batch, pad_size)
    if batch is not None and data.non_tensor_batch and not batch.keys():
        batch = None
    kept = {key: column[: len(column) - pad_size] for key, column in data.non_tensor_batch.items()}
    return data._derived(batch, kept, "unpad")
