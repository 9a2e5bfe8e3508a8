"""Section `reward`: who scores the responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ppo_lib.config.base import ConfigModel, OpenDict, Positive, Workers, follow


class CustomRewardConfig(ConfigModel):
    """A scoring function of your own."""

    path: str | None = None
    """Python file, or `pkg://module`, that defines the function; null picks a built-in scorer by `data_source`."""
    name: str = "compute_score"
    """Name of the function in that file."""
    reward_kwargs: OpenDict = {}
    """Passed to the function as keyword arguments."""


class ManagerModuleConfig(ConfigModel):
    """A reward manager of your own, for `source: importlib`."""

    path: str | None = None
    """Python file, or `pkg://module`, that defines the manager."""
    name: str = "custom_reward_manager"
    """Name of the class in that file."""


class RewardManagerConfig(ConfigModel):
    """What turns a response into one score."""

    source: Literal["register", "importlib"] = "register"
    """`register`: `name` is a registered manager; `importlib`: take `module`."""
    name: str = "naive"
    """A registered reward manager."""
    module: ManagerModuleConfig = ManagerModuleConfig()
    """For `source: importlib`."""


class RewardConfig(ConfigModel):
    """Who scores the responses, and where."""

    num_workers: Workers | None = None
    """Ray actors that score; 0 is the driver itself, null is min(8, cores)."""
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    """A scorer of your own."""
    reward_manager: RewardManagerConfig = RewardManagerConfig()
    """What turns a response into one score."""
    reward_kwargs: OpenDict = {}
    """Passed to the reward manager as keyword arguments."""
    max_response_length: Positive = follow("${data.max_response_length}", 512)
    """Most tokens of a response, for managers that penalise long ones; null follows `data.max_response_length`."""
    timeout_s: Annotated[float, Field(gt=0.0)] | None = None
    """Seconds one score may take; null is no limit of its own."""
