from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import psutil
import pytest
from rollout_testing import run

from ppo_lib.errors import RolloutError, StaleWeightsError, WorkerDiedError, WorkerTimeoutError
from ppo_lib.rollout import LLMServerManager
from ppo_lib.rollout.replica import ReplicaHandle
from ppo_lib.rollout.sglang import process


class MortalReplica(ReplicaHandle):
    """A replica that is dead when it is told to be."""

    dead = False

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        if self.dead:
            raise WorkerDiedError("no engine")

    def restart(self, timeout_s: float) -> None:
        self.dead = False
        self.restarts += 1

    def shutdown(self) -> None:
        self.dead = True


def test_requests_wait_until_a_restarted_replica_has_its_weights_whatever_it_told_them_meanwhile():
    replica, weights = MortalReplica(0), threading.Event()
    servers = LLMServerManager([replica], 20.0, max_restarts=2)
    servers.give_weights = lambda _: weights.wait(20.0)

    async def scene() -> None:
        replica.dead = True
        waiting = [asyncio.create_task(servers.recover(0, 0, WorkerDiedError("it died")))]
        while not replica.restarts:
            await asyncio.sleep(0.001)
        for restarts, error in [(0, RolloutError("it was shut down")), (1, StaleWeightsError("it has no weights"))]:
            waiting.append(asyncio.create_task(servers.recover(0, restarts, error)))
        done, _ = await asyncio.wait(waiting, timeout=0.05)
        assert not done
        weights.set()
        await asyncio.gather(*waiting)
        await servers.recover(0, 0, RolloutError("told late"))  # it was restarted since

    run(scene())
    assert replica.restarts == 1


def test_a_replica_that_was_well_once_is_looked_at_again_the_next_time():
    replica = MortalReplica(0)
    servers = LLMServerManager([replica], 20.0, max_restarts=1)

    async def scene() -> None:
        for error in (WorkerTimeoutError("too slow"), RolloutError("too long")):
            with pytest.raises(type(error), match=str(error)):
                await servers.recover(0, 0, error)
        replica.dead = True
        await servers.recover(0, 0, WorkerDiedError("it died"))
        replica.dead = True
        with pytest.raises(WorkerDiedError, match="it died again"):
            await servers.recover(0, 1, WorkerDiedError("it died again"))

    run(scene())
    assert replica.restarts == 1


def test_a_host_that_reads_nothing_is_ended_and_named(monkeypatch):
    monkeypatch.setattr(process, "SEND_LIMIT_S", 1)
    host = process.HostProcess({}, dict(os.environ), process.make_folder(), fork=True, echo=False)
    os.kill(host.pid, signal.SIGSTOP)
    with pytest.raises(WorkerDiedError, match="it read nothing for 1 s"):
        host.submit("generate", bytes(8 << 20)).result(30.0)
    host.end()
    assert not psutil.pid_exists(host.pid)
    assert not os.path.exists(host.folder)
