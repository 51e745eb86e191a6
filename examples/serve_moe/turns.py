"""An event loop whose turns are short."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from selectors import DefaultSelector, SelectorKey

__all__ = ["AT_ONCE", "make_loop"]

#: Sockets that are handled in one turn of the loop.
AT_ONCE = 4


class _FewAtOnce(DefaultSelector):
    """At most `AT_ONCE` ready sockets a turn; all have theirs before one has a second.

    A loop handles all that is ready before it looks at its timers again: with a hundred clients that is
    many milliseconds, for which the collectives, which share the loop, wait.
    """

    _last = -1

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        ready = super().select(timeout)
        if len(ready) <= AT_ONCE:
            return ready
        # Those left out are ready in the next turn as well.
        ready.sort(key=lambda found: found[0].fd)
        first = bisect_right(ready, self._last, key=lambda found: found[0].fd)
        ready = (ready[first:] + ready[:first])[:AT_ONCE]
        self._last = ready[-1][0].fd
        return ready


def make_loop() -> asyncio.AbstractEventLoop:
    """For `asyncio.Runner`."""
    return asyncio.SelectorEventLoop(_FewAtOnce())
