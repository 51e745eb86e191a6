"""The two ends of a large message on one link: its sender's side and its receiver's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base import Buffer
from ..matching import Receive, fail_future, scatter

if TYPE_CHECKING:
    from .receiver import Receiver

__all__ = ["Inbound", "Item", "Outbound"]

#: Payload that nobody wants is read into this and forgotten.
_NOWHERE = memoryview(bytearray(64 * 1024))


class Item:
    """Frames that are written in order; `future`, a send's of `tag`, is done when the last byte has left."""

    __slots__ = ("future", "tag", "views")

    def __init__(
        self, views: list[memoryview], future: asyncio.Future[None] | None = None, tag: int = 0
    ) -> None:
        self.views = views
        self.future = future
        self.tag = tag

    def detach(self, _: object = None) -> None:
        """Stop reading the caller's memory: what is left to write is copied."""
        if self.views:
            self.views = [memoryview(b"".join(self.views))]

    def fail(self, error: BaseException) -> None:
        """End the send; what is left to write is copied first, for its caller may go on at once."""
        if self.future is not None and not self.future.done():
            self.detach()
            fail_future(self.future, error)


class Outbound:
    """A large message on its way out, read from the caller's memory part by part."""

    __slots__ = ("_index", "_offset", "buffers", "future", "ident", "left", "nbytes", "part", "tag")

    def __init__(
        self,
        ident: int,
        tag: int,
        buffers: Sequence[Buffer],
        nbytes: int,
        future: asyncio.Future[None],
    ) -> None:
        self.ident = ident
        self.tag = tag
        self.buffers = [memoryview(b) for b in buffers]  # type: ignore[arg-type]
        self.nbytes = self.left = nbytes
        self.future = future
        #: What is being written of it now.
        self.part: Item | None = None
        self._index = self._offset = 0

    def detach(self, _: object = None) -> None:
        """The send is over: stop reading the caller's memory."""
        if self.part is not None:
            self.part.detach()

    def fail(self, error: BaseException) -> None:
        """End the send, as `Item.fail` does."""
        self.detach()
        fail_future(self.future, error)

    def take(self, limit: int) -> list[memoryview]:
        """The next at most `limit` bytes."""
        views = []
        while limit and self.left:
            buffer = self.buffers[self._index]
            view = buffer[self._offset : self._offset + limit]
            size = len(view)
            self._offset += size
            if self._offset == len(buffer):
                self._index, self._offset = self._index + 1, 0
            if size:
                views.append(view)
                self.left -= size
                limit -= size
        return views


class Inbound:
    """A large message on its way in: an envelope whose payload comes in parts.

    The payload goes straight into the receive's buffers. Without a receive (one was withdrawn, or the
    message was announced for one that was) it is kept in memory of its own until the next receive.
    """

    __slots__ = (
        "_cost",
        "_home",
        "_receive",
        "_store",
        "_views",
        "asked",
        "asked_at",
        "head",
        "ident",
        "live",
        "nbytes",
        "received",
        "tag",
        "token",
    )

    def __init__(
        self, home: Receiver, ident: int, tag: int, head: bytes, nbytes: int, *, asked: bool, cost: int = 0
    ) -> None:
        self._home = home
        #: The sender's number for it; -1 for a small message that came without an offer.
        self.ident = ident
        #: The payload comes without a (further) word from this side.
        self.asked = asked
        #: The moment of this side's word to the sender (see `Announcements`); 0 where it gave none.
        self.asked_at = 0
        #: The moment of the announcement that the sender will have used for it, though it had not reached
        #: the sender when it offered the message; 0 if none.
        self.token = 0
        self._cost = cost
        self.tag = tag
        self.head = head
        self.nbytes = nbytes
        self.received = 0
        self.live = True
        self._receive: Receive | None = None
        self._views: list[memoryview] = []
        self._store: bytearray | None = None

    # ------------------------------------------------------------------ matched, or not

    def deliver(self, receive: Receive) -> None:
        """A receive takes this message: now, or as its payload comes."""
        self._settle()
        if self._store is not None and self.received == self.nbytes:
            scatter(memoryview(self._store), receive.buffers)
            self._store = None
            receive.finish()
            return
        self._receive = receive
        self._views = [memoryview(b) for b in receive.buffers if b.nbytes]  # type: ignore[arg-type]
        if self._store is None:
            self._home.accept(self)
        # Otherwise the payload is half here: it goes on into the store and is copied at the end.

    def drop(self) -> None:
        """Nobody will receive it."""
        self._settle()
        self._home.decline(self)
        self.live = False
        self._store = None
        self._receive = None

    def _settle(self) -> None:
        """Give back the budget for early messages that it took, once."""
        cost, self._cost = self._cost, 0
        if cost:
            self._home.owe(cost)

    def give_up(self, peer: int) -> None:
        """Its sender will not finish it."""
        receive, self._receive = self._receive, None
        self.live = False
        self._store = None
        if receive is not None:
            receive.give_up(peer)

    def fail(self, error: BaseException) -> None:
        """The connection is gone."""
        receive, self._receive = self._receive, None
        self.live = False
        if receive is not None:
            fail_future(receive.future, error)

    # ------------------------------------------------------------------ payload

    def target(self, limit: int) -> memoryview:
        """Where the next bytes go: at least one byte long, at most `limit`."""
        receive = self._receive
        if receive is not None and receive.future.done():
            self._withdrawn(receive)
            receive = None
        if self._store is not None:
            return memoryview(self._store)[self.received : self.received + limit]
        if receive is None or not self.live:
            if self.live and not self._home.is_stale(self.tag):
                self._store = bytearray(self.nbytes)
                return memoryview(self._store)[self.received : self.received + limit]
            return _NOWHERE[:limit]
        at = self.received
        if len(self._views) == 1:
            return self._views[0][at : at + limit]
        for view in self._views:
            if at < len(view):
                return view[at : at + limit]
            at -= len(view)
        raise AssertionError("more payload than the envelope said")

    def advance(self, size: int) -> bool:
        """`size` bytes have come; True when the message is whole."""
        self.received += size
        if self.received < self.nbytes:
            return False
        receive, self._receive = self._receive, None
        if receive is not None:
            if self._store is not None:
                scatter(memoryview(self._store), receive.buffers)
                self._store = None
            receive.finish()
        return True

    def withdraw(self, future: asyncio.Future[None]) -> None:
        """The receive of this future was cancelled: save what has come, if this is its message."""
        if self._receive is not None and self._receive.future is future:
            self._withdrawn(self._receive)

    def _withdrawn(self, receive: Receive) -> None:
        """The receive was cancelled in the middle: what it has got so far is saved for the next one."""
        self._receive = None
        if self._home.is_stale(self.tag) or not receive.future.cancelled():
            self.drop()
            return
        if self._store is None:
            store = self._store = bytearray(self.nbytes)
            at = 0
            for view in self._views:
                size = min(len(view), self.received - at)
                if size <= 0:
                    break
                store[at : at + size] = view[:size]
                at += size
        self._views = []
        self._home.inbox.put_back(self.tag, self)
