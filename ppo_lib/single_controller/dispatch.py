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
from ppo_lib.single_controller.rows import column_names, is_batch, join_rows, split_padded

if TYPE_CHECKING:
    from ppo_lib.single_controller.worker_group import WorkerGroup

__all__ = [
    "DISPATCH_MODES",
    "DispatchContext",
    "DispatchMode",
    "RankCall",
    "dispatch_mode",
    "make_nd_compute_dataproto_dispatch_fn",
    "mesh_layout",
    "register_dispatch_mode",
]

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
    share_of: list[int] | None = None
    """Which share of the rows each rank works on; None: rank i on share i."""
    holders: list[int] | None = None
    """The rank that answers for each share; None: rank i for share i. The answers of the others are not sent."""

    @property
    def shares(self) -> int:
        """Into how many shares rows are cut."""
        return self.world_size if self.holders is None else len(self.holders)


class RankCall(NamedTuple):
    """What one rank receives, and whether its answer is wanted."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answers: bool = True


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
            RankCall(
                tuple(entries[rank] for entries in all_args),
                {k: v[rank] for k, v in all_kwargs.items()},
                answers=context.holders is None or rank in context.holders,
            )
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

    A `DataProtoFuture` of rows cut into as many shares is passed on without coming back to the driver; any other is
    waited for first.
    """
    named: dict[Any, Any] = dict([*enumerate(args), *kwargs.items()])
    shares: dict[Any, list[Any]] = {}
    rows: dict[Any, int] = {}
    for name, arg in named.items():
        if isinstance(arg, DataProtoFuture):
            if _stays_on_its_ranks(arg, context):
                shares[name], rows[name] = arg.shares(), arg.context.rows or 0
                continue
            arg = arg.get()
        if is_batch(arg):
            shares[name], rows[name] = list(split_padded(arg, context.shares)), len(arg)
        else:
            shares[name] = [arg] * context.shares
    _check_rows(context, rows)
    share_of = context.share_of or range(context.world_size)
    parts = {name: [entries[share] for share in share_of] for name, entries in shares.items()}
    return tuple(parts[i] for i in range(len(args))), {name: parts[name] for name in kwargs}


def _stays_on_its_ranks(future: DataProtoFuture, context: DispatchContext) -> bool:
    """Whether its shares are those of this call. Where rows do not divide, the padding is in place already."""
    return (
        future.mode.collect is collect_rows
        and type(future.group) is type(context.group)
        and future.context.shares == context.shares
        and future.context.rows is not None
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

    def here(arg: Any) -> Any:
        """Padding rows that are on a rank already cannot be told that they weigh nothing: such futures come back."""
        divides = isinstance(arg, DataProtoFuture) and (arg.context.rows or 1) % context.shares == 0
        return arg if divides else _awaited(arg)

    args = tuple(map(here, args))
    kwargs = {name: here(arg) for name, arg in kwargs.items()}
    batches = {name: arg for name, arg in [*enumerate(args), *kwargs.items()] if is_batch(arg)}
    for name, batch in batches.items():
        if len(batch) % context.shares and "response_mask" not in column_names(batch):
            raise BatchMismatchError(
                f"{context.method}: {len(batch)} rows of argument {name!r} do not divide over {context.shares} "
                f"ranks, and without a 'response_mask' column padding rows would count; pass a multiple of "
                f"{context.shares} rows"
            )
    return split_rows(context, *args, **kwargs)


def split_rows_with_function(context: DispatchContext, *args: Any, **kwargs: Any) -> SplitArguments:
    """`split_rows` of everything behind the first argument, a function that every rank gets.

    Raises:
        BatchMismatchError: the first argument is not a function.
    """
    if not args or not callable(args[0]):
        found = f"a {type(args[0]).__name__}" if args else "missing"
        raise BatchMismatchError(f"{context.method}: the first argument must be a function; it is {found}")
    return split_rows(context, *args, **kwargs)


def split_rows_over(mesh_name: str) -> Split:
    """`split_rows` over the data-parallel ranks of a mesh; ranks of one data-parallel rank get the same rows."""

    def split(context: DispatchContext, *args: Any, **kwargs: Any) -> SplitArguments:
        context.share_of, context.holders = context.group.mesh_of(mesh_name)
        return split_rows(context, *args, **kwargs)

    return split


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> DispatchMode:
    """The mode that follows a mesh of the workers' own, for `@register(dispatch_mode=...)`.

    Each rank has told `_register_dispatch_collect_info(mesh_name, dp_rank, is_collect)`; the group asks at the first
    call. Rows are cut into as many shares as there are data-parallel ranks, each share is put in the store once
    whatever the number of ranks that read it, and only the rank that collects sends its rows back.
    """
    return DispatchMode(split_rows_over(mesh_name), collect_rows)


def mesh_layout(mesh_name: str, told: list[tuple[int, bool]], who: str) -> tuple[list[int], list[int]]:
    """(share of each rank, rank that answers for each share) from what the ranks told, in rank order.

    Raises:
        ConfigError: the data-parallel ranks are not 0..n-1, or one of them has no rank, or several, that collect.
    """
    shares = [dp_rank for dp_rank, _ in told]
    collecting = [[rank for rank, (dp, collects) in enumerate(told) if collects and dp == i] for i in set(shares)]
    if set(shares) != set(range(len(set(shares)))) or any(len(ranks) != 1 for ranks in collecting):
        raise ConfigError(
            f"{who}: the ranks told (dp_rank, is_collect) = {told} for mesh {mesh_name!r}; data-parallel ranks must "
            f"be 0, 1, ... and exactly one rank of each must collect"
        )
    return shares, [ranks[0] for ranks in collecting]


def collect_all(context: DispatchContext, outputs: list[Any]) -> list[Any]:
    """The results, rank by rank."""
    return outputs


def collect_first(context: DispatchContext, outputs: list[Any]) -> Any:
    """Rank 0's result."""
    return outputs[0]


def collect_rows(context: DispatchContext, outputs: list[Any]) -> Any:
    """One batch in the order of the rows that went in, padding rows removed."""
    holders = context.holders or range(context.world_size)
    outputs = [outputs[rank] for rank in holders]
    for rank, output in zip(holders, outputs):
        if not is_batch(output) or type(output) is not type(outputs[0]):
            raise BatchMismatchError(
                f"{context.method}: rank {rank} returned a {type(output).__name__}; every rank must return a "
                f"TensorDict, or every rank a DataProto, with one row for each row it was given"
            )
    if context.rows is None:
        return join_rows(outputs, 0)
    padding = -context.rows % context.shares
    each = (context.rows + padding) // context.shares
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
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: DispatchMode(split_rows_with_function, collect_rows),
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
