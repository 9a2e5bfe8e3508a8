"""Agent loops: how a row of the batch becomes a response."""

from __future__ import annotations

from ppo_lib.rollout.agent_loop.base import (
    AgentLoopBase,
    AgentLoopOutput,
    AgentSample,
    agent_loop_class,
    check_agent_names,
    register_agent_loop,
)
from ppo_lib.rollout.agent_loop.collate import collate
from ppo_lib.rollout.agent_loop.manager import AgentLoopManager, SampleHandle
from ppo_lib.rollout.agent_loop.samples import sample_seed
from ppo_lib.rollout.agent_loop.single_turn import SingleTurnAgentLoop

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopOutput",
    "AgentSample",
    "SampleHandle",
    "SingleTurnAgentLoop",
    "agent_loop_class",
    "check_agent_names",
    "collate",
    "register_agent_loop",
    "sample_seed",
]
