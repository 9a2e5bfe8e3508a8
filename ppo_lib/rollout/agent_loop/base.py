"""What an agent loop is given, what it returns, and how loops are found by name.

An agent loop turns one row of the batch into one response: a single turn, or many with tools between them. It runs in
an event loop beside many others and must not block it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, TypeVar

from ppo_lib.algorithms.names import unknown_name
from ppo_lib.config import ActorRolloutRefConfig
from ppo_lib.errors import ConfigError, DataError, RolloutError
from ppo_lib.reward import RewardResult
from ppo_lib.rollout.engine import Cohort, FinishReason, GenerationRequest, SamplingParams, TokenOutput
from ppo_lib.rollout.server import LLMServerClient


@dataclass(frozen=True)
class AgentSample:
    """One row to generate for.

    Args:
        index: The row's place in the batch that was submitted.
        batch: Names that batch; unique in the run of the manager.
        uid: The prompt's id, shared by its group.
        session: Which rollout of the prompt this is, from 0.
        prompt_row: The row of the prompt.
        prompt_ids: The prompt's tokens, without padding.
        params: How to sample the first response; `seed` is the sample's own.
        columns: The row's object columns, as the dataset writes them.
        replica: The replica that serves this sample, at every turn.
        cohort: The samples decoded together with this one's first response; None where it does not matter.
        min_weight_version: Weights older than this are refused.
    """

    index: int
    batch: str
    uid: str
    session: int
    prompt_row: int
    prompt_ids: list[int]
    params: SamplingParams
    columns: dict[str, Any]
    replica: int
    cohort: Cohort | None
    min_weight_version: int

    def __str__(self) -> str:
        row = self.columns.get("dataset_row")
        return f"sample {self.uid} session {self.session}" + ("" if row is None else f" (dataset row {row})")


@dataclass(frozen=True)
class AgentLoopOutput:
    """One finished response.

    Args:
        index: The row of the submitted batch.
        uid: The prompt's id.
        session: Which rollout of the prompt.
        response_ids: All tokens after the prompt, those of tools included.
        response_mask: 1 for tokens of the policy, 0 for others; as long as `response_ids`.
        log_probs: One per response token (0 where the mask is 0), or None where none were asked for.
        num_turns: Messages of the conversation, prompt included: 2 for a single turn.
        finish_reason: Why the last generation ended.
        weight_version_min: Oldest weights that a token came from.
        weight_version_max: Newest weights that a token came from.
        reward: The reward loop's score, where there is one.
        timing: Seconds by activity (`generate_sequences`, `tool_calls`, `reward`).
        stats: What the engine says of its work, by metric name; see `TokenOutput`.
    """

    index: int
    uid: str
    session: int
    response_ids: list[int]
    response_mask: list[int]
    log_probs: list[float] | None
    num_turns: int
    finish_reason: FinishReason
    weight_version_min: int
    weight_version_max: int
    reward: RewardResult | None = None
    timing: dict[str, float] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)


class AgentLoopBase(ABC):
    """Base of agent loops. One instance serves many samples at the same time, so it keeps no state of a sample.

    Args:
        config: The section `actor_rollout_ref`.
        tokenizer: The policy's tokenizer.
        client: Sends requests to the replicas.
    """

    def __init__(self, config: ActorRolloutRefConfig, tokenizer: Any, client: LLMServerClient) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.client = client

    @abstractmethod
    async def run(self, sample: AgentSample) -> AgentLoopOutput:
        """Produce the response of one sample.

        Raises:
            RolloutError: It could not be produced.
        """

    async def generate(self, sample: AgentSample, prompt_ids: list[int], turn: int = 0) -> TokenOutput:
        """Have the sample's replica continue `prompt_ids`.

        Later turns are drawn with seeds of their own and join the running rows when they come: the cohort is that of
        the first.

        Raises:
            RolloutError: The engine could not, or the request was called off.
        """
        params = sample.params if turn == 0 else replace(sample.params, seed=(sample.params.seed or 0) + turn)
        request = GenerationRequest(
            request_id=f"{sample.batch}/{sample.index}/{turn}",
            prompt_ids=prompt_ids,
            params=params,
            order=(sample.prompt_row, sample.session),
            cohort=sample.cohort if turn == 0 else None,
        )
        output = await self.client.generate(request, sample.replica, sample.min_weight_version)
        if output.finish_reason == "abort":
            raise RolloutError(f"the generation of {sample} was called off after {len(output.token_ids)} tokens")
        return output


Loop = TypeVar("Loop", bound=type[AgentLoopBase])
_LOOPS: dict[str, type[AgentLoopBase]] = {}


def register_agent_loop(name: str) -> Callable[[Loop], Loop]:
    """Class decorator that makes a loop known under a name; a later one wins."""

    def decorate(cls: Loop) -> Loop:
        _LOOPS[name] = cls
        return cls

    return decorate


def check_agent_names(dataset: Any) -> None:
    """Raise before a run for a row whose `agent_name` is no agent loop: to find out at the first sample is late.

    Reads `dataset.column(name)` and `dataset.where(index)`; a dataset without them is not checked.

    Raises:
        DataError: Names file and row.
    """
    if not (hasattr(dataset, "column") and hasattr(dataset, "where")):
        return
    known: set[str] = set()
    for index, name in enumerate(dataset.column("agent_name")):
        if not name or name in known:
            continue
        try:
            agent_loop_class(str(name))
        except ConfigError as error:
            raise DataError(f"{dataset.where(index)}: column 'agent_name': {error}") from None
        known.add(name)


def agent_loop_class(name: str) -> type[AgentLoopBase]:
    """The loop registered under a name, or written `package.module:Class`.

    Raises:
        ConfigError: There is none.
    """
    if name in _LOOPS:
        return _LOOPS[name]
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute) if attribute else None
    except (ImportError, AttributeError):
        found = None
    if not (isinstance(found, type) and issubclass(found, AgentLoopBase)):
        raise unknown_name("agent loop", name, _LOOPS)
    return found
