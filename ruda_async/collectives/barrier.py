"""The barrier, and with it the way by which every family learns that all ranks entered a call rightly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..transport.provider import NativeCall
from .messages import EMPTY
from .movement import agreed

if TYPE_CHECKING:
    from .operation import Link, Settings

__all__ = ["Barrier", "dissemination"]


async def dissemination(link: Link, lane: int = 15) -> None:
    """Wait until every rank has come here.

    In round *k* each rank sends an empty message to the rank ``2**k`` places on and waits for the one from
    ``2**k`` places back: ceil(log2 size) rounds, after which a rank has heard of all others, directly or
    through ranks that had heard of them. A rank whose fingerprint differs, or that never enters since
    its input is bad, is therefore noticed by all: nobody passes on what it did not hear.

    Source: Hensgen, Finkel & Manber, "Two algorithms for barrier synchronization" (1988).
    """
    rank, size = link.rank, link.size
    distance = 1
    while distance < size:
        heard = link.recv_into((rank - distance) % size, EMPTY, lane=lane)
        told = link.send((rank + distance) % size, EMPTY, lane=lane)
        await heard
        await told
        distance *= 2


class Barrier:
    """Return when every rank of the group has entered."""

    __slots__ = ()

    operation = "barrier"

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """There is no input to check; see `collectives.request.Request`."""
        return agreed("barrier", "", None, settings.algorithm, settings.max_bytes)

    async def run(self, link: Link) -> None:
        """Wait for all ranks."""
        native = link.native(NativeCall("barrier", link.size)) if link.providers else None
        if native is not None:
            await native.run(link, EMPTY, EMPTY)
        else:
            await dissemination(link, lane=0)
