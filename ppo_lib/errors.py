"""Errors raised on purpose. Each inherits `PPOLibError` and the builtin a caller would expect to catch."""

from __future__ import annotations

from protocol.errors import BatchMismatchError, FieldMissingError, PPOLibError

__all__ = [
    "BatchMismatchError",
    "CheckpointCorruptError",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "EngineAsleepError",
    "FieldMissingError",
    "ModelError",
    "PPOLibError",
    "RewardError",
    "RolloutError",
    "StaleWeightsError",
    "TooFewGroupsError",
    "WorkerDiedError",
    "WorkerTimeoutError",
]


class ConfigError(PPOLibError, ValueError):
    """A configuration that cannot run: an unknown key, a wrong type, numbers that do not fit together."""


class DataError(PPOLibError, ValueError):
    """A data file that is missing, damaged, empty, or whose rows lack what training needs."""


class ModelError(PPOLibError, OSError):
    """A model or tokenizer that cannot be found or loaded."""


class RewardError(PPOLibError, RuntimeError):
    """A scorer failed on a sample, or returned something that is not a finite number."""


class WorkerDiedError(PPOLibError, RuntimeError):
    """A worker process ended while it was needed."""


class WorkerTimeoutError(PPOLibError, TimeoutError):
    """A worker did not answer within its time limit."""


class RolloutError(PPOLibError, RuntimeError):
    """A rollout engine could not serve a request."""


class TooFewGroupsError(PPOLibError, RuntimeError):
    """Group filtering found too few prompts whose rollouts differ."""


class StaleWeightsError(RolloutError):
    """A rollout engine holds weights older than the ones asked for."""


class EngineAsleepError(RolloutError):
    """A rollout engine was asked to generate while it sleeps."""


class CheckpointError(PPOLibError, OSError):
    """A checkpoint could not be written, found or read."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint is there but incomplete or altered."""
