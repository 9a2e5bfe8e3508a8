"""Two Ray nodes on one machine, each with one CPU; run by `test_two_nodes.py` in a process of its own.

python two_nodes.py groups        # the worker group's numbers, and what the death of a node becomes
python two_nodes.py train FOLDER  # a short run of the trainer over both nodes
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from ray import cloudpickle
from ray.cluster_utils import Cluster
from tensordict import TensorDict

from ppo_lib.errors import WorkerDiedError
from ppo_lib.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker, register

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Summing(Worker):
    """Sums over all ranks, and tells where it is."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")

    @register()
    def place(self) -> tuple[int, int, int, str]:
        return self.rank, self.local_rank, self.local_world_size, ray.get_runtime_context().get_node_id()

    @register(Dispatch.DP_COMPUTE_PROTO)
    def share_of_sum(self, batch: TensorDict) -> TensorDict:
        total = batch["x"].sum()
        dist.all_reduce(total)
        return TensorDict({"y": batch["x"] / total}, batch_size=batch.batch_size)

    @register(blocking=False)
    def work_for_long(self) -> None:
        time.sleep(600)


def groups(cluster: Cluster, second: Any) -> None:
    pool = RayResourcePool([1, 1], name_prefix="two_nodes")
    started = [RayWorkerGroup(pool, RayClassWithInitArgs(Summing), name_prefix="actor") for _ in range(2)]
    places = [group.place() for group in started]
    assert places[0] == places[1], "the ranks of a pool stay on their nodes"
    assert [place[:3] for place in places[0]] == [(0, 0, 1), (1, 0, 1)], places
    assert len({place[3] for place in places[0]}) == 2
    x = torch.arange(1.0, 6.0)
    result = started[0].share_of_sum(TensorDict({"x": x}, batch_size=[5]))
    expected = x / (x.sum() + x[0])  # five rows on two ranks: the first is repeated as padding
    torch.testing.assert_close(result["y"], expected)
    future = started[0].work_for_long()
    idle = started[1]
    gone = next(rank for rank, _, _, node in places[0] if node == second.node_id)  # Ray says which rank a node has
    began = time.monotonic()
    cluster.remove_node(second, allow_graceful=False)
    for call in (future.get, idle.place):
        with pytest.raises(WorkerDiedError, match=rf"actor rank {gone} \(pid ") as died:
            call()
        print(f"after {time.monotonic() - began:.1f} s: {died.value}", flush=True)
    assert time.monotonic() - began < 90
    for group in started:
        group.shutdown()


def train(folder: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
    from runs import PPO, run

    run(
        Path(folder),
        *PPO,
        "trainer.worker_group=ray",
        "trainer.nnodes=2",
        f"ray_kwargs.ray_init.address={os.environ['RAY_ADDRESS']}",
    )


def two_nodes(attempts: int = 3) -> tuple[Cluster, Any]:
    """A cluster and its second node. Ray gives a node 30 s to come up, which a busy machine may not hold."""
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=1, object_store_memory=200 << 20)
        return cluster, cluster.add_node(num_cpus=1, object_store_memory=200 << 20)
    except Exception as error:
        cluster.shutdown()
        if attempts == 1 or "timed out during startup" not in str(error):
            raise
        return two_nodes(attempts - 1)


def main() -> None:
    cluster, second = two_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        ray.init(address=cluster.address, logging_level="warning")
        cluster.wait_for_nodes()
        groups(cluster, second) if sys.argv[1] == "groups" else train(sys.argv[2])
    finally:
        ray.shutdown()
        cluster.shutdown()
    print("done", flush=True)


if __name__ == "__main__":
    main()
