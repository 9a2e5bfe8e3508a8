"""Memory of dropped batches is handed out again, and never while anything still looks at it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import torch
from envelopes import through_store
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import BatchMismatchError, DataProto, deserialize_tensordict, recycled, serialize_tensordict
from protocol import tensordict_utils as tu

BYTES = np.dtype(np.uint8)
ENTRIES = recycled.SMALLEST // 8  # of int64


@pytest.fixture(autouse=True)
def nothing_kept():
    gc.collect()
    recycled._free.clear()
    yield
    recycled._free.clear()


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


# ---- the memory


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[5:6],
        lambda array: array.reshape(2, -1).T[3:],
        lambda array: memoryview(array),
        lambda array: torch.from_numpy(array)[7:],
        lambda array: torch.from_numpy(array).view(torch.int64)[1:].numpy(),
        lambda array: torch.from_numpy(array).view(torch.int32).detach(),
    ],
)
def test_memory_comes_again_when_the_last_view_of_it_is_gone(view):
    array = recycled.empty(2 * recycled.SMALLEST, BYTES)
    place = address(array)
    left = view(array)
    del array
    assert recycled.kept() == 0
    assert address(recycled.empty(2 * recycled.SMALLEST, BYTES)) != place
    recycled._free.clear()
    del left
    assert recycled.kept() == 2 * recycled.SMALLEST
    assert address(recycled.empty(2 * recycled.SMALLEST, BYTES)) == place


def test_a_smaller_block_or_one_far_too_large_is_not_taken():
    array = recycled.empty(4 * recycled.SMALLEST, BYTES)
    place = address(array)
    del array
    assert address(recycled.empty(4 * recycled.SMALLEST + 1, BYTES)) != place
    assert address(recycled.empty(3 * recycled.SMALLEST - 1, BYTES)) != place
    fitting = recycled.empty(3 * recycled.SMALLEST // 8, np.dtype(np.int64))
    assert address(fitting) == place
    assert fitting.shape == (3 * recycled.SMALLEST // 8,)
    assert fitting.flags.writeable


def test_small_arrays_are_left_to_the_allocator():
    assert recycled.empty(recycled.SMALLEST - 1, BYTES).size == recycled.SMALLEST - 1
    assert recycled.kept() == 0


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(recycled, "KEPT", 5 * recycled.SMALLEST)
    arrays = [recycled.empty(2 * recycled.SMALLEST, BYTES) for _ in range(4)]
    places = [address(array) for array in arrays]
    while arrays:
        del arrays[0]
        assert recycled.kept() <= 5 * recycled.SMALLEST
    assert [address(block) for block in recycled._free] == places[2:]
    assert recycled.empty(6 * recycled.SMALLEST, BYTES).size == 6 * recycled.SMALLEST  # more than all may be
    assert [address(block) for block in recycled._free] == places[2:]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 7), st.integers(0, 2**21)), max_size=30))
def test_no_two_living_arrays_share_memory(program):
    living: list[tuple[int, np.ndarray]] = []
    for mark, (drop, at, size) in enumerate(program):
        if drop and living:
            del living[at % len(living)]
        else:
            array = recycled.empty(size, BYTES)
            array.fill(mark)
            living.append((mark, array))
        assert all((array == mark).all() for mark, array in living)


def test_threads_that_take_and_drop_at_once_never_get_the_same_memory():
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(200):
            array = recycled.empty(recycled.SMALLEST, BYTES)
            array.fill(mark)
            if not (array == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert recycled.kept() <= recycled.KEPT


# ---- envelopes


def test_an_envelope_gets_the_memory_of_one_that_was_dropped_and_not_of_one_that_lives():
    data = DataProto.from_dict({"ids": torch.arange(2 * ENTRIES).view(2, -1), "old": torch.randn(2, ENTRIES)})
    first = through_store(data)
    place = first.batch["ids"].data_ptr()
    row = first.batch["ids"][1]
    del first
    second = through_store(data)
    second.batch["ids"].zero_()
    assert torch.equal(row, data.batch["ids"][1])
    del row
    places = {through_store(data).batch["ids"].data_ptr() for _ in range(2)}
    assert place in places


@pytest.mark.parametrize("odd", [0, 2**30])  # in the middle, where no one guesses it
def test_a_pickle_holds_nothing_that_was_in_the_memory_before(odd):
    ids = torch.zeros(1, 2 * ENTRIES + 5, dtype=torch.int64)
    ids[0, ENTRIES] = odd
    data = DataProto.from_dict({"ids": ids, "mask": torch.ones_like(ids)})
    pickles = set()
    for mark in (1, 2, 3):
        recycled._free.clear()
        blocks = [recycled.empty(size * ENTRIES, BYTES) for size in (2, 3, 4, 5, 8, 9, 16)]
        for block in blocks:
            block.fill(0xA0 + mark)
        del blocks, block
        pickles.add(pickle.dumps(data))
        assert recycled.kept() > 0
    assert len(pickles) == 1
    assert len(pickles.pop()) < (2 * ENTRIES + 5) * (5 if odd else 2) + 1000  # and nothing is sent for nothing


def test_columns_that_shared_their_offsets_still_do_where_threads_unpack_them():
    rows = [torch.arange(ENTRIES + index) for index in range(4)]
    ids = tu.nested_tensor_from_tensor_list(rows)
    batch = {f"column {index}": ids * 1 for index in range(6)}
    data = DataProto.from_tensordict(tu.get_tensordict(batch))
    sent = through_store(data).batch
    offsets = {id(sent[key].offsets()) for key in batch}
    assert len(offsets) == 1
    assert all(torch.equal(sent[key].values(), ids.values()) for key in batch)


def test_what_cannot_travel_is_named_from_a_thread_too():
    batch = tu.get_tensordict({"ids": torch.zeros(4, ENTRIES), "ghost": torch.zeros(4, 3, device="meta")})
    with pytest.raises(BatchMismatchError, match=r"'ghost' is .* only dense and jagged travel"):
        serialize_tensordict(batch)
    packed = serialize_tensordict(tu.get_tensordict({"ids": torch.zeros(4, ENTRIES), "mask": torch.ones(4, 3)}))
    packed["tensors"]["mask"] = packed["tensors"]["mask"]._replace(shape=(5, 3))
    with pytest.raises(BatchMismatchError, match="48 bytes are no tensor of shape"):
        deserialize_tensordict(packed)


def _length_after_sending(data: DataProto) -> int:
    return int(through_store(data).batch["ids"].sum())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_process_sends_and_receives_although_its_parents_threads_are_gone():
    data = DataProto.from_dict({"ids": torch.ones(4, ENTRIES, dtype=torch.int64)})
    assert _length_after_sending(data) == 4 * ENTRIES  # the threads are there
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply_async(_length_after_sending, (data,)).get(timeout=60) == 4 * ENTRIES


def test_an_envelope_is_still_pickled_while_the_interpreter_shuts_down():
    code = """
        import atexit, pickle, torch
        from protocol import DataProto
        data = DataProto.from_dict({"ids": torch.arange(1 << 20).view(4, -1)})
        atexit.register(lambda: print(pickle.loads(pickle.dumps(data)).batch["ids"].sum().item()))
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == (1 << 20) * ((1 << 20) - 1) // 2
