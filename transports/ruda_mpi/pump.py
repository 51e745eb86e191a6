"""Looking after MPI from an event loop.

MPI has nothing that an event loop could wait for, and moves data only while it is called. So a rank looks
often while messages come, and ever more seldom once none do: it sleeps an eighth of the time that
nothing came, up to `idle_poll`. An idle rank takes next to no processor time, and a message that
comes after a pause is late by at most an eighth of that pause.
"""

from __future__ import annotations

import asyncio
import os
from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .stream import MpiStream

__all__ = ["Pump"]

#: Seconds that a rank keeps looking after a native collective began: MPI works only while it is called.
_NATIVE_SPIN = 0.2


class Pump:
    """Tests one transport's requests. Bound to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, spin: float, idle_poll: float) -> None:
        self._loop = loop
        self._spin = spin
        self._idle_poll = idle_poll
        self._streams: list[MpiStream] = []
        self._waiting: list[tuple[Any, asyncio.Future[None]]] = []
        self._busy_until = 0.0
        self._last = monotonic()
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.TimerHandle | None = None
        self._stopped = False

    def add(self, stream: MpiStream) -> None:
        """Look after a stream."""
        self._streams.append(stream)
        self.kick()

    def remove(self, stream: MpiStream) -> None:
        """No more of it."""
        if stream in self._streams:
            self._streams.remove(stream)

    def kick(self, seconds: float = 0.0) -> None:
        """Something has begun: look again soon, and for at least `seconds`."""
        self._last = now = monotonic()
        self._busy_until = max(self._busy_until, now + seconds)
        if self._soon is None and not self._stopped:
            self._soon = self._loop.call_soon(self._look)

    def finished(self, request: Any, *, native: bool = False) -> asyncio.Future[None]:
        """Done when MPI has finished `request`; it fails with MPI's error."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((request, future))
        self.kick(_NATIVE_SPIN if native else 0.0)
        return future

    def stop(self) -> None:
        """Look no more; what waits is cancelled."""
        self._stopped = True
        for handle in (self._soon, self._later):
            if handle is not None:
                handle.cancel()
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()

    def _look(self) -> None:
        self._soon = None
        if self._later is not None:
            self._later.cancel()
            self._later = None
        moved = False
        try:
            for stream in list(self._streams):
                moved = stream.poll() or moved
            if self._waiting:
                moved = self._test() or moved
        finally:  # whatever went wrong with one stream, the others are to be looked after
            self._again(moved)

    def _again(self, moved: bool) -> None:
        """See when to look next."""
        if self._stopped or not (self._streams or self._waiting):
            return
        now = monotonic()
        if moved:
            self._last = now
        quiet = now - self._last
        if self._soon is not None:
            return
        if quiet < self._spin or (self._waiting and now < self._busy_until):
            os.sched_yield()  # there may be more ranks than cores, and they have to work too
            self._soon = self._loop.call_soon(self._look)
        else:
            self._later = self._loop.call_later(min(quiet / 8, self._idle_poll), self._look)

    def _test(self) -> bool:
        """Settle the requests that are done."""
        left = []
        for request, future in self._waiting:
            if future.done():
                continue
            try:
                over = request.Test()
            except Exception as error:
                future.set_exception(error)
                continue
            if over:
                future.set_result(None)
            else:
                left.append((request, future))
        moved = len(left) < len(self._waiting)
        self._waiting = left
        return moved
