from __future__ import annotations

import time

import pytest
import ray

from ppo_lib.errors import ConfigError, WorkerTimeoutError
from ppo_lib.single_controller import (
    RayResourcePool,
    ResourcePoolManager,
    Role,
    merge_resource_pool,
    split_resource_pool,
)
from ppo_lib.single_controller import resource_pool as module


def state(group):
    return ray.util.placement_group_table(group)["state"]


def test_ranks_lie_in_their_nodes_bundles_in_order(ray_cluster):
    pool = RayResourcePool([2, 1], name_prefix="two_nodes")
    try:
        places = [pool.bundle(rank) for rank in range(3)]
        assert [index for _, index in places] == [0, 1, 0]
        assert places[0][0] == places[1][0] != places[2][0]
        assert [state(group) for group in pool.placement_groups()] == ["CREATED", "CREATED"]
        assert pool.world_size == 3
        with pytest.raises(ConfigError, match="'two_nodes' has 3 ranks"):
            pool.bundle(3)
    finally:
        pool.shutdown()
    assert [state(group) for group, _ in places] == ["REMOVED"] * 3


def test_a_slot_is_shared_out_among_the_processes_in_it(ray_cluster):
    pool = RayResourcePool([1])
    assert (pool.cpu_share, pool.gpu_share) == (0.5, 0.0)
    assert RayResourcePool([1], use_gpu=True, max_colocate_count=4).gpu_share == 0.25


def test_a_pool_larger_than_the_cluster_is_refused_at_once_with_what_to_change(ray_cluster):
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"'big' need 5 CPUs.* cluster has 4 on 1 node.*ray_kwargs.ray_init.num_cpus"):
        RayResourcePool([5], name_prefix="big").bundle(0)
    with pytest.raises(ConfigError, match=r"'gpus' need 1 GPUs.* the Ray cluster has 0 .*trainer.device=cpu"):
        RayResourcePool([1], use_gpu=True, name_prefix="gpus").bundle(0)
    assert time.monotonic() - started < 2


def test_slots_that_stay_taken_are_an_error_in_bounded_time_and_nothing_stays_reserved(ray_cluster, monkeypatch):
    monkeypatch.setattr(module, "READY_TIMEOUT_S", 1.0)
    holder = RayResourcePool([3], name_prefix="holder")
    waiting = RayResourcePool([2], name_prefix="waiting")
    holder.bundle(0)
    try:
        with pytest.raises(WorkerTimeoutError, match=r"'waiting': .* within 1 s \(1 of 4 CPUs free.*shut down"):
            waiting.bundle(0)
    finally:
        holder.shutdown()
    waiting.bundle(0)  # nothing of the failed attempt is in the way
    waiting.shutdown()


def test_the_last_user_gives_the_slots_back(ray_cluster):
    class User: ...

    pool, first, second = RayResourcePool([1], name_prefix="shared"), User(), User()
    group, _ = pool.bundle(0)
    pool.acquire(first)
    pool.acquire(second)
    pool.release(first)
    pool.release(first)
    assert state(group) == "CREATED"
    pool.release(second)
    assert state(group) == "REMOVED"


@pytest.mark.parametrize("sizes", [[], [0], [2, -1], [1.5]])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ConfigError, match=r"ranks per node must be positive"):
        RayResourcePool(sizes)


def test_the_manager_finds_a_roles_pool_and_checks_all_pools_together(ray_cluster):
    mapping = {Role.ActorRolloutRef: "main", Role.Critic: "other"}
    manager = ResourcePoolManager({"main": [2], "other": [1, 1]}, mapping)
    assert manager.get_n_gpus() == 4
    pools = manager.create_resource_pool()
    assert manager.get_resource_pool(Role.Critic) is pools["other"]
    assert manager.create_resource_pool()["main"] is pools["main"]
    assert not pools["main"].use_gpu
    with pytest.raises(ConfigError, match="role reward_model is mapped to no resource pool; mapped are actor"):
        manager.get_resource_pool(Role.RewardModel)
    manager.shutdown()
    with pytest.raises(ConfigError, match=r"'main', 'other' need 5 CPUs"):
        ResourcePoolManager({"main": [3], "other": [2]}, mapping).create_resource_pool()
    with pytest.raises(ConfigError, match="role critic is mapped to resource pool 'othr'; there are main"):
        ResourcePoolManager({"main": [1]}, {Role.Critic: "othr"})


def test_parts_of_a_pool_keep_its_slots_and_its_reservation(ray_cluster):
    class User: ...

    pool = RayResourcePool([2, 1], name_prefix="whole")
    first, second = split_resource_pool(pool, [1, 2])
    user, other = User(), User()
    try:
        assert [p.process_on_nodes for p in (first, second)] == [[1], [1, 1]]
        assert [first.bundle(0), second.bundle(0), second.bundle(1)] == [pool.bundle(rank) for rank in range(3)]
        with pytest.raises(ConfigError, match="'whole_part1' has 2 ranks"):
            second.bundle(2)
        first.acquire(user)
        second.acquire(other)
        groups = pool.placement_groups()
        second.release(other)
        assert [state(group) for group in groups] == ["CREATED", "CREATED"]
        first.release(user)
        assert [state(group) for group in groups] == ["REMOVED", "REMOVED"]
    finally:
        pool.shutdown()


def test_pools_that_were_split_can_be_merged_in_another_order():
    pool = RayResourcePool([2, 2], name_prefix="whole")
    parts = split_resource_pool(pool, 2)
    assert [part.process_on_nodes for part in parts] == [[2], [2]]
    merged = merge_resource_pool(parts[1], parts[0])
    assert (merged.world_size, merged.process_on_nodes) == (4, [2, 2])
    assert merged.name_prefix == "whole_part1_and_whole_part0"
    with pytest.raises(ConfigError, match="slots of different kinds"):
        merge_resource_pool(pool, RayResourcePool([1], use_gpu=True))
    with pytest.raises(ConfigError, match="two resource pools or more"):
        merge_resource_pool(pool)


@pytest.mark.parametrize("size", [3, 0, [1, 2], [4, 0], [2, 2, 2]])
def test_parts_must_make_up_the_pool(size):
    with pytest.raises(ConfigError, match=r"has 4 ranks and cannot be split into .* add up to 4"):
        split_resource_pool(RayResourcePool([4]), size)


def test_addresses_compare_as_numbers():
    addresses = ["10.0.0.10", "10.0.0.9", "9.1.1.1", "host-b", "host-a"]
    assert sorted(addresses, key=module._address_key) == ["host-a", "host-b", "9.1.1.1", "10.0.0.9", "10.0.0.10"]
