"""Rollout: engines and their replicas, the weights on their way to them, and the agent loops that use them."""

from __future__ import annotations

from ppo_lib.rollout.agent_loop import (
    AgentLoopBase,
    AgentLoopManager,
    AgentLoopOutput,
    AgentSample,
    check_agent_names,
    register_agent_loop,
)
from ppo_lib.rollout.checkpoint_engine import CheckpointEngine, CheckpointEngineManager, register_checkpoint_engine
from ppo_lib.rollout.engine import (
    Cohort,
    EngineStatus,
    GenerationRequest,
    RolloutEngine,
    SamplingParams,
    TokenOutput,
)
from ppo_lib.rollout.engines import register_engine, resolve_engine_name
from ppo_lib.rollout.replica import ReplicaHandle
from ppo_lib.rollout.server import LLMServerClient, LLMServerManager
from ppo_lib.rollout.weights import WeightBucket

__all__ = [
    "AgentLoopBase",
    "AgentLoopManager",
    "AgentLoopOutput",
    "AgentSample",
    "CheckpointEngine",
    "CheckpointEngineManager",
    "Cohort",
    "EngineStatus",
    "GenerationRequest",
    "LLMServerClient",
    "LLMServerManager",
    "ReplicaHandle",
    "RolloutEngine",
    "SamplingParams",
    "TokenOutput",
    "WeightBucket",
    "check_agent_names",
    "register_agent_loop",
    "register_checkpoint_engine",
    "register_engine",
    "resolve_engine_name",
]
