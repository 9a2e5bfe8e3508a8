"""A dataloader whose place in the data is three numbers, so that a resumed run sees the batches it had not seen."""

from __future__ import annotations

import io
import logging
import os
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ppo_lib.data.collate import collate_fn as default_collate_fn
from ppo_lib.errors import DataError

logger = logging.getLogger(__name__)

MAX_WORKERS = 8
_SAME = (
    ("rows_per_epoch", "number of rows"),
    ("shuffle", "data.shuffle"),
    ("seed", "data.seed"),
    ("sampler_class", "sampler"),
)


class ResumableDataLoader:
    """Batches of a dataset, in an order that depends on `seed` and the epoch and nothing else.

    Iterating yields what is left of the current epoch and stops; the next iteration is the next epoch. A batch counts
    as seen from the moment it is handed out, whatever worker processes have prepared beyond it, so a state saved while
    a batch is trained on continues with the batch after it. Saved during the last batch of an epoch, it continues
    with the first batch of the next epoch.

    Args:
        dataset: anything with `__len__` and `__getitem__`; an item without `dataset_row` gets its index as one.
        batch_size: prompts per batch.
        shuffle: a fresh permutation each epoch, or the dataset's order.
        seed: of the permutations.
        drop_last: leave out a last batch that is not full.
        collate_fn: list of items to batch.
        num_workers: processes that prepare items; 0 is this process, None is min(8, cores), or 0 for some samplers.
        sampler: gives the order in place of `shuffle` and `seed`. Its `set_epoch(epoch)` is called if it has one, and
            it must then give the same order for the same epoch; one with `state_dict` and `load_state_dict` is saved
            and restored instead, continues by itself, and is drawn from batch by batch, which needs `num_workers=0`.
            One with `update(batch)` is told of every finished step by `update_sampler`, and is drawn from in the same
            way; without `state_dict` a resumed run skips the rows it had seen. Of any other (torch's `RandomSampler`,
            say) the order of the running epoch is drawn at once and saved.

    Raises:
        DataError: the dataset is empty, or smaller than a batch with `drop_last`; the sampler cannot be drawn from or
            saved.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        collate_fn: Callable[[list[dict[str, Any]]], Any] | None = None,
        num_workers: int | None = 0,
        sampler: Any = None,
    ):
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.shuffle, self.seed, self.sampler = shuffle, seed, sampler
        self.collate_fn = collate_fn or default_collate_fn
        self._epoch, self._rows_seen = 0, 0
        self._drawn_order: list[int] | None = None
        self._running: tuple[int, int, Iterator[Any]] | None = None  # epoch and row that the next batch of it has
        self.epoch_of_last_batch = 0
        """The epoch, counted from 0, that the batch handed out last belongs to."""
        self._sampler_keeps_place = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self._batch_by_batch = self._sampler_keeps_place or hasattr(sampler, "update")
        workers = 0 if self._batch_by_batch else min(MAX_WORKERS, os.cpu_count() or 1)
        self.num_workers = workers if num_workers is None else num_workers
        if self._batch_by_batch and self.num_workers:
            raise DataError(
                "a sampler that keeps a state or learns is drawn from batch by batch, which worker processes would run "
                f"ahead of; set data.dataloader_num_workers=0 (it is {self.num_workers})."
            )
        if self._sampler_keeps_place:
            _check_can_be_saved(sampler)
        if len(dataset) == 0:
            raise DataError("the dataset is empty.")
        if len(self) == 0:
            raise DataError(
                f"the dataset has {self._rows_per_epoch()} rows, fewer than one batch of {batch_size}; "
                f"set the batch size to {self._rows_per_epoch()} or less, or add data."
            )

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        rows = self._rows_per_epoch()
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    @property
    def epoch(self) -> int:
        """The epoch, counted from 0, that the next batch belongs to."""
        return self._epoch

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch
        try:
            while self._epoch == epoch and (batch := self._take()) is not None:
                yield batch
        finally:
            self._running = None  # ends its worker processes

    def next_batch(self) -> Any:
        """The next batch, of the next epoch where this one is over.

        May be called while the loader is iterated over: the iteration goes on behind it, and ends with its epoch.
        Raises `DataError` if there is none, which only a sampler that yields too few rows can cause.
        """
        batch = self._take()
        if batch is None:
            raise DataError("an epoch of training data gave no batch: its sampler yields too few rows")
        return batch

    def _take(self) -> Any:
        """The batch at the loader's place, which moves on; None where the order ends before its time."""
        place = (self._epoch, self._rows_seen)
        if self._running is None or self._running[:2] != place:
            self._running = (*place, iter(self._loader(*place)))
        epoch, seen, batches = self._running
        batch = next(batches, None)
        if isinstance(batch, Exception):
            raise batch
        if batch is None:
            return None
        self._running = (epoch, seen + self.batch_size, batches)
        self._move_to(epoch, seen + self.batch_size)
        if self._epoch != epoch:
            self._running = None
        self.epoch_of_last_batch = epoch
        return batch

    def _loader(self, epoch: int, seen: int) -> DataLoader:
        """The batches of `epoch` from row `seen` on."""
        return DataLoader(
            _Fetched(self.dataset),
            batch_sampler=_Batches(self._order(epoch, seen), self.batch_size, self.drop_last),
            collate_fn=_Collate(self.collate_fn),
            num_workers=self.num_workers,
            worker_init_fn=_in_worker,
            # torch seeds its workers from here; without it every epoch would draw from the global random state
            generator=torch.Generator().manual_seed(_mixed(self.seed, epoch)),
        )

    def update_sampler(self, batch: Any) -> None:
        """Tell a sampler that learns, one with `update(batch)`, what came of the batch drawn last."""
        if hasattr(self.sampler, "update"):
            self.sampler.update(batch)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers (and the sampler's own state, if it keeps one): safe to write as JSON or with torch."""
        state: dict[str, Any] = {
            "epoch": self._epoch,
            "rows_seen": self._rows_seen,
            "rows_per_epoch": self._rows_per_epoch(),
            "shuffle": self.shuffle,
            "seed": self.seed,
            "sampler_class": self._sampler_class(),
        }
        if self._sampler_keeps_place:
            state["sampler"] = self.sampler.state_dict()
        if self._drawn_order is not None:
            state["drawn_order"] = list(self._drawn_order)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved. The batch size may differ; the data and its order may not.

        Raises `DataError`, and changes nothing, if the dataset has another size or the order another seed.
        """
        own = self.state_dict()
        for key, what in _SAME:
            if state.get(key) != own[key]:
                raise DataError(
                    f"cannot continue in the middle of the data: the {what} was {state.get(key)} when this state was "
                    f"saved and is {own[key]} now, so other prompts would come. Restore it, or start anew."
                )
        if self._sampler_keeps_place:
            self.sampler.load_state_dict(state["sampler"])
        elif self._batch_by_batch:
            logger.warning(
                "the sampler %s has update() and no state_dict(): it goes on without what it had learned",
                own["sampler_class"],
            )
        self._running = None
        self._move_to(state["epoch"], state["rows_seen"])
        self._drawn_order = state.get("drawn_order")

    def _move_to(self, epoch: int, seen: int) -> None:
        """The next batch starts at row `seen` of `epoch`, or, if what is left there gives none, with the next epoch."""
        left = self._rows_per_epoch() - seen
        over = left < self.batch_size if self.drop_last else left <= 0
        self._epoch, self._rows_seen = (epoch + 1, 0) if over else (epoch, seen)
        if over:
            self._drawn_order = None

    def _sampler_class(self) -> str | None:
        return None if self.sampler is None else type(self.sampler).__qualname__

    def _rows_per_epoch(self) -> int:
        return len(self.sampler) if self.sampler is not None else len(self.dataset)

    def _order(self, epoch: int, seen: int) -> Iterator[int]:
        """The rows of `epoch` from number `seen` on."""
        if self.sampler is None:
            if not self.shuffle:
                return iter(range(seen, len(self.dataset)))
            order = np.random.default_rng([self.seed % 2**64, epoch]).permutation(len(self.dataset))
            return iter(order[seen:].tolist())
        if hasattr(self.sampler, "set_epoch") and not self._sampler_keeps_place:
            self.sampler.set_epoch(epoch)
            return islice(self._drawn(), seen, None)
        if self._batch_by_batch:
            return self._drawn() if self._sampler_keeps_place else islice(self._drawn(), seen, None)
        if self._drawn_order is None:
            self._drawn_order = list(self._drawn())
        return iter(self._drawn_order[seen:])

    def _drawn(self) -> Iterator[int]:
        """The rows that the sampler gives, one by one; raises `DataError` for one that is not there."""
        for row in self.sampler:
            if not isinstance(row, (int, np.integer, Tensor)) or not 0 <= int(row) < len(self.dataset):
                last = len(self.dataset) - 1
                raise DataError(f"the sampler {self._sampler_class()} gave {row!r}; expected a row from 0 to {last}.")
            yield int(row)


class _Batches:
    """Lists of row numbers, drawn one batch at a time."""

    def __init__(self, order: Iterator[int], batch_size: int, drop_last: bool):
        self.order, self.batch_size, self.drop_last = order, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        while batch := list(islice(self.order, self.batch_size)):
            if len(batch) < self.batch_size and self.drop_last:
                return
            yield batch


class _Fetched(Dataset):
    """Items or, where one cannot be made, the error: raised in a worker it would arrive as a printed traceback."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        try:
            item = self.dataset[index]
        except Exception as error:
            return error
        if isinstance(item, dict):
            item.setdefault("dataset_row", index)
        return item


class _Collate:
    """The first error among the items, or the batch."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]):
        self.collate_fn = collate_fn

    def __call__(self, items: list[Any]) -> Any:
        for item in items:
            if isinstance(item, Exception):
                return item
        try:
            return self.collate_fn(items)
        except Exception as error:
            return error


def _check_can_be_saved(sampler: Any) -> None:
    """Raise `DataError` if a resumed run could not read the sampler's state: only plain values and tensors are."""
    buffer = io.BytesIO()
    try:
        torch.save(sampler.state_dict(), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:  # pickle raises whatever the state's classes do
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"the state_dict() of the sampler {type(sampler).__qualname__} cannot be saved and read again: {said}; "
            "it may hold numbers, texts, lists, dictionaries and tensors."
        ) from error


def _in_worker(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's: it ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # a forked tokenizer warns about its threads at every start otherwise
    )


def _mixed(seed: int, epoch: int) -> int:
    return int(np.random.SeedSequence([seed % 2**64, epoch]).generate_state(1, dtype=np.uint64)[0] >> np.uint64(1))
