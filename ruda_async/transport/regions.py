"""Memory that several ranks of one host can look at: what a transport may offer beyond messages.

With it a collective reads its peers' tensors where they lie instead of having them sent. The transport
provides memory, a way to wait for another rank's writes, and nothing else; what is written where is the
business of `ruda_async.collectives`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

__all__ = ["RegionDestroyed", "Regions"]


class RegionDestroyed(Exception):
    """The region that `peer` has offered is gone: `peer` has given up the call that it was for."""

    def __init__(self, peer: int, number: int) -> None:
        super().__init__(f"rank {peer} has destroyed its region {number}")
        self.peer = peer
        self.number = number


class Regions(Protocol):
    """Shared memory between the ranks of a job. Used from the transport's event loop.

    Numbers of regions are one rank's own, start at 1, and are not used twice.
    """

    def create(self, nbytes: int) -> tuple[int, memoryview]:
        """A region of zeros that every other rank can `open`: its number, and its bytes.

        Raises:
            OSError: there is no such memory, or a peer cannot be given it.
        """
        ...

    def destroy(self, number: int) -> None:
        """Nobody opens this region again; its memory goes with the last view of it, on every rank."""
        ...

    def lend(self, memory: memoryview) -> int | None:
        """Let the peers open memory that was not made by `create`; its number, or None if that cannot be.

        To be ended by `destroy` before the memory is given back.
        """
        ...

    def open(self, peer: int, number: int) -> memoryview:
        """The bytes of `peer`'s region.

        Raises:
            RegionDestroyed: it had such a region, and has destroyed it.
            LookupError: it never had a region of this number.
            OSError: it has, and this rank had no room to map it: no file descriptor, or no address space.
        """
        ...

    def signal(self, peer: int) -> None:
        """Something was written that `peer` may be waiting for. Nearly free if it does not wait."""
        ...

    def watch(self, peer: int, ready: Callable[[], bool]) -> Awaitable[None]:
        """Wait until `ready` is true, which it becomes by what `peer` writes before a `signal`.

        May spin for some microseconds first. Cancelling the awaitable ends the wait. When the peer is
        lost it raises `PeerLostError`.
        """
        ...

    def close(self) -> None:
        """Let go of everything; views that are held stay readable. Called with the transport's end."""
        ...
