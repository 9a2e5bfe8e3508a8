"""The table of dispatch modes: how a call's arguments become one call per rank, and results become one result.

A mode is two functions:

    split(context, *args, **kwargs) -> (all_args, all_kwargs)
        all_args is a tuple with one list per positional argument, all_kwargs a dict with one list per keyword;
        entry i of each list is what rank i receives.
    collect(context, outputs) -> result
        outputs holds one result per rank that ran, in rank order.

`context` tells them the number of ranks and carries what `split` must remember for `collect` (how many rows were real).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from ppo_lib.errors import BatchMismatchError, ConfigError
from ppo_lib.single_controller.decorator import Dispatch
from ppo_lib.single_controller.future import DataProtoFuture
from ppo_lib.single_controller.rows import Batch, column_names, is_batch, join_rows, split_padded

if TYPE_CHECKING:
    from ppo_lib.single_controller.worker_group import WorkerGroup

__all__ = ["DISPATCH_MODES", "DispatchContext", "DispatchMode", "RankCall", "dispatch_mode", "register_dispatch_mode"]

SplitArguments: TypeAlias = "tuple[tuple[list[Any], ...], dict[str, list[Any]]]"
Split = Callable[..., SplitArguments]
Collect = Callable[["DispatchContext", "list[Any]"], Any]


@dataclass
class DispatchContext:
    """One call in flight."""

    group: WorkerGroup
    world_size: int
    """How many ranks run it."""
    method: str
    """`role.method`, for messages."""
    rows: int | None = None
    """Rows of the batch arguments before padding; None where there is no batch."""


class RankCall(NamedTuple):
    """What one rank receives."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class DispatchMode:
    """A way to spread a call over ranks and to gather what comes back."""

    split: Split
    collect: Collect

    def calls(self, context: DispatchContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RankCall]:
        """The call of every rank. A split that gives too few or too many entries is an error naming the argument."""
        all_args, all_kwargs = self.split(context, *args, **kwargs)
        for name, entries in [*enumerate(all_args), *all_kwargs.items()]:
            if len(entries) != context.world_size:
                raise BatchMismatchError(
                    f"{context.method}: argument {name!r} was split into {len(entries)} parts for "
                    f"{context.world_size} ranks"
                )
        return [
            RankCall(tuple(entries[rank] for entries in all_args), {k: v[rank] for k, v in all_kwargs.items()})
            for rank in range(context.world_size)
        ]


def split_same(context: DispatchContext, *args: Any, **kwargs: Any) -> SplitArguments:
    """Every rank gets the same arguments."""
    n = context.world_size
    return tuple([_awaited(arg)] * n for arg in args), {name: [_awaited(arg)] * n for name, arg in kwargs.items()}


def _awaited(arg: Any) -> Any:
    return arg.get() if isinstance(arg, DataProtoFuture) else arg


def split_lists(context: DispatchContext, *args: Any, **kwargs: Any) -> SplitArguments:
    """Every argument is already a list or tuple with one entry per rank."""
    for name, arg in [*enumerate(args), *kwargs.items()]:
        if not isinstance(arg, (list, tuple)) or len(arg) != context.world_size:
            found = f"{len(arg)} entries" if isinstance(arg, (list, tuple)) else f"a {type(arg).__name__}"
            raise BatchMismatchError(
                f"{context.method}: argument {name!r} must be a list with one entry for each of {context.world_size} "
                f"ranks; it is {found}"
            )
    return tuple(list(arg) for arg in args), {name: list(arg) for name, arg in kwargs.items()}


def split_rows(context: DispatchContext, *args: Any, **kwargs: Any) -> SplitArguments:
    """Batches are cut into contiguous runs of rows, padded with zero-weight rows where they do not divide.

    A `DataProtoFuture` whose ranks each hold the rows that the same rank needs here is passed on without coming back to
    the driver; any other is waited for first.
    """
    n = context.world_size
    named: dict[Any, Any] = dict([*enumerate(args), *kwargs.items()])
    parts: dict[Any, list[Any]] = {name: [arg] * n for name, arg in named.items()}
    rows: dict[Any, int] = {}
    batches: dict[Any, Batch] = {}
    for name, arg in named.items():
        if isinstance(arg, DataProtoFuture):
            if _stays_on_its_ranks(arg, context):
                parts[name], rows[name] = list(arg.handles), arg.context.rows or 0
                continue
            arg = arg.get()
        if is_batch(arg):
            batches[name], rows[name] = arg, len(arg)
    _check_rows(context, rows)
    parts.update({name: list(split_padded(batch, n)) for name, batch in batches.items()})
    return tuple(parts[i] for i in range(len(args))), {name: parts[name] for name in kwargs}


def _stays_on_its_ranks(future: DataProtoFuture, context: DispatchContext) -> bool:
    return (
        future.mode.collect is collect_rows
        and type(future.group) is type(context.group)
        and future.context.world_size == context.world_size
        and future.context.rows is not None
        and future.context.rows % context.world_size == 0
    )


def _check_rows(context: DispatchContext, rows: dict[Any, int]) -> None:
    if len(set(rows.values())) > 1:
        found = ", ".join(f"{name!r} has {count}" for name, count in rows.items())
        raise BatchMismatchError(f"{context.method}: batch arguments must have the same number of rows; {found}")
    if 0 in rows.values():
        raise BatchMismatchError(f"{context.method}: the batch has no rows")
    context.rows = next(iter(rows.values()), None)


def split_weighted_rows(context: DispatchContext, *args: Any, **kwargs: Any) -> SplitArguments:
    """`split_rows` for results that are reduced over rows: padding must be able to say that it weighs nothing.

    Raises:
        BatchMismatchError: the rows do not divide over the ranks and there is no `response_mask` to set to zero.
    """
    args = tuple(map(_awaited, args))
    kwargs = {name: _awaited(arg) for name, arg in kwargs.items()}
    batches = {name: arg for name, arg in [*enumerate(args), *kwargs.items()] if is_batch(arg)}
    for name, batch in batches.items():
        if len(batch) % context.world_size and "response_mask" not in column_names(batch):
            raise BatchMismatchError(
                f"{context.method}: {len(batch)} rows of argument {name!r} do not divide over {context.world_size} "
                f"ranks, and without a 'response_mask' column padding rows would count; pass a multiple of "
                f"{context.world_size} rows"
            )
    return split_rows(context, *args, **kwargs)


def collect_all(context: DispatchContext, outputs: list[Any]) -> list[Any]:
    """The results, rank by rank."""
    return outputs


def collect_first(context: DispatchContext, outputs: list[Any]) -> Any:
    """Rank 0's result."""
    return outputs[0]


def collect_rows(context: DispatchContext, outputs: list[Any]) -> Any:
    """One batch in the order of the rows that went in, padding rows removed."""
    for rank, output in enumerate(outputs):
        if not is_batch(output) or type(output) is not type(outputs[0]):
            raise BatchMismatchError(
                f"{context.method}: rank {rank} returned a {type(output).__name__}; every rank must return a "
                f"TensorDict, or every rank a DataProto, with one row for each row it was given"
            )
    if context.rows is None:
        return join_rows(outputs, 0)
    padding = -context.rows % context.world_size
    each = (context.rows + padding) // context.world_size
    if any(len(output) != each for output in outputs):
        found = ", ".join(str(len(output)) for output in outputs)
        raise BatchMismatchError(f"{context.method}: the ranks were given {each} rows each and returned {found}")
    return join_rows(outputs, padding)


DISPATCH_MODES: dict[Dispatch | str, DispatchMode] = {
    Dispatch.RANK_ZERO: DispatchMode(split_same, collect_first),
    Dispatch.ONE_TO_ALL: DispatchMode(split_same, collect_all),
    Dispatch.ALL_TO_ALL: DispatchMode(split_lists, collect_all),
    Dispatch.DP_COMPUTE: DispatchMode(split_lists, collect_all),
    Dispatch.DP_COMPUTE_PROTO: DispatchMode(split_rows, collect_rows),
    Dispatch.DP_COMPUTE_METRIC: DispatchMode(split_weighted_rows, collect_first),
}


def register_dispatch_mode(name: str, split: Split, collect: Collect) -> None:
    """Add a mode under a name of its own, for `@register(dispatch_mode=name)`.

    Raises:
        ConfigError: the name is taken by other functions.
    """
    mode = DispatchMode(split, collect)
    if DISPATCH_MODES.setdefault(name, mode) != mode:
        raise ConfigError(f"dispatch mode {name!r} exists already")


def dispatch_mode(mode: Dispatch | str | DispatchMode) -> DispatchMode:
    """The mode behind what `@register` was given.

    Raises:
        ConfigError: a name that no mode has.
    """
    if isinstance(mode, DispatchMode):
        return mode
    if mode not in DISPATCH_MODES:
        names = [str(known) if isinstance(known, Dispatch) else repr(known) for known in DISPATCH_MODES]
        raise ConfigError(f"unknown dispatch mode {mode!r}; there are {', '.join(names)}")
    return DISPATCH_MODES[mode]
