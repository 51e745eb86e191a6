"""An MPI communicator for each channel that uses MPI's collectives, made when it first does."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from mpi4py import MPI

from ruda_async.transport import EngineContexts, NativeGroup, RudaError, in_thread

from .engine import keep, keep_requests, purge
from .pump import Pump

__all__ = ["Communicators"]

#: Seconds that a rank whose call was given up still takes part in making the communicator.
_GRACE = 5.0


class Communicators(EngineContexts[Any]):
    """The communicators of one transport.

    Making one blocks every rank in MPI until the last has come, so nobody may begin unless all will. The
    ranks have agreed on the call by then; but one that was cancelled in the middle of that agreement is
    not coming, though others do not know. So they meet once more, this time by messages of MPI's, and whoever
    is in *this* meeting stays, even when its call is given up meanwhile. If a rank does not come, all are
    still in the meeting, which can be left.
    """

    def __init__(self, communicator: Any, pump: Pump) -> None:
        super().__init__()
        self._base = communicator
        self._group = communicator.Get_group()
        self._pump = pump
        #: Channels whose communicator may hold messages of a call that ended early.
        self._spoiled: set[int] = set()
        #: Meetings of calls that were given up.
        self._leaving: set[asyncio.Task[Any]] = set()

    def release(self, channel: int, making: asyncio.Task[Any]) -> None:
        """See `EngineContexts.release`."""
        spoiled = channel in self._spoiled
        self._spoiled.discard(channel)
        if not making.done():
            self._leaving.add(making)
            making.add_done_callback(self._left)
            asyncio.get_running_loop().call_later(_GRACE, making.cancel)
        elif not spoiled:
            self._left(making)

    def spoil(self, group: NativeGroup) -> None:
        """A call has ended early: its communicator is never freed, since late messages may come to it.

        MPI would give its number to another one, which they would meet.
        """
        if self.is_current(group):
            self._spoiled.add(group.channel)

    def _left(self, making: asyncio.Task[Any]) -> None:
        self._leaving.discard(making)
        if not self.failed(making):
            communicator = making.result()

            def free() -> bool:
                communicator.Free()
                return True

            keep(free)
            purge()

    def close(self) -> None:
        """Release all; what is being made is given up."""
        super().close()
        for making in list(self._leaving):
            making.cancel()

    async def make(self, group: NativeGroup) -> Any:
        """See `EngineContexts.make`."""
        digest = hashlib.blake2b(
            repr((group.channel, group.epoch, group.members)).encode(), digest_size=8
        ).digest()
        tag = int.from_bytes(digest, "big") % (self._base.Get_attr(MPI.TAG_UB) - 1) + 1
        await self._meet(group, tag, digest)
        members = self._group.Incl(group.members)
        communicator = await in_thread(lambda: self._base.Create_group(members, tag))
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        return communicator

    async def _meet(self, group: NativeGroup, tag: int, digest: bytes) -> None:
        """A dissemination barrier of MPI messages (Hensgen, Finkel & Manber 1988)."""
        rank, size, members = group.rank, group.size, group.members
        distance = 1
        while distance < size:
            heard = bytearray(len(digest))
            source, to = members[(rank - distance) % size], members[(rank + distance) % size]
            receive = self._base.Irecv([heard, MPI.BYTE], source, tag)
            send = self._base.Isend([digest, MPI.BYTE], to, tag)
            waiting = self._pump.finished(receive, native=True)
            try:
                await waiting
            except BaseException:
                receive.Cancel()
                raise
            finally:
                keep_requests([(receive, heard), (send, digest)])
            if bytes(heard) != digest:
                raise RudaError(
                    f"two channels of ranks {list(members)} chose one tag for their MPI communicators at "
                    "once; name one of the channels differently"
                )
            distance *= 2
