"""Ranks of one process see each other's memory anyway; this hands out the addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import numpy as np

from ruda_async.transport import DONE, PeerLostError, RegionDestroyed, fail_future

from .calls import call

if TYPE_CHECKING:
    from .link import MemoryTransport

__all__ = ["ProcessRegions"]

_Wait = tuple[Callable[[], bool], "asyncio.Future[None]"]


class ProcessRegions:
    """See `ruda_async.transport.Regions`."""

    def __init__(self, home: MemoryTransport) -> None:
        self._home = home
        self._last = 0
        self._own: dict[int, memoryview] = {}
        #: Waits of this rank by the peer they are for. Peers on other threads look whether there are some.
        self._waits: dict[int, list[_Wait]] = {}

    def create(self, nbytes: int) -> tuple[int, memoryview]:
        """See `Regions.create`."""
        view = np.zeros(nbytes, np.uint8).data
        return self.lend(view), view

    def lend(self, memory: memoryview) -> int:
        """See `Regions.lend`."""
        self._last = number = self._last + 1
        self._own[number] = memory
        return number

    def destroy(self, number: int) -> None:
        """See `Regions.destroy`."""
        self._own.pop(number, None)

    def open(self, peer: int, number: int) -> memoryview:
        """See `Regions.open`."""
        theirs = self._home.peers[peer].regions
        try:
            return theirs._own[number]
        except KeyError:
            if 0 < number <= theirs._last:
                raise RegionDestroyed(peer, number) from None
            raise

    def signal(self, peer: int) -> None:
        """See `Regions.signal`."""
        theirs = self._home.peers[peer].regions
        if theirs._waits.get(self._home.rank):
            call(theirs._home.loop, theirs._wake, self._home.rank)

    def watch(self, peer: int, ready: Callable[[], bool]) -> Awaitable[None]:
        """See `Regions.watch`. Never spins: the peer may be a task of this very loop."""
        if ready():
            return DONE
        future: asyncio.Future[None] = self._home.loop.create_future()
        if (lost := self._home.inboxes[peer].closed) is not None:
            future.set_exception(lost)
            return future
        self._waits.setdefault(peer, []).append((ready, future))
        if ready():  # written by another thread, which had not seen this wait yet
            self._wake(peer)
        return future

    def _wake(self, peer: int) -> None:
        """`peer` has written something: end the waits whose condition holds."""
        still = []
        for ready, future in self._waits.pop(peer, ()):
            if future.done():
                continue
            if ready():
                future.set_result(None)
            else:
                still.append((ready, future))
        if still:
            self._waits[peer] = still + self._waits.get(peer, [])
            if any(ready() for ready, _ in still):
                self._wake(peer)

    def lose(self, peer: int, error: PeerLostError) -> None:
        """`peer` writes nothing any more."""
        for _, future in self._waits.pop(peer, ()):
            fail_future(future, error)

    def close(self) -> None:
        """See `Regions.close`."""
        self._own.clear()
