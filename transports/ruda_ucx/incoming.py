"""The incoming half of a link: envelopes meet their receives, and large payloads are pulled into place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ruda_async.transport import (
    DONE,
    Arrived,
    Buffer,
    Inbox,
    ProtocolError,
    Receive,
    wire,
)

from .inbound import Inbound
from .memory import Accelerator, on_device, spread
from .outgoing import COUNT, DECLINED, MANY, OVERHEAD, Outgoing
from .waiting import Pending, Staged

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["Incoming"]


class Incoming:
    """Messages from one peer.

    Attributes:
        inbox: where messages and receives meet.
        heard: something came since this was last set to False.
        open: the link has not ended.
        early_bytes: payload that waits here for its receive.
    """

    def __init__(
        self,
        peer: int,
        engine: Engine,
        outgoing: Outgoing,
        grant: int,
        chunk_bytes: int,
        accelerator: Accelerator,
        is_stale: Callable[[int], bool],
        on_broken: Callable[[int], None],
    ) -> None:
        self.peer = peer
        self.engine = engine
        self.outgoing = outgoing
        self.chunk_bytes = chunk_bytes
        self.accelerator = accelerator
        self.is_stale = is_stale
        self.on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self.inbox = Inbox(peer, self._loop)
        self.heard = True
        self.open = True
        self.messages = self.bytes = self.early_bytes = 0
        self._grant = grant
        self._owed = 0
        self._offers: dict[int, Inbound] = {}
        self._matched: dict[asyncio.Future[None], Inbound] = {}
        self.look = engine.look

    # ------------------------------------------------------------------ receives

    def recv_into(self, tag: int, buffers: Sequence[Buffer], head: bytes) -> Awaitable[None]:
        """Post a receive; see `Transport.recv_into`."""
        if on_device(buffers) and not self.accelerator.native:
            host = self.accelerator.room(sum(b.nbytes for b in buffers))
            inner = self._post(tag, (host,), head)
            return Staged(inner, partial(spread, host, buffers, self.accelerator))
        return self._post(tag, buffers, head)

    def _post(self, tag: int, buffers: Sequence[Buffer], head: bytes) -> Awaitable[None]:
        receive = self.inbox.post(tag, buffers, head)
        return DONE if receive is None else Pending(receive.future, self)

    def attach(self, inbound: Inbound, receive: Receive) -> None:
        """A message is pulled for `receive`."""
        self._matched[receive.future] = inbound

    def detach(self, receive: Receive) -> None:
        """No more."""
        self._matched.pop(receive.future, None)

    def settling(self, future: asyncio.Future[None]) -> asyncio.Future[None] | None:
        """See `Party.settling`."""
        inbound = self._matched.get(future)
        if inbound is None or not inbound.busy:
            return None
        if inbound.settled is None or inbound.settled.done():
            inbound.settled = self._loop.create_future()
        return inbound.settled

    def release(self, inbound: Inbound) -> None:
        """A message is here, or is not wanted: its sender may go on."""
        inbound.live = False
        self._offers.pop(inbound.ident, None)
        for future in [f for f, i in self._matched.items() if i is inbound]:
            del self._matched[future]
        self.outgoing.control(wire.encode(wire.DROP, ident=inbound.ident, flags=DECLINED))

    def owe(self, cost: int) -> None:
        """Give budget back to the sender, in large coins."""
        self._owed += cost
        if self._owed >= self._grant:
            owed, self._owed = self._owed, 0
            self.outgoing.control(wire.encode(wire.CREDIT, 0, owed))

    # ------------------------------------------------------------------ what the peer sends

    def on_message(self, tag: int, head: bytes, payload: memoryview) -> None:
        """A whole small message has come."""
        nbytes = len(payload)
        self.messages += 1
        self.bytes += nbytes
        receive = self.inbox.claim(tag)
        if receive is not None:
            self.owe(nbytes + OVERHEAD)
            if not receive.accepts(head, nbytes):
                receive.refuse(self.peer, head, nbytes)
                return
            if nbytes:
                spread(payload, receive.buffers, self.accelerator)
            receive.finish()
        elif self.is_stale(tag):
            self.owe(nbytes + OVERHEAD)
        else:
            self.early_bytes += nbytes
            self.inbox.keep(tag, _Early(head, bytes(payload), self._consumed, self.accelerator))

    def _consumed(self, nbytes: int) -> None:
        """An early message was received or dropped."""
        self.early_bytes -= nbytes
        self.owe(nbytes + OVERHEAD)

    def on_offer(self, frame: wire.Frame, head: bytes) -> None:
        """A large message waits at its sender."""
        if frame.ident in self._offers:
            raise ProtocolError(f"message {frame.ident} is offered twice")
        self.messages += 1
        self.bytes += frame.payload_bytes
        tag = frame.tag
        inbound = Inbound(self, frame.ident, tag, head, frame.payload_bytes, bool(frame.flags & MANY))
        self._offers[frame.ident] = inbound
        receive = self.inbox.claim(tag)
        if receive is None:
            if self.is_stale(tag):
                inbound.drop()
            else:
                self.inbox.keep(tag, inbound)
        elif receive.accepts(head, inbound.nbytes):
            inbound.deliver(receive)
        else:
            receive.refuse(self.peer, head, inbound.nbytes)
            inbound.drop()

    def on_drop(self, ident: int, head: bytes) -> None:
        """The sender gives a message up."""
        if len(head) != COUNT.size:
            raise ProtocolError("a message is given up without saying how much of it was sent")
        inbound = self._offers.pop(ident, None)
        if inbound is not None:
            inbound.taken_back(COUNT.unpack(head)[0])

    # ------------------------------------------------------------------ ending

    def fail(self, tag: int, error: BaseException) -> list[asyncio.Future[None]]:
        """See `Transport.fail`."""
        self.inbox.fail(tag, error)
        failed = [(future, inbound) for future, inbound in self._matched.items() if inbound.tag == tag]
        for _, inbound in failed:
            inbound.fail(error)
        return [busy for future, _ in failed if (busy := self.settling(future)) is not None]

    def close(self, error: BaseException) -> None:
        """Nothing more comes: large messages that were not pulled will not be; small ones stay readable."""
        self.open = False
        offers, self._offers = self._offers, {}
        for inbound in list(offers.values()):
            inbound.end(error)
        for inbound in list(self._matched.values()):
            inbound.end(error)
        self._matched.clear()
        self.inbox.close(error)


class _Early(Arrived):
    """A small message that came before its receive, which may want it on a device."""

    __slots__ = ("_accelerator",)

    def __init__(
        self, head: bytes, payload: bytes, release: Callable[[int], None], accelerator: Accelerator
    ) -> None:
        super().__init__(head, payload, release)
        self._accelerator = accelerator

    def deliver(self, receive: Receive) -> None:
        """Copy the payload and give its budget back."""
        if on_device(receive.buffers):
            spread(memoryview(self.payload), receive.buffers, self._accelerator)
            self.release(self.nbytes)
            receive.finish()
        else:
            super().deliver(receive)
