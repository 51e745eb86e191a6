"""A large message on its way in: pulled part by part into its receive's memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ruda_async.transport import Buffer, Receive, fail_future, wire

from .memory import on_device, piece, spread
from .outgoing import PULL

if TYPE_CHECKING:
    from .engine import Operation
    from .incoming import Incoming

__all__ = ["Inbound"]

#: Parts of one message that are under way at a time: one is copied while the next is asked for.
_WINDOW = 2
#: The largest part where it has to be gathered or scattered, which the loop's thread does.
_GATHERED = 256 * 1024


class Inbound:
    """A large message that stays with its sender until a receive pulls it.

    See `ruda_async.transport.Message`.
    """

    __slots__ = (
        "_asked",
        "_cuts",
        "_home",
        "_many",
        "_operations",
        "_receive",
        "_received",
        "head",
        "ident",
        "live",
        "nbytes",
        "settled",
        "tag",
    )

    def __init__(self, home: Incoming, ident: int, tag: int, head: bytes, nbytes: int, many: bool) -> None:
        self._home = home
        self.ident = ident
        self.tag = tag
        self.head = head
        self.nbytes = nbytes
        #: False once its sender took it back, or it needs it no more.
        self.live = True
        #: Done when UCX writes no part any more, where somebody waits for that.
        self.settled: asyncio.Future[None] | None = None
        self._many = many
        self._receive: Receive | None = None
        self._cuts: Iterator[tuple[int, int, list[Buffer]]] = iter(())
        self._received = 0
        #: Parts asked for since the message was offered; the number of each is its place in that order.
        self._asked = 0
        self._operations: dict[int, Operation] = {}

    @property
    def busy(self) -> bool:
        """Whether UCX may write to the receive's buffers."""
        return bool(self._operations)

    # ------------------------------------------------------------------ matched, or not

    def deliver(self, receive: Receive) -> None:
        """A receive takes this message: pull it."""
        if not self.nbytes:
            self._home.release(self)
            receive.finish()
            return
        self._receive = receive
        self._received = 0
        self._cuts = self._cut(receive.buffers)
        self._home.attach(self, receive)
        receive.future.add_done_callback(self._receive_over)
        if on_device(receive.buffers):
            # What was queued for this memory before must not be overtaken.
            fence = self._home.accelerator.fence(receive.buffers)
            self._home.engine.when(fence, partial(self._start, receive))
        else:
            self._pull()

    def _start(self, receive: Receive) -> None:
        """The device has let go of the receive's memory."""
        if self._receive is receive:
            self._pull()

    def drop(self) -> None:
        """Nobody will receive it."""
        if self.live:
            self._home.release(self)

    # ------------------------------------------------------------------ payload

    def _cut(self, buffers: Sequence[Buffer]) -> Iterator[tuple[int, int, list[Buffer]]]:
        """Parts as ``(start, length, targets)``; small neighbouring buffers share a part."""
        limit = min(self._home.chunk_bytes, _GATHERED) if self._many else self._home.chunk_bytes
        start = size = 0
        targets: list[Buffer] = []
        for buffer in buffers:
            at = 0
            while at < buffer.nbytes:
                # A part of one buffer is written in place; one of several is scattered, and kept small.
                room = (min(limit, _GATHERED) if targets else limit) - size
                if room <= 0 or (targets and size + buffer.nbytes - at > _GATHERED):
                    yield start, size, targets
                    start, size, targets = start + size, 0, []
                    continue
                taken = min(room, buffer.nbytes - at)
                targets.append(piece(buffer, at, at + taken))
                size += taken
                at += taken
        if targets:
            yield start, size, targets

    def _pull(self) -> None:
        """Ask for the next parts, a few at a time."""
        receive, home = self._receive, self._home
        while (
            receive is not None
            and receive.live
            and self.live
            and len(self._operations) < _WINDOW
            and home.open
        ):
            cut = next(self._cuts, None)
            if cut is None:
                return
            start, size, targets = cut
            target = targets[0] if len(targets) == 1 else memoryview(bytearray(size))
            number, self._asked = self._asked, self._asked + 1
            tag = home.engine.fresh_tag()
            done = partial(self._arrived, number, target, targets)
            self._operations[number] = home.engine.receive(home.peer, target, tag, done)
            home.outgoing.control(wire.encode(wire.READY, tag, 0, PULL.pack(start, size), self.ident))

    def _arrived(self, number: int, target: Buffer, targets: list[Buffer], status: int) -> None:
        """A part is there."""
        del self._operations[number]
        receive = self._receive
        if status:
            self._home.on_broken(status)
        elif receive is not None and receive.live and self.live:
            self._home.heard = True
            if len(targets) > 1:
                spread(target, targets, self._home.accelerator)  # type: ignore[arg-type]
            self._received += target.nbytes
            if self._received == self.nbytes:
                self._receive = None
                self._home.release(self)
                receive.finish()
            else:
                self._pull()
        elif not self._operations:
            self._rest()

    # ------------------------------------------------------------------ given up, by either side

    def _receive_over(self, future: asyncio.Future[None]) -> None:
        """The receive is over; unless it was filled, the message is for another, or not wanted."""
        if self._receive is not None and self._receive.future is future and not self._operations:
            self._rest()

    def _rest(self) -> None:
        """The message was given up and no part of it is under way any more."""
        receive, self._receive = self._receive, None
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(None)
        if receive is None:
            return
        self._home.detach(receive)
        if receive.live:  # so it was its sender who gave it up
            receive.give_up(self._home.peer)
        elif self.live:
            if receive.future.cancelled() and not self._home.is_stale(self.tag):
                self._home.inbox.put_back(self.tag, self)
            else:
                self._home.release(self)

    def taken_back(self, answered: int) -> None:
        """The sender gave it up after it had sent `answered` parts."""
        self.live = False
        for number in [n for n in self._operations if n >= answered]:
            self._home.engine.cancel(self._operations.pop(number))
        if not self._operations:
            self._rest()

    def fail(self, error: BaseException) -> None:
        """Its receive, if it has one, fails."""
        if self._receive is not None:
            fail_future(self._receive.future, error)

    def end(self, error: BaseException) -> None:
        """The link is gone; UCX keeps the memory of parts under way until the worker is closed."""
        self.live = False
        for operation in self._operations.values():
            operation.done = None
        self._operations.clear()
        receive, self._receive = self._receive, None
        if receive is not None:
            fail_future(receive.future, error)
        if self.settled is not None and not self.settled.done():
            self.settled.set_result(None)
