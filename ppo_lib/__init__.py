"""PPO-family post-training of language models: one driver, one envelope, Ray worker groups, FSDP2, one rollout engine.

Importing this package loads no torch, Ray or transformers; the two names below load what they need on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lib.config import load_config
    from ppo_lib.trainer.ray_trainer import RayPPOTrainer

__version__ = "0.1.0"
__all__ = ["RayPPOTrainer", "__version__", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "RayPPOTrainer":
        from ppo_lib.trainer.ray_trainer import RayPPOTrainer

        return RayPPOTrainer
    if name == "load_config":
        from ppo_lib.config import load_config

        return load_config
    raise AttributeError(f"module 'ppo_lib' has no attribute {name!r}; it has {', '.join(__all__)}")
