"""`@register`: what turns a worker's method into one that the driver can call on the whole group.

The decorator only marks the method. A worker group reads the mark, and on a call splits the arguments over its ranks,
runs the method on each and collects the results, as the named mode says (see `dispatch.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ppo_lib.single_controller.dispatch import DispatchMode

__all__ = ["Dispatch", "Execute", "Registration", "register", "registered_methods"]

_MARK = "_ppo_lib_registration"
F = TypeVar("F", bound=Callable[..., Any])


class Dispatch(Enum):
    """The built-in modes. Others come from `register_dispatch_mode(name, split, collect)` and go by their name."""

    RANK_ZERO = "rank_zero"
    """Rank 0 alone, arguments as they are; gives rank 0's result."""
    ONE_TO_ALL = "one_to_all"
    """Every rank gets the same arguments; gives the list of results, rank by rank."""
    ALL_TO_ALL = "all_to_all"
    """Every argument is a list with one entry a rank; gives the list of results."""
    DP_COMPUTE = "dp_compute"
    """The same as ALL_TO_ALL, for entries that are one data-parallel rank's share of the work."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Batches are cut into contiguous runs of rows, other arguments go to every rank; gives one batch, in order."""
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    """The same, with a function as the first argument, which every rank gets."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Split like DP_COMPUTE_PROTO; every rank returns the same (already reduced) result, and rank 0's is given."""


class Execute(Enum):
    """Which ranks run a method."""

    ALL = "all"
    RANK_ZERO = "rank_zero"


@dataclass(frozen=True)
class Registration:
    """What `@register` was given."""

    dispatch_mode: Dispatch | str | DispatchMode
    execute_mode: Execute
    blocking: bool


def register(
    dispatch_mode: Dispatch | str | DispatchMode = Dispatch.ONE_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
) -> Callable[[F], F]:
    """Make a worker's method callable on its group.

    Args:
        dispatch_mode: a `Dispatch`, the name of a mode added with `register_dispatch_mode`, or a `DispatchMode` itself.
        execute_mode: with `Execute.RANK_ZERO`, rank 0 alone runs it and the result is rank 0's.
        blocking: if False, the call returns a `DataProtoFuture` at once.

    Raises:
        ValueError: `Execute.RANK_ZERO` with a mode that splits its arguments: the other ranks' share would be lost.
    """
    if dispatch_mode == Dispatch.RANK_ZERO:
        execute_mode = Execute.RANK_ZERO
    if execute_mode == Execute.RANK_ZERO:
        if dispatch_mode not in (Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL):
            raise ValueError(
                f"execute_mode=Execute.RANK_ZERO with {dispatch_mode} would drop the other ranks' share; "
                f"use Dispatch.RANK_ZERO"
            )
        dispatch_mode = Dispatch.RANK_ZERO
    registration = Registration(dispatch_mode, execute_mode, blocking)

    def mark(method: F) -> F:
        setattr(method, _MARK, registration)
        return method

    return mark


def registered_methods(worker_cls: type) -> dict[str, tuple[Callable[..., Any], Registration]]:
    """Name -> (function, registration) of a worker class, inherited methods included.

    A method overridden without `@register` keeps its parent's registration: what the driver calls does not change
    because a subclass changes how it is done.
    """
    found: dict[str, tuple[Callable[..., Any], Registration]] = {}
    for base in reversed(worker_cls.__mro__):
        for name, member in vars(base).items():
            registration = getattr(member, _MARK, found[name][1] if name in found else None)
            if registration is not None and callable(member):
                found[name] = (member, registration)
    return found
