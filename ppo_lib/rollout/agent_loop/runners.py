"""Who runs agent loops: this process, or Ray actors that spread the work of tools and tokenisers over cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ppo_lib.config import ActorRolloutRefConfig
from ppo_lib.errors import ConfigError
from ppo_lib.rollout.agent_loop.base import AgentLoopBase, AgentLoopOutput, AgentSample, agent_loop_class
from ppo_lib.rollout.replica import call_actor, run_blocking
from ppo_lib.rollout.server import LLMServerClient

_CALLS_AT_ONCE = 1_000_000


class LoopRunner(Protocol):
    """Something that runs the agent loop of a sample."""

    async def run(self, sample: AgentSample) -> AgentLoopOutput:
        """Run it to its end."""
        ...

    def shutdown(self) -> None:
        """Free what it holds."""
        ...


class InProcessRunner:
    """Runs loops in the event loop that awaits them."""

    def __init__(self, config: ActorRolloutRefConfig, tokenizer: Any, client: LLMServerClient) -> None:
        self._arguments = (config, tokenizer, client)
        self._default = config.rollout.agent.default_agent_loop
        self._loops: dict[str, AgentLoopBase] = {}
        self._loop(self._default)  # an unknown name should not wait for the first sample

    async def run(self, sample: AgentSample) -> AgentLoopOutput:
        """See `LoopRunner.run`; the row's column `agent_name` says which loop."""
        name = sample.columns.get("agent_name") or self._default
        if not isinstance(name, str):
            raise ConfigError(
                f"sample {sample.uid}: the column agent_name holds {name!r}; expected the name of an agent loop"
            )
        return await self._loop(name).run(sample)

    def shutdown(self) -> None:
        """See `LoopRunner.shutdown`."""

    def _loop(self, name: str) -> AgentLoopBase:
        if name not in self._loops:
            self._loops[name] = agent_loop_class(name)(*self._arguments)
        return self._loops[name]


class ActorRunner:
    """Runs loops in Ray actors; sample i of a batch goes to actor i modulo their number.

    Args:
        count: How many actors.
        config: The section `actor_rollout_ref`.
        tokenizer: The policy's tokenizer.
        client: Sends requests to the replicas, which must be Ray actors.
        timeout_s: Limit of every wait.
    """

    def __init__(
        self, count: int, config: ActorRolloutRefConfig, tokenizer: Any, client: LLMServerClient, timeout_s: float
    ) -> None:
        import ray

        self._timeout_s = timeout_s
        # They take no CPU of the pool: the training ranks, which own it, wait while samples are generated.
        options = {"num_cpus": 0, "max_concurrency": _CALLS_AT_ONCE, "max_restarts": 0}
        shared = ray.put((config, tokenizer, client))
        self._actors: list[Any] = [ray.remote(_LoopActor).options(**options).remote(index) for index in range(count)]
        try:
            for index, ref in enumerate([actor.build.remote(shared) for actor in self._actors]):
                run_blocking(call_actor(ref, f"agent loop worker {index}", "start", timeout_s))
        except BaseException:
            self.shutdown()
            raise

    async def run(self, sample: AgentSample) -> AgentLoopOutput:
        """See `LoopRunner.run`."""
        index = sample.index % len(self._actors)
        ref = self._actors[index].run.remote(sample)
        return await call_actor(ref, f"agent loop worker {index}", f"run of {sample}", self._timeout_s)

    def shutdown(self) -> None:
        """See `LoopRunner.shutdown`."""
        import ray

        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor)


class _LoopActor:
    """Becomes an async Ray actor."""

    def __init__(self, index: int) -> None:
        self._name = f"agent_loop[{index}]"
        self._runner: InProcessRunner | None = None

    def __repr__(self) -> str:
        return self._name

    async def build(self, arguments: Sequence[Any]) -> None:
        self._runner = InProcessRunner(*arguments)

    async def run(self, sample: AgentSample) -> AgentLoopOutput:
        assert self._runner is not None
        return await self._runner.run(sample)
