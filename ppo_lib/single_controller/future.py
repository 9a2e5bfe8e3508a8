"""The result of a call that the driver did not wait for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppo_lib.single_controller.dispatch import DispatchContext, DispatchMode
    from ppo_lib.single_controller.worker_group import WorkerGroup

__all__ = ["DataProtoFuture"]

_NOT_YET = object()


class DataProtoFuture:
    """What a method registered with `blocking=False` returns.

    `get()` waits and gives what a blocking call would have given. Passed as an argument to another method that cuts
    rows into as many shares, it hands each rank the share that it needs, without a way through the driver.
    """

    def __init__(
        self, group: WorkerGroup, method: str, handles: list[Any], context: DispatchContext, mode: DispatchMode
    ) -> None:
        self.group = group
        self.method = method
        self.handles = handles
        self.context = context
        self.mode = mode
        self._result: Any = _NOT_YET

    def get(self, timeout_s: float | None = None) -> Any:
        """The collected result; the same object however often it is asked for.

        Args:
            timeout_s: how long to wait; None is the group's own limit.

        Raises:
            WorkerDiedError, WorkerTimeoutError, or what the method raised: as a blocking call does.
        """
        if self._result is _NOT_YET:
            outputs = self.group.gather(self.method, self.handles, timeout_s)
            self._result = self.mode.collect(self.context, outputs)
        return self._result

    def shares(self) -> list[Any]:
        """The handle of each share of the rows, in order; the driver need not have waited for any."""
        holders = self.context.holders or range(self.context.world_size)
        return [self.handles[rank] for rank in holders]

    def done(self) -> bool:
        """Whether `get` would return, or raise, without waiting."""
        return self._result is not _NOT_YET or self.group.all_done(self.handles)
