"""Pickling, and what arrives on the other side."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import os
import pickle
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from envelopes import dtypes_of, envelope, rows_of, through_store
from tensordict import TensorDict

from protocol import (
    BatchMismatchError,
    DataProto,
    deserialize_single_tensor,
    deserialize_tensordict,
    fold_batch_dim,
    serialize_single_tensor,
    serialize_tensordict,
    stage,
    wire,
)
from protocol import tensordict_utils as tu
from protocol.compact import Place
from protocol.values import deep_equal

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64]


def in_band(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("send", [through_store, in_band, copy.deepcopy])
def test_an_envelope_arrives_as_it_was_and_in_memory_of_its_own(send):
    with stage("gen"):
        data = envelope(3, temperature=0.5, array=np.arange(2), tensor=torch.ones(1)).repeat(2)
    data.auto_padding = True
    sent = send(data)
    assert rows_of(sent) == rows_of(data)
    assert dtypes_of(sent) == dtypes_of(data)
    assert sent.lineage == data.lineage
    assert sent.auto_padding
    sent.batch["matrix"][0] = -1
    sent.batch["jagged"].values()[0] = -1
    sent.non_tensor_batch["small"][0] = -1
    sent.meta_info["array"][0] = -1
    sent.meta_info["tensor"][0] = -1
    assert data.batch["matrix"][0].tolist() == [0, 1]
    assert data.batch["jagged"].values()[0] == 1
    assert data.non_tensor_batch["small"][0] == 0
    assert data.meta_info["array"][0] == 0
    assert data.meta_info["tensor"][0] == 1


@pytest.mark.parametrize("send", [through_store, in_band])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_arrives_bit_for_bit(dtype, send):
    tensors = {
        "plain": torch.tensor([[0.0, 1.0, -2.5]] * 2).abs().to(dtype),
        "empty": torch.zeros(2, 0, 3).to(dtype),
        "turned": torch.arange(6).view(3, 2).T.to(torch.float32).to(dtype),
        "expanded": torch.ones(1, 3).to(dtype).expand(2, 3),
    }
    sent = send(DataProto.from_dict(tensors))
    for key, tensor in tensors.items():
        assert sent.batch[key].dtype == dtype
        assert sent.batch[key].shape == tensor.shape
        assert bytes(sent.batch[key].view(torch.uint8).numpy()) == bytes(tensor.contiguous().view(torch.uint8).numpy())
        sent.batch[key].zero_()


def test_tensors_leave_as_out_of_band_buffers_that_share_their_memory():
    data = DataProto.from_dict({"x": torch.zeros(1000, 100)})
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert len(payload) < 2000
    assert [buffer.raw().nbytes for buffer in buffers] == [400_000]
    assert np.shares_memory(np.frombuffer(buffers[0], np.float32), data.batch["x"].numpy())


def test_a_chunk_sends_its_own_rows_only():
    part = DataProto.from_dict({"x": torch.zeros(1000, 100)}).chunk(10)[3]
    assert len(pickle.dumps(part)) < 45_000


@pytest.mark.parametrize("send", [through_store, in_band, lambda encoded: encoded])
def test_a_tensordict_of_jagged_rows_arrives_with_columns_that_can_be_added(send):
    lengths = [torch.arange(2), torch.arange(0), torch.arange(3)]
    first = tu.nested_tensor_from_tensor_list(lengths)
    td = TensorDict({"a": first, "b": first * 2, "d": torch.zeros(3, 2).bfloat16()}, batch_size=[3])
    td["inner"] = TensorDict({"x": torch.arange(3)}, batch_size=[3])
    tu.assign_non_tensor_stack(td, "s", [{"image": torch.ones(2)}, [1], None])
    tu.assign_non_tensor(td, temperature=1.0, sizes=[1.0, 2.0])
    got = deserialize_tensordict(send(serialize_tensordict(td)))
    assert (got["a"] + got["b"]).values().tolist() == [0, 3, 0, 3, 6]
    assert got["d"].dtype == torch.bfloat16
    assert got["inner", "x"].tolist() == [0, 1, 2]
    assert tu.get(got, "s")[0]["image"].tolist() == [1, 1]
    assert tu.get(got, "s")[1:] == [[1], None]
    assert (tu.get(got, "temperature"), tu.get(got, "sizes")) == (1.0, [1.0, 2.0])
    assert got.batch_size == (3,)


def test_a_tensordict_with_jagged_rows_survives_plain_pickle():
    first = tu.nested_tensor_from_tensor_list([torch.arange(2), torch.arange(3)])
    got = in_band(TensorDict({"a": first, "b": first * 2}, batch_size=[2]))
    assert (got["a"] + got["b"]).values().tolist() == [0, 3, 0, 3, 6]


def test_tensors_and_arrays_anywhere_in_objects_arrive_writable_and_shared_rows_stay_shared():
    row = {"images": [torch.ones(2), (np.ones(2), None)], "boxes": np.array([torch.zeros(1), "x"], dtype=object)}
    sent = through_store(DataProto.from_dict(non_tensors={"u": [row, row, {"other": [1, "a"]}]}))
    first, second, third = sent.non_tensor_batch["u"]
    assert first is second
    assert third == {"other": [1, "a"]}
    first["images"][0][0] = 5
    first["images"][1][0][0] = 5
    first["boxes"][0][0] = 5
    assert first["images"][0].tolist() == [5, 1]
    assert row["images"][0].tolist() == [1, 1]
    assert row["boxes"][0].tolist() == [0]


def test_a_pickle_loads_in_a_process_with_another_environment(tmp_path: Path):
    file = tmp_path / "data.pkl"
    file.write_bytes(pickle.dumps(envelope(3, a=1)))
    code = (
        "import pickle, sys; data = pickle.load(open(sys.argv[1], 'rb'));"
        "assert data.batch['matrix'].tolist() == [[0, 1], [2, 3], [4, 5]] and data.meta_info == {'a': 1}"
    )
    environment = {"PATH": os.environ["PATH"], "LIST_TO_STACK": "0", "PYTHONPATH": str(Path.cwd())}
    subprocess.run([sys.executable, "-c", code, str(file)], check=True, env=environment)


def test_a_format_this_side_does_not_know_is_refused():
    encoded = serialize_tensordict(TensorDict({}, batch_size=[1]))
    with pytest.raises(BatchMismatchError, match="format 99, this side reads"):
        deserialize_tensordict({**encoded, "version": 99})


def test_ray_delivers_envelopes_that_can_be_written_without_touching_the_store(ray_cluster):
    import ray

    data = envelope(3, a=1)
    reference = ray.put(data)
    ray.get(reference).batch["matrix"].fill_(-1)
    assert rows_of(ray.get(reference)) == rows_of(data)
    encoded = ray.put(serialize_tensordict(data.to_tensordict()))
    deserialize_tensordict(ray.get(encoded))["matrix"].fill_(-1)
    assert rows_of(DataProto.from_tensordict(deserialize_tensordict(ray.get(encoded)))) == rows_of(data)


# ---- any value, any shape, across processes


@dataclasses.dataclass
class Sample:
    """A value of somebody's own class, which holds a tensor and an array."""

    tensor: torch.Tensor
    array: np.ndarray


def any_values() -> list[Any]:
    """One row of every kind of value that people put into an object column."""
    return [
        None,
        2**80,
        float("inf"),
        "text \ud800",
        b"\x00",
        [1, [2, ("three", {4})]],
        {"a": np.float32(1), ("b", 1): np.datetime64("2020-01-01")},
        torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        tu.nested_tensor_from_tensor_list([torch.ones(1), torch.ones(2)]),
        np.array([None, torch.ones(2), np.ones(2)], dtype=object),
        np.array([[1, 2]], dtype=">i4"),
        Path("/a/b"),
        OrderedDict(x=[torch.zeros(1).to(torch.float8_e5m2)]),
        Sample(torch.ones(3), np.ones(3)),
        collections.Counter("aab"),
        len,
        dict,
        slice(1, 2),
        datetime.timedelta(days=1),
        TensorDict({"x": torch.ones(2)}, batch_size=[2]),
    ]


def same_value(left: Any, right: Any) -> bool:
    if isinstance(left, Sample):
        return torch.equal(left.tensor, right.tensor) and np.array_equal(left.array, right.array)
    if isinstance(left, TensorDict):
        return bool((left == right).all())
    return deep_equal(left, right)


def envelopes_of_every_kind() -> dict[str, DataProto]:
    """What a process may be sent, by name."""
    dense = {str(dtype): torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to(dtype) for dtype in DTYPES}
    nested = {
        f"nested {dtype}": tu.nested_tensor_from_tensor_list([torch.ones(1, 2).to(dtype), torch.ones(3, 2).to(dtype)])
        for dtype in DTYPES
    }
    both = DataProto.from_single_dict({**dense, **nested, "c": [[1], [2]], "i": np.arange(2, dtype=np.int8)})
    return {
        "every dtype": both,
        "no rows": both[:0],
        "no width": DataProto.from_dict({key: tensor[:, :0] for key, tensor in dense.items()}),
        "any value": DataProto.from_dict(non_tensors={"v": any_values()}),
        "any value, no rows": DataProto.from_dict(non_tensors={"v": any_values()})[:0],
        "folded": fold_batch_dim(DataProto.from_single_dict({"x": torch.arange(4), "c": [[1], [2], [3], [4]]}), 2),
        "nothing": DataProto(meta_info={"any": any_values()}),
    }


def assert_same(got: DataProto, sent: DataProto) -> None:
    """Bits, dtypes, shapes, kinds of columns; and that the memory can be written."""
    assert len(got) == len(sent)
    assert dtypes_of(got) == dtypes_of(sent)
    for key in sent.tensor_keys():
        one, other = (
            data.batch[key].values() if data.batch[key].is_nested else data.batch[key] for data in (got, sent)
        )
        assert got.batch[key].is_nested == sent.batch[key].is_nested
        assert one.shape == other.shape
        assert bytes(one.view(torch.uint8).numpy()) == bytes(other.contiguous().view(torch.uint8).numpy())
        one.zero_()
    for key, column in sent.non_tensor_batch.items():
        assert got.non_tensor_batch[key].shape == column.shape
        assert all(map(same_value, column.flat, got.non_tensor_batch[key].flat))
    assert sent.meta_info.keys() == got.meta_info.keys()
    assert all(map(same_value, sent.meta_info.get("any", []), got.meta_info.get("any", [])))


@pytest.mark.parametrize("name", envelopes_of_every_kind())
@pytest.mark.parametrize("send", [through_store, in_band, lambda data: pickle.loads(pickle.dumps(data, protocol=2))])
def test_every_kind_of_envelope_arrives(name, send):
    sent = envelopes_of_every_kind()[name]
    assert_same(send(sent), sent)


def test_any_value_goes_through_a_tensordict_and_its_wire_format():
    for value in any_values():
        data = DataProto.from_dict(non_tensors={"v": [value, None]}, meta_info={"m": value})
        for td in (data.to_tensordict(), deserialize_tensordict(in_band(serialize_tensordict(data.to_tensordict())))):
            back = DataProto.from_tensordict(td)
            assert same_value(back.non_tensor_batch["v"][0], value)
            assert back.non_tensor_batch["v"][1] is None
            assert same_value(back.meta_info["m"], value)


def test_large_read_only_buffers_are_copied_whole():
    data = DataProto.from_dict({"x": torch.arange(3 * 2**21 + 1)})  # more than one thread's part, and not even
    sent = through_store(data)
    assert torch.equal(sent.batch["x"], data.batch["x"])
    sent.batch["x"].zero_()


def test_every_kind_of_envelope_goes_to_another_process_and_back():
    code = (
        "import pickle, sys; sys.path[:0] = sys.argv[1:]; data = pickle.load(sys.stdin.buffer);"
        "sys.stdout.buffer.write(pickle.dumps(data))"
    )
    sent = envelopes_of_every_kind()
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", code, *folders], input=pickle.dumps(sent), check=True, capture_output=True
    )
    got = pickle.loads(done.stdout)
    for name, data in sent.items():
        assert_same(got[name], data)


def test_every_kind_of_envelope_goes_to_a_ray_task_and_back(ray_cluster):
    import ray

    @ray.remote
    def back(payload: dict[str, DataProto]) -> dict[str, DataProto]:
        for data in payload.values():  # what arrives can be written
            for tensor in [] if data.batch is None else data.batch.values():
                values = tensor.values() if tensor.is_nested else tensor
                values.copy_(values.clone())
        return payload

    sent = envelopes_of_every_kind()
    known = [row for row in any_values() if not isinstance(row, Sample)]  # no worker can import this module
    sent |= {"any value": DataProto.from_dict(non_tensors={"v": known}), "nothing": DataProto(meta_info={"any": known})}
    here = DataProto.from_dict(non_tensors={"v": [lambda: 3, type("Local", (), {"x": torch.ones(1)})()]})
    answer, local = ray.get(back.remote({"here": here}))["here"].non_tensor_batch["v"]
    assert (answer(), local.x.tolist()) == (3, [1])
    got = ray.get(back.remote(sent))
    for name, data in sent.items():
        assert_same(got[name], data)


def test_a_single_tensor_goes_as_dtype_shape_and_bytes_and_any_buffer_will_do():
    tensor = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    dtype, shape, data = serialize_single_tensor(tensor)
    assert (dtype, shape, data.nbytes) == ("bfloat16", (1, 2), 4)
    for buffer in (bytes(data), bytearray(data), memoryview(bytes(data)), data):
        back = deserialize_single_tensor((dtype, list(shape), buffer))
        assert torch.equal(back, tensor)
        back.zero_()
    assert tensor.tolist() == [[0, 0]]  # writable buffers are taken as they are
    nested = tu.nested_tensor_from_tensor_list([torch.ones(1), torch.ones(2)])
    assert [len(row) for row in deserialize_single_tensor(serialize_single_tensor(nested)).unbind()] == [1, 2]
    for wrong in (("float32", (1, 2), data), ("nonsense", (1, 2), data), ("Tensor", (1, 2), data)):
        with pytest.raises(BatchMismatchError, match="4 bytes are no tensor of shape"):
            deserialize_single_tensor(wrong)


# ---- integers in the narrowest type that holds them


RANGES = [(0, 1, 1), (-128, 127, 1), (-129, 0, 2), (0, 128, 2), (-(2**15), 2**15 - 1, 2), (0, 2**15, 4), (0, 2**31, 8)]
INTEGERS = [torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("send", [through_store, in_band])
@pytest.mark.parametrize(
    ("dtype", "least", "most", "itemsize"),
    [(dtype, *found) for dtype in INTEGERS for found in RANGES if found[1] <= torch.iinfo(dtype).max],
)
def test_integers_travel_in_the_narrowest_type_and_arrive_in_their_own(dtype, least, most, itemsize, send):
    ids = torch.randint(least, most + 1, (64, 300)).to(dtype)
    ids[0, :2] = torch.tensor([least, most]).to(dtype)
    data = DataProto.from_dict({"ids": ids, "turned": ids.T.contiguous().T, "one": ids[:, :1].expand(64, 300)})
    assert len(pickle.dumps(data)) < 3 * ids.numel() * min(itemsize, dtype.itemsize) + 2000
    sent = send(data).batch
    for key in ("ids", "turned", "one"):
        assert sent[key].dtype == dtype
        assert torch.equal(sent[key], data.batch[key])
        sent[key].zero_()


@pytest.mark.parametrize("send", [through_store, in_band])
@pytest.mark.parametrize("odd", [200, -200, 40_000, -40_000, 2**31, -(2**31) - 1, 2**32 + 1, -(2**63), 2**63 - 1])
def test_one_large_number_in_the_middle_is_not_missed(odd, send):
    ids = torch.zeros(200, 5000, dtype=torch.int64)
    ids[100, 7] = odd
    data = DataProto.from_dict({"ids": ids, "mask": torch.ones_like(ids)})
    assert torch.equal(send(data).batch["ids"], ids)
    assert torch.equal(deserialize_tensordict(serialize_tensordict(data.batch))["ids"], ids)


def test_narrowed_integers_are_one_buffer_and_floats_their_own():
    columns = {f"ids {number}": torch.arange(9000).view(3, 3000) + number for number in range(5)}
    data = DataProto.from_dict({**columns, "old_log_probs": torch.randn(3, 3000)})
    buffers: list[pickle.PickleBuffer] = []
    pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert sorted(len(buffer.raw()) for buffer in buffers) == [9000 * 4, 5 * (9000 * 2 + 48)]  # 48: to the next 64


def test_chunks_that_are_pickled_together_share_their_large_values():
    data = DataProto.from_dict({"x": torch.zeros(8, 4)}, {"c": [["row"]] * 8}, {"note": "x" * 10_000_000})
    assert len(pickle.dumps(data.chunk(8))) < 11_000_000
    chunks = pickle.loads(pickle.dumps(data.chunk(8)))
    assert [chunk.meta_info["note"] for chunk in chunks] == [data.meta_info["note"]] * 8


@pytest.mark.parametrize("encode", [wire.encode_values, wire.pickle_values])
def test_large_values_are_not_copied_to_be_looked_at(encode):
    values = {"note": bytes(50_000_000)}
    tracemalloc.start()
    try:
        assert encode(values) == (values, False)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_what_was_sent_in_earlier_formats_still_arrives():
    ids = torch.arange(9000).view(3, 3000)
    encoded = serialize_tensordict(TensorDict({"ids": ids}, batch_size=[3]))
    del encoded["block"]
    assert encoded["tensors"]["ids"].data.dtype == np.int16
    assert torch.equal(deserialize_tensordict({**encoded, "version": 3})["ids"], ids)
    old = {**encoded, "version": 2, "tensors": {"ids": serialize_single_tensor(ids)}}
    assert torch.equal(deserialize_tensordict(old)["ids"], ids)


@pytest.mark.parametrize("place", [Place(1 << 20, "int16"), Place(64, "int16"), Place(-64, "int16"), Place(0, "int64")])
def test_a_place_that_is_not_in_the_block_is_refused(place):
    encoded = serialize_tensordict(TensorDict({"ids": torch.arange(9000).view(3, 3000)}, [3]), in_block=True)
    assert encoded["tensors"]["ids"].data == Place(0, "int16")
    encoded["tensors"]["ids"] = encoded["tensors"]["ids"]._replace(data=place)
    with pytest.raises(BatchMismatchError, match=r"9000 integers at .* are not in the 18048 bytes"):
        deserialize_tensordict(encoded)


def test_narrowed_integers_go_to_a_file_and_back_jagged_ones_too(tmp_path: Path):
    rows = [torch.arange(length) for length in (5000, 0, 300)]
    data = DataProto.from_dict({"jagged": tu.nested_tensor_from_tensor_list(rows), "mask": torch.ones(3, 9000).long()})
    data.save_to_disk(tmp_path / "data")
    assert (tmp_path / "data").stat().st_size < 5300 * 2 + 27_000 + 4000
    loaded = DataProto.load_from_disk(tmp_path / "data")
    assert rows_of(loaded) == rows_of(data)
    assert dtypes_of(loaded) == dtypes_of(data)
    loaded.batch["mask"].zero_()


@pytest.mark.parametrize(
    "packed",
    [
        ("int64", (2,), np.zeros(3, np.int8)),
        ("int16", (3,), np.zeros(3, np.int32)),
        ("float32", (3,), np.zeros(3, np.int8)),
    ],
)
def test_integers_that_are_not_those_of_the_tensor_are_refused(packed):
    with pytest.raises(BatchMismatchError, match="are no tensor of shape"):
        deserialize_single_tensor(packed)
