from __future__ import annotations

import subprocess
import sys

import pytest

from ppo_lib.single_controller import Dispatch, Execute, Role, Worker, register
from ppo_lib.single_controller.decorator import registered_methods


class Base(Worker):
    @register()
    def greet(self) -> str:
        return "base"

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute(self, batch):
        return batch

    def not_for_the_driver(self) -> None: ...


class Child(Base):
    def greet(self) -> str:
        return "child"

    @register(Dispatch.RANK_ZERO)
    def compute(self, batch):
        return batch


def test_only_marked_methods_are_registered():
    assert set(registered_methods(Base)) == {"greet", "compute"}


def test_an_override_keeps_its_parents_registration_unless_it_has_one_of_its_own():
    methods = registered_methods(Child)
    assert methods["greet"][0] is Child.greet
    assert methods["greet"][1].dispatch_mode is Dispatch.ONE_TO_ALL
    assert methods["compute"][1].dispatch_mode is Dispatch.RANK_ZERO
    assert methods["compute"][1].blocking


def test_the_decorator_leaves_the_method_as_it_was():
    assert Base().greet() == "base"


def test_execute_rank_zero_with_a_splitting_mode_is_refused():
    with pytest.raises(ValueError, match="would drop the other ranks' share"):
        register(Dispatch.DP_COMPUTE_PROTO, Execute.RANK_ZERO)


def test_execute_rank_zero_is_the_rank_zero_mode():
    class Lone(Worker):
        @register(execute_mode=Execute.RANK_ZERO)
        def once(self) -> None: ...

    assert registered_methods(Lone)["once"][1].dispatch_mode is Dispatch.RANK_ZERO


def test_a_worker_outside_a_group_is_rank_0_of_1(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    worker = Worker()
    assert (worker.rank, worker.world_size, worker.local_rank, worker.local_world_size) == (0, 1, 0, 1)


def test_a_worker_knows_its_place_before_its_own_constructor_runs(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")

    class Early(Worker):
        def __init__(self) -> None:
            self.seen = (self.rank, self.world_size)

    assert Early().seen == (3, 8)


def test_roles_print_as_worker_keys():
    assert [str(role) for role in Role] == [
        "actor",
        "rollout",
        "actor_rollout",
        "critic",
        "ref",
        "reward_model",
        "actor_rollout_ref",
    ]


def test_importing_the_package_and_the_rank_process_loads_neither_ray_nor_torch():
    code = (
        "import sys, ppo_lib.single_controller as s, ppo_lib.single_controller.host\n"
        "s.register, s.Worker, s.Role, s.RayClassWithInitArgs\n"
        "print(sorted({'ray', 'torch', 'tensordict', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
