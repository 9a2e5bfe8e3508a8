"""What the tests of the sglang engine share and that is no fixture."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

import psutil
from rollout_testing import Model, ppo_config

from ppo_lib.models import load_tokenizer, resolve_model_path
from ppo_lib.rollout import AgentLoopManager, CheckpointEngineManager, LLMServerManager
from ppo_lib.rollout.agent_loop import SampleHandle
from ppo_lib.single_controller import LocalWorkerGroup, RayClassWithInitArgs


class Parts:
    """A trainer's side with one sglang replica, all in this process but the engine's own processes."""

    def __init__(self, path: str, **rollout: object) -> None:
        settings = {"load_format": "dummy", "name": "sglang", "max_num_seqs": 16, **rollout}
        self.config = ppo_config(path, "reward.num_workers=0", **settings)
        section = self.config.actor_rollout_ref
        tokenizer = load_tokenizer(resolve_model_path("builtin:tiny-llama"))
        self.group = LocalWorkerGroup(None, RayClassWithInitArgs(cls=Model, path=path))
        self.servers = LLMServerManager.create(section, path, tokenizer, "sglang", "cpu", None, 1, 240.0)
        self.loops = AgentLoopManager(self.config, tokenizer, self.servers)
        self.checkpoints = CheckpointEngineManager(section.rollout.checkpoint_engine, self.group, self.servers)

    def host(self) -> psutil.Process:
        """The process that has the engine."""
        return host_of(self.servers)

    def close(self) -> None:
        self.loops.shutdown()
        self.servers.shutdown()
        self.group.shutdown()


def host_of(servers: LLMServerManager) -> psutil.Process:
    """The process that has the first engine."""
    return psutil.Process(servers.status()[0].detail["pid"])


def signal_while_it_generates(
    servers: LLMServerManager, handles: Sequence[SampleHandle], whom: Callable[[], psutil.Process], what: signal.Signals
) -> float:
    """Wait until the engine generates for these samples, then send a signal; returns when."""
    while not servers.status()[0].running:
        assert not all(handle.future.done() for handle in handles), "they were finished before they were seen to run"
        time.sleep(0.01)
    os.kill(whom().pid, what)
    return time.monotonic()


def child(host: psutil.Process, title: str) -> psutil.Process:
    """The scheduler or detokenizer below a host."""
    return next(p for p in host.children(recursive=True) if title in " ".join(p.cmdline()))
