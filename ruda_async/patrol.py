"""The deadlines of the calls in flight: one timer for all of them."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .call import Operation
    from .node import Node

__all__ = ["Patrol"]

#: A call that has waited this long (seconds) tells the others what it is, so that ranks that entered
#: different calls find out even where their algorithms never exchange a message.
REPORT_AFTER = 0.05


class Patrol:
    """Sees to it that the calls of one node report when they wait long, and end at their deadlines."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def watch(self, operation: Operation) -> None:
        """Have an eye on `operation` from now on."""
        due = _report_at(operation)
        if self._timer is not None:
            if due >= self._due:
                return
            self._timer.cancel()
        self._come_at(due, max(due - monotonic(), 0))

    def end(self) -> None:
        """Watch no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _come_at(self, due: float, delay: float) -> None:
        self._due = due
        self._timer = self._node.loop.call_later(delay, self._look)

    def _look(self) -> None:
        """Look at every call in flight; come again when the next one is due."""
        node = self._node
        self._timer = None
        now = monotonic()
        due = float("inf")
        for channel in list(node.channels.values()):
            for operation in list(channel.active.values()):
                if operation.error is not None or not operation.head:
                    continue
                if now >= operation.deadline:
                    channel.on_deadline(operation)
                    continue
                if not operation.reported:
                    report_at = _report_at(operation)
                    if now >= report_at:
                        operation.reported = True
                        node.report(channel, channel.members, operation.sequence, operation.head)
                    else:
                        due = min(due, report_at)
                due = min(due, operation.deadline)
        if due < float("inf") and node.closed is None:
            self._come_at(due, max(due - now, 0.001))


def _report_at(operation: Operation) -> float:
    """When a call that still waits tells the others: well before its deadline."""
    return operation.started + min(REPORT_AFTER, (operation.deadline - operation.started) / 2)
