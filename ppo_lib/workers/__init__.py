"""What runs on training ranks: actor, reference and critic over FSDP2 and packed rows.

Importing this package loads neither torch nor transformers; each name loads what it needs on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lib.workers.actor_worker import ActorRolloutRefWorker
    from ppo_lib.workers.critic_worker import CriticWorker
    from ppo_lib.workers.distributed import ensure_process_group
    from ppo_lib.workers.fsdp_engine import FSDPEngine
    from ppo_lib.workers.packing import MicroBatching, plan_micro_batches
    from ppo_lib.workers.training_worker import TrainingWorker

_HOME = {
    "ActorRolloutRefWorker": "actor_worker",
    "CriticWorker": "critic_worker",
    "FSDPEngine": "fsdp_engine",
    "MicroBatching": "packing",
    "TrainingWorker": "training_worker",
    "ensure_process_group": "distributed",
    "plan_micro_batches": "packing",
}

__all__ = [
    "ActorRolloutRefWorker",
    "CriticWorker",
    "FSDPEngine",
    "MicroBatching",
    "TrainingWorker",
    "ensure_process_group",
    "plan_micro_batches",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
