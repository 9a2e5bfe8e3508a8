"""What the envelope's operations cost, against one memory copy of the bytes that they put out.

    python benchmarks/envelope.py            the table, about a minute
    python benchmarks/envelope.py --quick    small, to see that it runs
    python benchmarks/envelope.py --no-ray   without starting Ray

One batch of 1024 rows with 512 prompt and 1024 response tokens, eight tensors and five object columns. Each operation
and its copy are run in turn, in this one process, and the fastest of several runs of each is shown. The copy writes the
bytes of all tensors of the operation's result into one block fresh from the operating system, as a pickle has to; that
costs several times what a copy into memory that the process had before costs, which is shown beside it ("warm"). Below
protocol 5 a pickle takes a copy more than it needs, which is numpy's: the array's bytes as an object. Ray is held
against the same bytes as numpy arrays: as it hands them out, without a copy and read-only, and made writable by a copy,
as what the envelope's user gets is. The fastest of 41 runs in turn with each of the two is shown like everywhere, and
the median: Ray's store has memory fresh from the operating system on and off, and the fastest run of one side can fall
into a better moment than the other's.
"""

from __future__ import annotations

import argparse
import mmap
import pickle
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from protocol import DataProto

PROMPT, RESPONSE = 512, 1024


class Cost(NamedTuple):
    """One run."""

    seconds: float
    cpu_seconds: float


class Line(NamedTuple):
    """One line of the table."""

    name: str
    ours: Cost
    theirs: Cost
    warm: Cost | None  # the copy into memory that was there
    limit: float


def batch(rows: int) -> DataProto:
    """A batch as a step of PPO has it."""
    ids = torch.randint(0, 32000, (rows, PROMPT + RESPONSE))
    position_ids = torch.arange(PROMPT + RESPONSE).repeat(rows, 1)
    return DataProto.from_single_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": position_ids,
            "prompts": ids[:, :PROMPT].clone(),
            "responses": ids[:, PROMPT:].clone(),
            "response_mask": torch.ones(rows, RESPONSE, dtype=torch.int64),
            "old_log_probs": torch.randn(rows, RESPONSE),
            "advantages": torch.randn(rows, RESPONSE),
            "uid": np.array([f"{row:032x}" for row in range(rows)], dtype=object),
            "raw_prompt": [[{"role": "user", "content": f"What is {row} + {row}?"}] for row in range(rows)],
            "data_source": np.array(["arithmetic"] * rows, dtype=object),
            "reward_model": [{"style": "rule", "ground_truth": str(2 * row)} for row in range(rows)],
            "extra_info": [{"index": row, "split": "train"} for row in range(rows)],
        },
        meta_info={"temperature": 1.0, "global_steps": 7},
    )


def in_turn(ways: list[Callable[[], Any]], times: int) -> list[list[Cost]]:
    """Run the ways in turn, `times` times; their results are dropped before the clock of the next one starts."""
    costs: list[list[Cost]] = [[] for _ in ways]
    for _ in range(times):
        for way, found in zip(ways, costs):
            cpu, start = time.process_time(), time.perf_counter()
            result = way()
            found.append(Cost(time.perf_counter() - start, time.process_time() - cpu))
            del result
    return costs


def fastest(ways: list[Callable[[], Any]], times: int) -> list[Cost]:
    """The fastest run of each way."""
    return [min(found) for found in in_turn(ways, times)]


def operations(data: DataProto) -> dict[str, Callable[[], Any]]:
    """What is measured, by name. Everything is held to three copies of its output."""
    order = torch.randperm(len(data))
    left = data.select(["input_ids", "attention_mask", "position_ids", "prompts"], ["uid", "raw_prompt"])
    right = data.select(
        ["input_ids", "responses", "response_mask", "old_log_probs", "advantages"],
        ["uid", "data_source", "reward_model", "extra_info"],
    )
    moved = data.select()

    def reorder() -> DataProto:
        moved.reorder(order)
        return moved

    return {
        "pickle.loads(pickle.dumps(data))": lambda: pickle.loads(pickle.dumps(data)),
        "the same, protocol 5": lambda: pickle.loads(pickle.dumps(data, protocol=5)),
        "the same, buffers out of band, read-only": lambda: out_of_band(data),
        "repeat(8)": lambda: data.repeat(8),
        "reorder": reorder,
        "concat(chunk(8))": lambda: DataProto.concat(data.chunk(8)),
        "union": lambda: left.select().union(right),
        "to_tensordict and back": lambda: DataProto.from_tensordict(data.to_tensordict()),
    }


def out_of_band(data: DataProto) -> DataProto:
    """Through an object store: the receiver is handed memory that it may not write to."""
    buffers: list[pickle.PickleBuffer] = []
    payload = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(payload, buffers=[memoryview(buffer.raw()).toreadonly() for buffer in buffers])


def fresh_copy(tensors: list[torch.Tensor]) -> mmap.mmap:
    """The bytes of all tensors in one block that no one had before."""
    block = mmap.mmap(-1, sum(tensor.nbytes for tensor in tensors))
    copy_into(torch.frombuffer(block, dtype=torch.uint8), tensors)
    return block


def copy_into(block: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """The bytes of all tensors, one after the other."""
    at = 0
    for tensor in tensors:
        block[at : at + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        at += tensor.nbytes


def ray_lines(data: DataProto, times: int) -> list[Line]:
    """ray.put and ray.get of the envelope, and of its tensors as numpy arrays."""
    import ray

    ray.init(num_cpus=1, object_store_memory=1 << 30, include_dashboard=False, log_to_driver=False)
    arrays = {key: tensor.numpy() for key, tensor in data.batch.items()}

    def ours() -> DataProto:
        return ray.get(ray.put(data))

    def writable() -> dict[str, np.ndarray]:
        return {key: array.copy() for key, array in read_only().items()}

    def read_only() -> dict[str, np.ndarray]:
        return ray.get(ray.put(arrays))

    lines = []
    try:
        for way in (writable, read_only):
            runs = [sorted(found) for found in in_turn([ours, way], times)]
            name = f"Ray, {_megabytes(data)} MB, {way.__name__.replace('_', '-')} numpy, "
            lines += [
                Line(name + kind, *(found[at] for found in runs), None, 2.0)
                for kind, at in (("fastest", 0), ("median", times // 2))
            ]
    finally:
        ray.shutdown()
    return lines


def _megabytes(data: DataProto) -> int:
    return round(sum(tensor.nbytes for tensor in data.batch.values()) / 1e6)


def measure(rows: int, times: int, with_ray: bool) -> list[Line]:
    """All lines of the table."""
    data = batch(rows)
    lines = []
    for name, operation in operations(data).items():
        tensors = list(operation().batch.values())
        block = torch.zeros(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
        ways = [operation, lambda t=tensors: fresh_copy(t), lambda t=tensors, b=block: copy_into(b, t)]
        lines.append(Line(name, *fastest(ways, times), 3.0))
        del tensors, block, ways
    if with_ray:
        lines += ray_lines(DataProto.concat([data] * 3), 6 * times - 1)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="64 rows, two runs of each")
    parser.add_argument("--no-ray", action="store_true", help="leave Ray out")
    arguments = parser.parse_args()
    rows, times = (64, 2) if arguments.quick else (1024, 7)
    lines = measure(rows, times, not arguments.no_ray)
    print(f"{rows} rows of {PROMPT}+{RESPONSE}, {_megabytes(batch(rows))} MB, {torch.get_num_threads()} threads\n")
    heads = ("ms", 8), ("copy ms", 9), ("ratio", 7), ("limit", 7), ("CPU s", 8), ("copy CPU s", 12), ("warm ms", 9)
    print(f"{'operation':46}" + "".join(f"{head:>{width}}" for head, width in heads))
    for name, ours, theirs, warm, limit in lines:
        print(
            f"{name:46}{ours.seconds * 1e3:8.1f}{theirs.seconds * 1e3:9.1f}{ours.seconds / theirs.seconds:7.2f}"
            f"{limit:7.1f}{ours.cpu_seconds:8.3f}{theirs.cpu_seconds:12.3f}"
            + (f"{warm.seconds * 1e3:9.1f}" if warm else "")
        )


if __name__ == "__main__":
    main()
