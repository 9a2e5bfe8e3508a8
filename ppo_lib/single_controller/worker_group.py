"""What every worker group has: the registered methods of its workers, callable as if the worker were here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from ppo_lib.errors import ConfigError
from ppo_lib.single_controller.colocate import ColocatedWorkers, RayClassWithInitArgs
from ppo_lib.single_controller.decorator import Dispatch, Registration, registered_methods
from ppo_lib.single_controller.dispatch import DispatchContext, DispatchMode, RankCall, dispatch_mode, mesh_layout
from ppo_lib.single_controller.future import DataProtoFuture

__all__ = ["WorkerGroup", "members_of"]

Group = TypeVar("Group", bound="WorkerGroup")


def members_of(
    ray_cls_with_init: RayClassWithInitArgs | ColocatedWorkers, role: str | None
) -> dict[str, RayClassWithInitArgs]:
    """Role -> class with arguments. A single class goes by `role`, or by its own name."""
    if isinstance(ray_cls_with_init, ColocatedWorkers):
        return dict(ray_cls_with_init.members)
    if not isinstance(ray_cls_with_init, RayClassWithInitArgs):
        raise ConfigError(f"expected RayClassWithInitArgs(cls, ...), got a {type(ray_cls_with_init).__name__}")
    return {role or ray_cls_with_init.cls.__name__: ray_cls_with_init}


class WorkerGroup:
    """One role on `world_size` ranks. A group of several roles in one process per rank is split up with `spawn`, or
    has the group of each role as an attribute: `group.actor.update_actor(batch)`.

    Every method marked with `@register` on the worker class is a method of the group. Subclasses say how a call reaches
    a rank and how its answer comes back: `submit`, `gather`, `all_done`, `shutdown`, and `_view` (one role of several).
    """

    def __init__(self, members: dict[str, RayClassWithInitArgs], world_size: int) -> None:
        self.members = members
        self.world_size = world_size
        self._meshes: dict[str, tuple[list[int], list[int]]] = {}
        self.role = next(iter(members)) if len(members) == 1 else "+".join(members)
        if len(members) == 1:
            self._bind(members[self.role].cls)

    # what a subclass provides

    @property
    def workers(self) -> list[Any]:
        """One entry per rank: the Ray actor, or the worker itself where it lives in this process."""
        raise NotImplementedError

    def submit(self, method: str, calls: list[RankCall]) -> list[Any]:
        """Start `method` on ranks 0..len(calls)-1, without waiting; one handle per call."""
        raise NotImplementedError

    def gather(self, method: str, handles: list[Any], timeout_s: float | None = None) -> list[Any]:
        """The answers behind the handles, in rank order, within a time limit (None: the group's)."""
        raise NotImplementedError

    def all_done(self, handles: list[Any]) -> bool:
        """Whether `gather` would not have to wait."""
        raise NotImplementedError

    def shutdown(self) -> None:
        """End the workers and give back what they hold. May be called again."""
        raise NotImplementedError

    def _view(self: Group, role: str) -> Group:
        raise NotImplementedError

    # what every group does the same way

    def spawn(self: Group, prefix_set: Iterable[Any]) -> dict[str, Group]:
        """One group per role, over the same processes. Shutting one of them down ends the processes of all.

        Args:
            prefix_set: the roles wanted (`Role` or names).

        Raises:
            ConfigError: a role that is not in this group.
        """
        roles = [str(role) for role in prefix_set]
        for role in roles:
            if role not in self.members:
                raise ConfigError(f"this group holds {', '.join(self.members)}; it has no role {role!r}")
        return {role: self._view(role) for role in roles}

    def execute_all_sync(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Run any method of the worker on every rank with the same arguments; the results, rank by rank."""
        return self.execute_all_async(method, *args, **kwargs).get()

    def execute_all_async(self, method: str, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """`execute_all_sync` without waiting."""
        return self._start(method, Dispatch.ONE_TO_ALL, args, kwargs)

    def execute_rank_zero_sync(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run any method of the worker on rank 0 alone; its result."""
        return self.execute_rank_zero_async(method, *args, **kwargs).get()

    def execute_rank_zero_async(self, method: str, *args: Any, **kwargs: Any) -> DataProtoFuture:
        """`execute_rank_zero_sync` without waiting."""
        return self._start(method, Dispatch.RANK_ZERO, args, kwargs)

    def mesh_of(self, mesh_name: str) -> tuple[list[int], list[int]]:
        """(share of each rank, rank that answers for each share) of a mesh, as the ranks tell; asked once."""
        if mesh_name not in self._meshes:
            told = self.execute_all_sync("_query_dispatch_info", mesh_name)
            self._meshes[mesh_name] = mesh_layout(mesh_name, told, self.role)
        return self._meshes[mesh_name]

    def _start(
        self, method: str, mode: Dispatch | str | DispatchMode, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DataProtoFuture:
        if len(self.members) > 1:
            raise ConfigError(f"this group holds {', '.join(self.members)}: use the group of one role (spawn())")
        ranks = 1 if mode == Dispatch.RANK_ZERO else self.world_size
        context = DispatchContext(self, ranks, f"{self.role}.{method}")
        resolved = dispatch_mode(mode)
        handles = self.submit(method, resolved.calls(context, args, kwargs))
        return DataProtoFuture(self, method, handles, context, resolved)

    def _bind(self, worker_cls: type) -> None:
        for name, (function, registration) in registered_methods(worker_cls).items():
            if hasattr(type(self), name) or name in vars(self):
                raise ConfigError(
                    f"{worker_cls.__name__}.{name} cannot be registered: worker groups have a {name!r} of their own"
                )
            dispatch_mode(registration.dispatch_mode)  # an unknown mode is told here, not at the first call
            setattr(self, name, self._bound(name, function, registration))

    def _bound(self, name: str, function: Callable[..., Any], registration: Registration) -> Callable[..., Any]:
        @functools.wraps(function, assigned=("__name__", "__qualname__", "__doc__"), updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            future = self._start(name, registration.dispatch_mode, args, kwargs)
            return future.get() if registration.blocking else future

        signature = inspect.signature(function)
        call.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "members" not in vars(self):
            raise AttributeError(name)
        if name in self.members:
            return self._view(name)
        offered = sorted({name for member in self.members.values() for name in registered_methods(member.cls)})
        near = difflib.get_close_matches(name, offered, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"its registered methods are {', '.join(offered) or 'none'}"
        if name in offered:
            hint = "use the group of one role, such as group.actor or spawn()['actor']"
        raise AttributeError(f"the worker group of {self.role!r} has no {name!r}; {hint}")
