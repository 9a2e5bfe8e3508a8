from __future__ import annotations

import inspect
import logging
import os
import time

import pytest
import torch
from tensordict import TensorDict

from ppo_lib.errors import ConfigError, WorkerDiedError
from ppo_lib.single_controller import (
    DataProtoFuture,
    Dispatch,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    Role,
    Worker,
    create_colocated_worker_cls,
    register,
)


class Scale(Worker):
    def __init__(self, factor: int) -> None:
        self.factor = factor
        self.environment = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}

    @register(Dispatch.DP_COMPUTE_PROTO)
    def scale(self, batch: TensorDict, shift: int = 0) -> TensorDict:
        """Multiply x."""
        return TensorDict({"y": batch["x"] * self.factor + shift}, batch_size=batch.batch_size)

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def scale_later(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"x": batch["x"] * self.factor}, batch_size=batch.batch_size)

    @register()
    def place(self) -> tuple[int, int, str]:
        return self.rank, self.world_size, os.environ["RANK"]

    @register()
    def rows(self, batch: TensorDict) -> int:
        return len(batch)

    @register(Dispatch.RANK_ZERO)
    def fail(self) -> None:
        raise LookupError("no such thing")

    @register()
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def unregistered(self, x: int) -> int:
        return self.factor * x


@pytest.fixture
def group():
    return LocalWorkerGroup(None, RayClassWithInitArgs(Scale, factor=3), name_prefix="actor")


def batch():
    return TensorDict({"x": torch.arange(3)}, [3])


def test_registered_methods_are_the_groups_own_and_others_run_by_name(group):
    assert group.scale(batch(), shift=1)["y"].tolist() == [1, 4, 7]
    assert group.place() == [(0, 1, "0")]
    assert group.execute_all_sync("unregistered", 5) == [15]
    assert group.execute_rank_zero_sync("unregistered", x=5) == 15
    assert (group.world_size, group.role, group.workers[0].factor) == (1, "actor", 3)


def test_a_bound_method_shows_the_workers_documentation_and_signature_without_self(group):
    assert group.scale.__doc__ == "Multiply x."
    assert list(inspect.signature(group.scale).parameters) == ["batch", "shift"]


def test_the_environment_of_rank_0_is_there_while_the_worker_runs_and_gone_after(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    group = LocalWorkerGroup(None, RayClassWithInitArgs(Scale, 1))
    assert group.workers[0].environment["RANK"] == "0"
    assert group.workers[0].environment["MASTER_PORT"].isdigit()
    assert group.place() == [(0, 1, "0")]
    assert os.environ["RANK"] == "7"
    assert "MASTER_PORT" not in os.environ


def test_a_future_feeds_the_next_call(group):
    future = group.scale_later(batch())
    assert isinstance(future, DataProtoFuture)
    assert future.done()
    assert group.scale(future)["y"].tolist() == [0, 9, 18]
    assert group.rows(future) == [3]
    assert future.get()["x"].tolist() == [0, 3, 6]


def test_an_exception_keeps_its_class_and_names_role_rank_and_method(group):
    with pytest.raises(LookupError, match="no such thing") as caught:
        group.fail()
    assert caught.value.__notes__ == ["raised by actor rank 0 in fail"]


def test_a_call_that_takes_long_is_reported_not_interrupted(caplog):
    group = LocalWorkerGroup(None, RayClassWithInitArgs(Scale, 1), timeout_s=0.05, name_prefix="actor")
    with caplog.at_level(logging.WARNING):
        group.sleep(0.3)
    assert [r.getMessage() for r in caplog.records if "actor.sleep" in r.getMessage()]


def test_roles_of_one_process_are_spawned_apart():
    both = LocalWorkerGroup(
        None,
        create_colocated_worker_cls(
            {Role.Actor: RayClassWithInitArgs(Scale, 2), Role.Critic: RayClassWithInitArgs(Scale, 5)}
        ),
    )
    with pytest.raises(AttributeError, match=r"group\.actor or spawn"):
        both.scale(batch())
    with pytest.raises(ConfigError, match="holds actor, critic; it has no role 'ref'"):
        both.spawn({Role.RefPolicy})
    groups = both.spawn([Role.Actor, "critic"])
    assert groups["actor"].scale(batch())["y"].tolist() == [0, 2, 4]
    assert groups["critic"].scale(batch())["y"].tolist() == [0, 5, 10]
    groups["actor"].shutdown()
    with pytest.raises(WorkerDiedError, match=r"critic.scale: this group was shut down"):
        groups["critic"].scale(batch())


def test_a_misspelt_method_gets_a_suggestion(group):
    with pytest.raises(AttributeError, match="'actor' has no 'scal'; did you mean 'scale'"):
        group.scal(batch())


def test_a_method_that_would_hide_the_groups_own_is_refused():
    class Clash(Worker):
        @register()
        def shutdown(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Clash.shutdown cannot be registered"):
        LocalWorkerGroup(None, RayClassWithInitArgs(Clash))


def test_what_cannot_run_in_one_process_is_refused():
    with pytest.raises(ConfigError, match=r"the resource pool has 2: .*trainer.worker_group=ray"):
        LocalWorkerGroup(RayResourcePool([2]), RayClassWithInitArgs(Scale, 1))
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"torch sees no GPU: set trainer.device=cpu"):
            LocalWorkerGroup(None, RayClassWithInitArgs(Scale, 1), device_name="cuda")
    with pytest.raises(ConfigError, match=r"expected RayClassWithInitArgs"):
        LocalWorkerGroup(None, Scale)
    with pytest.raises(ConfigError, match="wrap the class"):
        create_colocated_worker_cls({Role.Actor: Scale})
