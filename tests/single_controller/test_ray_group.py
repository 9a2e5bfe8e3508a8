"""Two ranks in two Ray processes, sharing a gloo process group."""

from __future__ import annotations

import gc
import os
import sys
import time

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from ray import cloudpickle
from tensordict import TensorDict

from ppo_lib.errors import BatchMismatchError, ConfigError
from ppo_lib.single_controller import (
    Dispatch,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Role,
    Worker,
    create_colocated_worker_cls,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    watch,
)
from ppo_lib.single_controller.future import _NOT_YET
from protocol import DataProto
from protocol import tensordict_utils as tu

cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Scale(Worker):
    def __init__(self, factor: int) -> None:
        self.factor = factor
        if not dist.is_initialized():  # the roles of one process share its process group
            dist.init_process_group("gloo")

    @register()
    def place(self) -> dict:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "omp": os.environ["OMP_NUM_THREADS"],
        }

    @register(Dispatch.DP_COMPUTE_PROTO)
    def scale(self, batch: TensorDict) -> TensorDict:
        x = batch["x"]
        y = torch.nested.nested_tensor_from_jagged(x.values() * self.factor, x.offsets())
        return TensorDict({"y": y, "by": torch.full((len(batch),), self.rank)}, batch_size=batch.batch_size)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def scale_later(self, batch: TensorDict) -> TensorDict:
        result = self.scale(batch)
        result.rename_key_("y", "x")
        result["pid"] = torch.full((len(batch),), os.getpid())
        return result

    @register()
    def tell(self, mesh_name: str, places: list) -> None:
        self._register_dispatch_collect_info(mesh_name, *places[self.rank])

    @register(make_nd_compute_dataproto_dispatch_fn("together"))
    def scale_together(self, batch: TensorDict) -> TensorDict:
        return self.scale(batch)

    @register(make_nd_compute_dataproto_dispatch_fn("swapped"), blocking=False)
    def scale_swapped(self, batch: TensorDict) -> TensorDict:
        result = self.scale(batch)
        result.rename_key_("y", "x")
        return result

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def map_rows(self, function, batch: TensorDict, by: int) -> TensorDict:
        return function(batch, by, self.rank)

    @register(Dispatch.DP_COMPUTE_METRIC)
    def total(self, batch: TensorDict) -> dict[str, float]:
        total = batch["response_mask"].sum()
        dist.all_reduce(total)
        return {"actor/total": float(total)}

    @register(Dispatch.DP_COMPUTE_PROTO)
    def relabel(self, data: DataProto) -> DataProto:
        data.batch["x"] += 1
        return data

    @register(Dispatch.RANK_ZERO)
    def double_in_place(self, x: torch.Tensor, array: np.ndarray, batch: TensorDict) -> TensorDict:
        batch["x"].mul_(2)
        return batch

    @register()
    def fail_on(self, rank: int) -> int:
        if self.rank == rank:
            raise LookupError(f"no such thing on rank {rank}")
        return self.rank


@pytest.fixture(scope="module")
def groups(ray_cluster):
    pool = RayResourcePool([2], name_prefix="test_pool")
    both = create_colocated_worker_cls(
        {Role.Actor: RayClassWithInitArgs(Scale, 3), Role.Critic: RayClassWithInitArgs(Scale, factor=5)}
    )
    started = RayWorkerGroup(pool, both, timeout_s=120)
    yield started.spawn({Role.Actor, Role.Critic})
    started.shutdown()


def jagged_batch(lengths):
    rows = [torch.arange(10 * i, 10 * i + n, dtype=torch.float32) for i, n in enumerate(lengths)]
    return TensorDict({"x": tu.nested_tensor_from_tensor_list(rows)}, batch_size=[len(rows)])


def rows_of(column):
    return [row.tolist() for row in column.unbind()]


def test_ranks_know_their_place_and_share_the_cores(groups):
    places = groups["actor"].place()
    assert [(p["rank"], p["world_size"], p["local_rank"]) for p in places] == [(0, 2, 0), (1, 2, 1)]
    assert len({p["pid"] for p in places}) == 2
    cores = len(os.sched_getaffinity(0))
    expected = int(os.environ.get("OMP_NUM_THREADS") or max(1, cores // 2))
    assert {(p["threads"], p["omp"]) for p in places} == {(expected, str(expected))}


def test_roles_of_one_rank_live_in_one_process(groups):
    assert [p["pid"] for p in groups["actor"].place()] == [p["pid"] for p in groups["critic"].place()]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_are_spread_and_come_back_as_from_a_local_group(groups, rows):
    batch = jagged_batch([3, 1, 4, 2, 2][:rows])
    result = groups["critic"].scale(batch)
    assert rows_of(result["y"]) == [[5 * x for x in row] for row in rows_of(batch["x"])]
    assert result["by"].tolist() == ([0] * ((rows + 1) // 2) + [1] * rows)[:rows]
    result["y"].values().add_(1)  # what comes back is ours to write to


def test_padding_does_not_enter_an_all_reduced_metric(groups):
    batch = TensorDict({"response_mask": torch.ones(3, 4, dtype=torch.long)}, [3])
    assert groups["actor"].total(batch) == {"actor/total": 12.0}


def test_a_dataproto_travels_with_its_columns_and_the_drivers_is_not_written_to(groups):
    uid = np.array([["a"], {"b": 1}, None], dtype=object)
    data = DataProto.from_dict({"x": torch.arange(3)}, {"uid": uid}, meta_info={"temperature": 0.7})
    result = groups["actor"].relabel(data)
    assert result.batch["x"].tolist() == [1, 2, 3]
    assert result.non_tensor_batch["uid"].tolist() == [["a"], {"b": 1}, None]
    assert result.meta_info["temperature"] == 0.7
    assert data.batch["x"].tolist() == [0, 1, 2]


def test_a_rank_may_write_to_what_it_receives(groups):
    batch = TensorDict({"x": torch.ones(2)}, [2])
    result = groups["actor"].double_in_place(torch.ones(1), np.ones(1), batch)
    assert result["x"].tolist() == [2, 2]
    assert batch["x"].tolist() == [1, 1]


def test_a_future_hands_each_rank_its_own_rows(groups):
    batch = jagged_batch([1, 2, 3, 4])
    future = groups["actor"].scale_later(batch)
    result = groups["critic"].scale(future)
    assert rows_of(result["y"]) == [[15 * x for x in row] for row in rows_of(batch["x"])]
    pids = [p["pid"] for p in groups["actor"].place()]
    assert future.get()["pid"].tolist() == [pids[0]] * 2 + [pids[1]] * 2
    assert future.done()


def test_a_future_of_padded_rows_goes_on_with_its_padding(groups):
    batch = jagged_batch([1, 2, 3])
    future = groups["actor"].scale_later(batch)
    assert rows_of(groups["critic"].scale(future)["y"]) == [[15 * x for x in row] for row in rows_of(batch["x"])]
    assert future._result is _NOT_YET
    with pytest.raises(BatchMismatchError, match="same number of rows"):
        groups["actor"]._start("scale", Dispatch.DP_COMPUTE_PROTO, (groups["actor"].scale_later(batch), batch[:2]), {})


def test_a_chain_of_futures_never_comes_to_the_driver(groups, monkeypatch):
    import ray

    fetched, get = [], ray.get
    monkeypatch.setattr(ray, "get", lambda refs, **kwargs: fetched.append(refs) or get(refs, **kwargs))
    batch = jagged_batch([40_000, 50_000, 60_000])  # more than Ray would send along with the answer
    first = groups["actor"].scale_later(batch)
    second = groups["critic"].scale_later(first)
    result = groups["actor"].scale(second)
    assert torch.equal(result["y"].values(), 3 * 5 * 3 * batch["x"].values())
    handles = {*first.handles, *second.handles}
    assert not handles & set(fetched)
    assert len(fetched) == 2  # the two shares of the last answer


def test_a_mesh_sends_one_share_to_the_ranks_of_a_data_parallel_rank_and_hears_the_one_that_collects(
    groups, monkeypatch
):
    import ray

    actor, batch = groups["actor"], jagged_batch([1, 2, 3])
    with pytest.raises(ConfigError, match="Scale has not told its place in mesh 'together'"):
        actor.scale_together(batch)
    actor.tell("together", [(0, False), (0, True)])
    actor.scale_together(batch)  # the group asks once
    stored, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    result = actor.scale_together(batch)
    assert rows_of(result["y"]) == [[3 * x for x in row] for row in rows_of(batch["x"])]
    assert result["by"].tolist() == [1, 1, 1]
    assert len(stored) == 1  # for both ranks
    future = actor._start("scale", make_nd_compute_dataproto_dispatch_fn("together"), (batch,), {})
    assert ray.get(future.handles[0]) is None  # the other rank's rows do not travel
    assert future.get()["by"].tolist() == [1, 1, 1]


def test_a_mesh_may_number_its_ranks_as_it_likes_and_feeds_the_next_call(groups):
    actor, batch = groups["actor"], jagged_batch([1, 2, 3])
    actor.tell("swapped", [(1, True), (0, True)])
    future = actor.scale_swapped(batch)
    result = groups["critic"].scale(future)  # rank 0 gets the share that rank 1 of the actor holds
    assert rows_of(result["y"]) == [[15 * x for x in row] for row in rows_of(batch["x"])]
    assert future._result is _NOT_YET
    assert future.get()["by"].tolist() == [1, 1, 0]


def test_a_function_goes_to_every_rank(groups):
    batch = jagged_batch([1, 2, 3])

    def add(rows: TensorDict, by: int, rank: int) -> TensorDict:
        x = rows["x"]
        y = torch.nested.nested_tensor_from_jagged(x.values() + by, x.offsets())
        return TensorDict({"y": y, "rank": torch.full((len(rows),), rank)}, batch_size=rows.batch_size)

    result = groups["actor"].map_rows(add, batch, by=7)
    assert rows_of(result["y"]) == [[x + 7 for x in row] for row in rows_of(batch["x"])]
    assert result["rank"].tolist() == [0, 0, 1]
    with pytest.raises(BatchMismatchError, match="first argument must be a function; it is a TensorDict"):
        groups["actor"].map_rows(batch, batch, by=7)


def test_what_all_ranks_share_is_stored_once(groups, monkeypatch):
    import ray

    stored = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    groups["actor"].execute_all_sync("place")
    assert stored == []
    groups["actor"].scale(jagged_batch([1, 2]))
    assert len(stored) == 2  # one shard a rank
    stored.clear()
    with pytest.raises(TypeError):
        groups["actor"].execute_all_sync("place", np.ones(10))
    assert len(stored) == 1  # the same array for both


def test_an_exception_keeps_its_class_and_names_role_rank_and_method_and_the_group_goes_on(groups):
    with pytest.raises(LookupError, match="no such thing on rank 1") as caught:
        groups["critic"].fail_on(1)
    assert caught.value.__notes__[0].startswith("raised by critic rank 1 (pid ")
    assert caught.value.__notes__[0].endswith("in fail_on")
    assert "in fail_on" in str(caught.value.__cause__)  # the traceback on the rank
    assert "\x1b" not in str(caught.value.__cause__)
    assert groups["critic"].fail_on(5) == [0, 1]


def test_local_and_ray_groups_offer_the_same(groups):
    local = LocalWorkerGroup(None, RayClassWithInitArgs(Scale, 3), name_prefix="actor")
    try:
        batch = jagged_batch([2, 3])
        assert rows_of(local.scale(batch)["y"]) == rows_of(groups["actor"].scale(batch)["y"])
        offered = {n for n in dir(groups["actor"]) if not n.startswith("_")}
        assert {n for n in dir(local) if not n.startswith("_")} == offered - {"from_detached"}
    finally:
        dist.destroy_process_group()


def test_a_device_that_the_pool_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="device 'cuda' on pool 'bare', which has no GPUs"):
        RayWorkerGroup(RayResourcePool([1], name_prefix="bare"), RayClassWithInitArgs(Scale, 1), device_name="cuda")


def test_shutdown_ends_the_processes_and_frees_the_slots(ray_cluster, no_leftovers):
    import ray

    pool = RayResourcePool([1], name_prefix="short")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Plain)), timeout_s=60, num_threads=3)
    pid, threads = group.pid()[0]
    assert threads == "3"
    reserved, _ = pool.bundle(0)
    group.shutdown()
    group.shutdown()
    assert not psutil.pid_exists(pid)
    assert ray.util.placement_group_table(reserved)["state"] == "REMOVED"


def test_watches_end_with_their_groups_and_all_of_them_before_ray_does(ray_cluster, monkeypatch):
    monkeypatch.setattr(watch, "_watches", watches := {})
    pools = [RayResourcePool([1], name_prefix=f"watched{index}") for index in range(2)]
    first, second = (RayWorkerGroup(pool, RayClassWithInitArgs(Plain), timeout_s=60) for pool in pools)
    assert len(watches) == 2
    first.shutdown()
    deadline = time.monotonic() + 10
    while len(watches) > 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    watch._end_all()
    assert not watches
    second.shutdown()


class Plain(Worker):
    @register()
    def pid(self) -> tuple[int, str]:
        return os.getpid(), os.environ["OMP_NUM_THREADS"]


def test_a_group_that_is_dropped_without_shutdown_leaves_nothing(ray_cluster, no_leftovers):
    pool = RayResourcePool([1], name_prefix="dropped")
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Plain), timeout_s=60)
    pid = group.pid()[0][0]
    reserved, _ = pool.bundle(0)
    del group, pool
    import gc

    import ray

    gc.collect()
    assert no_leftovers.survivors({pid}) == set()
    assert ray.util.placement_group_table(reserved)["state"] == "REMOVED"


class Counter(Worker):
    def __init__(self, start: int) -> None:
        self.count = start

    @register()
    def add(self, number: int) -> int:
        self.count += number
        return self.count

    @register()
    def count_of_all(self) -> int:
        return sum(worker.count for worker in self.fused_worker_dict.values())


def test_workers_of_a_process_see_one_another_and_a_group_has_its_roles_as_attributes():
    classes = {"actor": RayClassWithInitArgs(Counter, 1), "critic": RayClassWithInitArgs(Counter, 10)}
    both = LocalWorkerGroup(None, create_colocated_worker_cls(classes))
    assert both.actor.add(2) == [3]
    assert both.critic.count_of_all() == [13]
    both.shutdown()


def test_a_detached_group_outlives_what_built_it_and_is_found_again(groups, no_leftovers):
    with pytest.raises(ConfigError, match="no detached worker group 'counter' runs"):
        RayWorkerGroup.from_detached("counter", RayClassWithInitArgs(Counter))
    with pytest.raises(ConfigError, match=r"detached=True"):
        RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Counter, 1), detached=True, name_prefix="counter")
    pool = RayResourcePool([1], name_prefix="kept", detached=True)
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Counter, 5), detached=True, name_prefix="counter")
    assert group.add(1) == [6]
    del group, pool
    gc.collect()
    found = RayWorkerGroup.from_detached("counter", RayClassWithInitArgs(Counter))
    assert (found.world_size, found.add(1)) == (1, [7])
    with pytest.raises(ConfigError, match="hosts counter, not other"):
        RayWorkerGroup.from_detached("counter", create_colocated_worker_cls({"other": RayClassWithInitArgs(Counter)}))
    found.shutdown()
    rest = RayResourcePool([2], name_prefix="all that `groups` leaves of four is free again")
    rest.bundle(0)
    rest.shutdown()
