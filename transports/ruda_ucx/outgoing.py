"""The outgoing half of a link: small messages at once, large ones as the receiver pulls them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ruda_async.transport import (
    DONE,
    MAX_HEAD,
    Buffer,
    ProtocolError,
    Terms,
    fail_future,
    gather_bytes,
    wire,
)

from .memory import Accelerator, on_device, piece
from .waiting import Pending

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["COUNT", "DECLINED", "MANY", "OVERHEAD", "PULL", "Outgoing"]

#: What an early message costs the receiver beyond its payload.
OVERHEAD = 128
#: Flag of DROP: the receiver has the message, or has no use for it.
DECLINED = 1
#: Flag of OFFER: the payload lies in several buffers, so that parts may have to be gathered.
MANY = 1
#: The head of a READY frame, whose tag is a UCX tag: where the part that is pulled begins, and its length.
PULL = struct.Struct("<QQ")
#: The head of a sender's DROP frame: how many parts were sent.
COUNT = struct.Struct("<Q")


class Outbound:
    """A large message that its receiver pulls.

    Attributes:
        answered: parts sent, in the order they were asked for.
        busy: parts that UCX still reads from the buffers.
        over: the receiver needs nothing more, or was told that nothing more comes.
        settled: done when `busy` is 0 again, where somebody waits for that.
    """

    __slots__ = (
        "answered",
        "buffers",
        "busy",
        "future",
        "ident",
        "nbytes",
        "over",
        "ready",
        "settled",
        "tag",
    )

    def __init__(
        self,
        ident: int,
        tag: int,
        buffers: Sequence[Buffer],
        nbytes: int,
        future: asyncio.Future[None],
        ready: Callable[[], bool] | None,
    ) -> None:
        self.ident = ident
        self.tag = tag
        self.buffers = buffers
        self.nbytes = nbytes
        self.future = future
        self.ready = ready
        self.answered = self.busy = 0
        self.over = False
        self.settled: asyncio.Future[None] | None = None

    def part(self, start: int, stop: int, accelerator: Accelerator) -> Buffer:
        """The bytes `start` to `stop`: in place where they lie in one buffer, else gathered."""
        parts: list[Buffer] = []
        at = 0
        for buffer in self.buffers:
            size = buffer.nbytes
            if at < stop and at + size > start:
                parts.append(piece(buffer, max(start - at, 0), min(stop - at, size)))
            at += size
        if len(parts) == 1:
            return parts[0]
        return memoryview(
            gather_bytes(
                [p if isinstance(p, memoryview) else accelerator.read(p, settled=True) for p in parts]
            )
        )


class Outgoing:
    """Messages to one peer.

    Attributes:
        endpoint: UCX's; None once it was given up.
        refusal: why nothing can be sent any more, once that is so.
        spoke: something was sent since the last ping.
    """

    def __init__(
        self,
        peer: int,
        engine: Engine,
        endpoint: Any,
        tag: Any,
        terms: Terms,
        accelerator: Accelerator,
        on_broken: Callable[[int], None],
    ) -> None:
        self._peer = peer
        self._engine = engine
        self.endpoint = endpoint
        self._tag = tag
        self._eager = terms.eager_bytes
        self._credit = terms.early_bytes
        self._accelerator = accelerator
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._ident = 0
        self._offers: dict[int, Outbound] = {}
        self._by_future: dict[asyncio.Future[None], Outbound] = {}
        self._idle: asyncio.Future[None] | None = None
        self._ended = False
        self.refusal: BaseException | None = None
        self.spoke = False
        self.messages = self.bytes = 0
        self.look = engine.look

    def release(self) -> Any:
        """The UCX endpoint, given up: after the end, so that nothing here holds UCX any longer."""
        endpoint, self.endpoint = self.endpoint, None
        return endpoint

    # ------------------------------------------------------------------ starting

    def send(self, tag: int, buffers: Sequence[Buffer], head: bytes) -> Awaitable[None]:
        """Start one message; see `Transport.send`."""
        if self.refusal is not None:
            raise self.refusal
        nbytes = buffers[0].nbytes if len(buffers) == 1 else sum(b.nbytes for b in buffers)
        self.messages += 1
        self.bytes += nbytes
        ready = None
        if not nbytes:
            buffers = ()
        elif on_device(buffers):
            if self._accelerator.native:
                ready = self._accelerator.fence(buffers)
            else:
                buffers = [b if isinstance(b, memoryview) else self._accelerator.read(b) for b in buffers]
        if ready is not None or nbytes > self._eager or nbytes + OVERHEAD > self._credit:
            return self._offer(tag, buffers, head, nbytes, ready)
        self._credit -= nbytes + OVERHEAD
        self._post(b"".join((wire.encode(wire.MESSAGE, tag, nbytes, head), *buffers)))  # type: ignore[arg-type]
        return DONE

    def control(self, frame: bytes) -> None:
        """Send a frame that has no payload."""
        if not self._ended:
            self._post(frame)

    def _post(self, frame: bytes) -> None:
        self.spoke = True
        self._engine.send(self._peer, self.endpoint, frame, self._tag)

    def _offer(
        self, tag: int, buffers: Sequence[Buffer], head: bytes, nbytes: int, ready: Callable[[], bool] | None
    ) -> Awaitable[None]:
        """Start a message that waits for its receive."""
        self._ident = ident = (self._ident + 1) & 0xFFFFFFFF
        future: asyncio.Future[None] = self._loop.create_future()
        message = Outbound(ident, tag, buffers, nbytes, future, ready)
        self._offers[ident] = message
        self._by_future[future] = message
        future.add_done_callback(partial(self._finished, message))
        flags = MANY if sum(1 for b in buffers if b.nbytes) > 1 else 0
        self.control(wire.encode(wire.OFFER, tag, nbytes, head, ident, flags))
        return Pending(future, self)

    # ------------------------------------------------------------------ what the peer says

    def on_credit(self, nbytes: int) -> None:
        """The peer gives back budget for early messages."""
        self._credit += nbytes

    def on_pull(self, ident: int, tag: int, head: bytes) -> None:
        """The peer has made room for a part and asks for it."""
        if len(head) != PULL.size:
            raise ProtocolError("a request for a part without its place")
        message = self._offers.get(ident)
        if message is None or message.future.done():
            return  # taken back: the peer was told, or is about to be
        start, size = PULL.unpack(head)
        if message.over or not 0 < size <= message.nbytes - start:
            raise ProtocolError(f"{size} bytes from {start} on of a message of {message.nbytes}")
        message.answered += 1
        message.busy += 1
        if message.ready is None:
            self._answer(message, tag, start, start + size)
        else:
            self._engine.when(message.ready, partial(self._answer, message, tag, start, start + size))

    def _answer(self, message: Outbound, tag: int, start: int, stop: int) -> None:
        if self._ended:
            return
        part = message.part(start, stop, self._accelerator)
        self.spoke = True
        self._engine.send(
            self._peer, self.endpoint, part, self._engine.tag(tag), partial(self._sent, message)
        )

    def _sent(self, message: Outbound, status: int) -> None:
        """UCX has let go of a part."""
        message.busy -= 1
        if status:
            self._on_broken(status)
        elif not message.busy:
            self._rest(message)

    def on_release(self, ident: int) -> None:
        """The peer has all it wants of a message."""
        message = self._offers.get(ident)
        if message is not None:
            message.over = True
            if not message.busy:
                self._rest(message)

    # ------------------------------------------------------------------ finishing

    def _rest(self, message: Outbound) -> None:
        """Nothing reads the buffers now; that may have been all."""
        if message.settled is not None and not message.settled.done():
            message.settled.set_result(None)
        if message.future.done():
            self._finished(message)  # whose turn as the future's callback may be yet to come
        elif message.over:
            message.future.set_result(None)
            self._forget(message)

    def _finished(self, message: Outbound, _: object = None) -> None:
        """The send is over; if the peer does not know, because it was cancelled or failed, tell it."""
        if not message.over and message.ident in self._offers:
            message.over = True
            self.control(wire.encode(wire.DROP, ident=message.ident, head=COUNT.pack(message.answered)))
        if not message.busy:
            self._forget(message)

    def _forget(self, message: Outbound) -> None:
        self._offers.pop(message.ident, None)
        self._by_future.pop(message.future, None)
        if self._idle is not None and not self._idle.done() and not self._pulled():
            self._idle.set_result(None)

    def settling(self, future: asyncio.Future[None]) -> asyncio.Future[None] | None:
        """See `Party.settling`."""
        message = self._by_future.get(future)
        if message is None or not message.busy or self._ended:
            return None
        if message.settled is None:
            message.settled = self._loop.create_future()
        return message.settled

    def _pulled(self) -> bool:
        """Whether a receiver is in the middle of a message."""
        return any(m.answered and not m.over and not m.future.done() for m in self._offers.values())

    def idle(self) -> asyncio.Future[None] | None:
        """Done when no receiver is in the middle of a message; None if that is so now."""
        if self._ended or not self._pulled():
            return None
        self._idle = self._loop.create_future()
        return self._idle

    # ------------------------------------------------------------------ ending

    def greet(self) -> None:
        """Be the first to say something.

        So long a message is the first that UCX writes into memory of the peer's, which has to be mapped: that
        is to happen while the peer lives, or UCX fails to, and says so on standard output.
        """
        self.control(wire.encode(wire.PING, head=bytes(MAX_HEAD)))

    def ping(self) -> None:
        """Show that this end lives, unless what was sent lately did."""
        if not self.spoke:
            self.control(wire.encode(wire.PING))
        self.spoke = False

    def fail(self, tag: int, error: BaseException) -> list[asyncio.Future[None]]:
        """See `Transport.fail`."""
        failed = [message for message in self._offers.values() if message.tag == tag]
        for message in failed:
            fail_future(message.future, error)
        return [busy for m in failed if (busy := self.settling(m.future)) is not None]

    def refuse(self, error: BaseException) -> None:
        """The peer takes nothing more."""
        self.refusal = self.refusal or error
        for message in list(self._offers.values()):
            if not message.over:  # else it has it, and UCX has not heard so yet
                fail_future(message.future, error)

    def end(self, error: BaseException) -> None:
        """The link is over: everything that waits fails."""
        self._ended = True
        self.refusal = error
        for message in list(self._offers.values()):
            if not message.over:
                fail_future(message.future, error)
            elif not message.future.done():
                message.future.set_result(None)
            if message.settled is not None and not message.settled.done():
                message.settled.set_result(None)
        self._offers.clear()
        self._by_future.clear()
        if self._idle is not None and not self._idle.done():
            self._idle.set_result(None)
