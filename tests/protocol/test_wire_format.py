"""Pickling, and what arrives on the other side."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from envelopes import dtypes_of, envelope, rows_of
from tensordict import TensorDict

from protocol import BatchMismatchError, DataProto, decode_tensordict, encode_tensordict, stage
from protocol import tensordict_utils as tu

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
DTYPES += [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.complex64]


def through_store(value: Any) -> Any:
    """Pickle as an object store does: buffers out of band, and read-only on arrival."""
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(payload, buffers=[bytes(buffer.raw()) for buffer in buffers])


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
    got = decode_tensordict(send(encode_tensordict(td)))
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
    encoded = encode_tensordict(TensorDict({}, batch_size=[1]))
    with pytest.raises(BatchMismatchError, match="format 99, this side reads"):
        decode_tensordict({**encoded, "version": 99})


def test_ray_delivers_envelopes_that_can_be_written_without_touching_the_store(ray_cluster):
    import ray

    data = envelope(3, a=1)
    reference = ray.put(data)
    ray.get(reference).batch["matrix"].fill_(-1)
    assert rows_of(ray.get(reference)) == rows_of(data)
    encoded = ray.put(encode_tensordict(data.to_tensordict()))
    decode_tensordict(ray.get(encoded))["matrix"].fill_(-1)
    assert rows_of(DataProto.from_tensordict(decode_tensordict(ray.get(encoded)))) == rows_of(data)
