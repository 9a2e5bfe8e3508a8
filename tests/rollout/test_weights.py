from __future__ import annotations

import dataclasses
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from ppo_lib.errors import RolloutError
from ppo_lib.rollout.weights import WeightBucket, WeightLedger, WeightReceiver, buckets


class Tied(nn.Module):
    """Two names of one weight, one of its own, a saved buffer and an unsaved one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.inner = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("saved", torch.zeros(2))
        self.register_buffer("derived", torch.zeros(2), persistent=False)


def _all_tensors() -> list[tuple[str, torch.Tensor]]:
    module = Tied()
    return [(name, torch.randn_like(tensor)) for name, tensor in module.named_parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.float8_e4m3fn])
def test_a_bucket_gives_back_what_was_packed(dtype):
    tensors = [
        ("a", torch.randn(3, 5).to(dtype)),
        ("b", torch.randn(7).to(dtype)),
        ("c", torch.zeros(0, 4).to(dtype)),
        ("d", torch.tensor(2.0).to(dtype)),
        ("e", torch.randn(6, 4).to(dtype).T),
    ]
    bucket = pickle.loads(pickle.dumps(WeightBucket.pack(tensors)))
    for (name, tensor), (want_name, want) in zip(bucket.unpack(), tensors, strict=True):
        assert (name, tensor.dtype, tensor.shape) == (want_name, want.dtype, want.shape)
        assert torch.equal(tensor.float(), want.float())


def test_a_read_only_buffer_is_read_without_a_warning():
    bucket = WeightBucket.pack([("a", torch.randn(4))])
    bucket.data.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((_, tensor),) = bucket.unpack()
    assert tensor.shape == (4,)


@pytest.mark.parametrize("size", [40, 5000, 300_000])
def test_a_flipped_bit_or_a_moved_block_is_seen(size):
    bucket = WeightBucket.pack([("a", torch.randn(size, generator=torch.Generator().manual_seed(0)))])
    for place in (0, bucket.data.size // 2, bucket.data.size - 1):
        data = bucket.data.copy()
        data[place] ^= 1
        with pytest.raises(RolloutError, match="arrived damaged"):
            list(dataclasses.replace(bucket, data=data).unpack())
    swapped = np.concatenate([bucket.data[80:160], bucket.data[:80], bucket.data[160:]])
    with pytest.raises(RolloutError, match="arrived damaged"):
        list(dataclasses.replace(bucket, data=swapped).unpack())
    renamed = tuple(dataclasses.replace(entry, name="b") for entry in bucket.entries)
    with pytest.raises(RolloutError, match="arrived damaged"):
        list(dataclasses.replace(bucket, entries=renamed).unpack())


def test_exchanged_blocks_of_equal_size_are_seen():
    data = torch.randn(8 * 2048, generator=torch.Generator().manual_seed(0))
    bucket = WeightBucket.pack([("a", data)])
    moved = WeightBucket.pack([("a", torch.cat([data[4096:8192], data[:4096], data[8192:]]))])
    assert bucket.checksum != moved.checksum


def test_buckets_hold_at_most_their_size_and_a_larger_tensor_stands_alone():
    tensors = [(f"t{i}", torch.zeros(n)) for i, n in enumerate([10, 10, 100, 5, 5, 5])]
    sizes = [[entry.name for entry in bucket.entries] for bucket in buckets(iter(tensors), 80)]
    assert sizes == [["t0", "t1"], ["t2"], ["t3", "t4", "t5"]]
    assert list(buckets([], 80)) == []


def test_buckets_are_packed_one_at_a_time():
    asked = []

    def tensors():
        for i in range(4):
            asked.append(i)
            yield f"t{i}", torch.zeros(10)

    next(buckets(tensors(), 40))
    assert asked == [0, 1]


@pytest.mark.parametrize("tied_name", ["embed.weight", "head.weight", "both"])
def test_all_parameters_arrive_under_either_name_of_a_tied_weight(tied_name):
    module, sent = Tied(), dict(_all_tensors())
    weight = sent.pop("embed.weight")
    names = ["embed.weight", "head.weight"] if tied_name == "both" else [tied_name]
    receiver = WeightReceiver(module)
    for bucket in buckets([*sent.items(), *((name, weight) for name in names), ("saved", torch.ones(2))], 64):
        receiver.take(bucket)
    receiver.finish()
    assert torch.equal(module.head.weight, weight)
    assert torch.equal(module.inner.bias, sent["inner.bias"])
    assert torch.equal(module.saved, torch.ones(2))


def test_what_arrives_is_copied_and_cast_to_the_models_dtype():
    module, sent = Tied(), dict(_all_tensors())
    receiver = WeightReceiver(module)
    receiver.take(WeightBucket.pack((name, tensor.bfloat16()) for name, tensor in sent.items()))
    assert module.inner.weight.dtype == torch.float32
    assert torch.equal(module.inner.weight, sent["inner.weight"].bfloat16().float())
    before = module.inner.weight.clone()
    sent["inner.weight"].zero_()
    assert torch.equal(module.inner.weight, before)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (("inner.wieght", torch.zeros(3, 3)), "inner.wieght that the engine.* near names: inner.weight"),
        (("derived", torch.zeros(2)), "derived that the engine's model does not have"),
        (("inner.weight", torch.zeros(3, 4)), r"inner.weight with shape \(3, 4\); the engine's model has \(3, 3\)"),
        (("inner.bias", torch.zeros(3)), "inner.bias twice"),
    ],
)
def test_a_wrong_tensor_is_named(tensor, message):
    receiver = WeightReceiver(Tied())
    receiver.take(WeightBucket.pack([("inner.bias", torch.zeros(3))]))
    with pytest.raises(RolloutError, match=message):
        receiver.take(WeightBucket.pack([tensor]))


def test_missing_parameters_are_counted_and_named():
    receiver = WeightReceiver(Tied())
    receiver.take(WeightBucket.pack([("inner.bias", torch.zeros(3))]))
    with pytest.raises(RolloutError, match=r"left out 2 of 3 parameters: embed.weight, inner.weight"):
        receiver.finish()


def test_a_bucket_that_stays_on_its_device_holds_and_sums_up_to_the_same():
    tensors = [("a", torch.randn(5, 3)), ("b", torch.randn(7).bfloat16()), ("c", torch.arange(40_000))]
    host, device = WeightBucket.pack(tensors), WeightBucket.pack(tensors, torch.device("cpu"))
    assert isinstance(device.data, torch.Tensor)
    assert (device.entries, device.checksum) == (host.entries, host.checksum)
    for (name, tensor), (sent_name, sent) in zip(device.unpack(), tensors, strict=True):
        assert name == sent_name
        assert torch.equal(tensor, sent)
    device.data[3] ^= 1
    with pytest.raises(RolloutError, match="arrived damaged"):
        list(device.unpack())


def test_a_ledger_says_which_arrivals_are_parameters_of_their_own():
    ledger = WeightLedger(Tied())
    taken = {name: ledger.take(name, tensor.shape) for name, tensor in ledger.targets.items()}
    assert sum(taken.values()) == 3  # a tied weight counts once, a saved buffer not at all
    ledger.finish()
