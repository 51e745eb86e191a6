"""The incoming half of a link: envelopes meet their receives, and large payloads are pulled into place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ruda_async.transport import (
    DONE,
    Arrived,
    Buffer,
    CollectiveCancelledError,
    Inbox,
    ProtocolError,
    Receive,
    fail_future,
    scatter,
    wire,
)

from .memory import Accelerator, on_device, piece, spread
from .outgoing import COUNT, DECLINED, MANY, OVERHEAD, PULL, Outgoing
from .waiting import Pending, Staged

if TYPE_CHECKING:
    from .engine import Engine, Operation

__all__ = ["Incoming"]

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
            self._operations[number] = home.engine.receive(target, tag, done)
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
        """The receive is over; unless it was filled, the message is left for another, or not wanted at all."""
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
            if self._asked:
                peer = self._home.peer
                error = CollectiveCancelledError(f"rank {peer} gave up the message", rank=peer)
                fail_future(receive.future, error)
            else:
                self._home.inbox.repost(receive)
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
        if not answered:
            self._asked = 0
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
            host = memoryview(bytearray(sum(b.nbytes for b in buffers)))
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

    def fail(self, tag: int, error: BaseException) -> None:
        """See `Transport.fail`."""
        self.inbox.fail(tag, error)
        for inbound in list(self._matched.values()):
            if inbound.tag == tag:
                inbound.fail(error)

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
