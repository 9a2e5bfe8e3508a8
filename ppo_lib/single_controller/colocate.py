"""A worker class with its arguments, and several of them that share one process per rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ppo_lib.errors import ConfigError

__all__ = ["ColocatedWorkers", "RayClassWithInitArgs", "create_colocated_worker_cls", "plain_class"]


def plain_class(cls: Any) -> type:
    """The class behind `ray.remote(cls)`, or the class itself: worker groups take either."""
    metadata = getattr(cls, "__ray_metadata__", None)
    if metadata is not None:
        cls = metadata.modified_class
        cls = getattr(cls, "__ray_actor_class__", cls)
    if not isinstance(cls, type):
        raise ConfigError(f"a worker class was expected, got {cls!r} of type {type(cls).__name__}")
    return cls


class RayClassWithInitArgs:
    """A worker class (plain or `ray.remote`) and what each rank constructs it with. Needs no Ray."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = plain_class(cls)
        self.args = args
        self.kwargs = kwargs

    def build(self) -> Any:
        """A new worker, in this process."""
        return self.cls(*self.args, **self.kwargs)

    def __repr__(self) -> str:
        return f"RayClassWithInitArgs({self.cls.__name__})"


@dataclass(frozen=True)
class ColocatedWorkers:
    """Role -> class with arguments; on every rank all of them live in one process, built in this order."""

    members: dict[str, RayClassWithInitArgs]


def create_colocated_worker_cls(class_dict: Mapping[Any, RayClassWithInitArgs]) -> ColocatedWorkers:
    """Put several roles into one process per rank. A worker group of it is taken apart again with `spawn`.

    The workers of a process see one another as `self.fused_worker_dict[role]`, without a way through the driver.

    Args:
        class_dict: role (a `Role` or a name) -> class with arguments.

    Raises:
        ConfigError: no role at all, or a value that is not a `RayClassWithInitArgs`.
    """
    if not class_dict:
        raise ConfigError("create_colocated_worker_cls needs at least one role")
    for role, member in class_dict.items():
        if not isinstance(member, RayClassWithInitArgs):
            raise ConfigError(
                f"role {role} is given a {type(member).__name__}; wrap the class: RayClassWithInitArgs(cls, ...)"
            )
    return ColocatedWorkers({str(role): member for role, member in class_dict.items()})
