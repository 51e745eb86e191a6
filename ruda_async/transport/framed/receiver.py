"""The incoming half of a link: frames are parsed, payloads go where their receives want them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import Any

from ...errors import ProtocolError
from .. import wire
from ..base import DONE, Buffer, Envelope
from ..matching import Arrived, Inbox, scatter
from .activity import Activity, Looking, Withdrawable, blocking
from .announcements import Announcements
from .guard import Guard
from .payloads import Inbound
from .sender import ANNOUNCED, DECLINED, FOLLOWS, OVERHEAD, UNSTARTED, Sender
from .stream import ByteStream, Terms

__all__ = ["Receiver"]

#: Bytes read before the loop gets its turn: well under a millisecond.
_TURN = 512 * 1024
#: Room for frames and small payloads; and how much of it to read while payloads are large, so that
#: their bytes are not read here only to be copied on.
_STAGE = 128 * 1024
_PEEK = 2048
#: Payload read at once: what the peer has just written is still in the processor's cache.
_BITE = 256 * 1024
#: Misses in a row after which the next twice as many waits do not look at the stream first.
_LUCK = 8


class Receiver:
    """Frames from one peer.

    Attributes:
        inbox: where messages and receives meet.
        heard: something came since this was last set to False.
        early_bytes: payload that waits here for its receive.
    """

    def __init__(
        self,
        peer: int,
        stream: ByteStream,
        terms: Terms,
        sender: Sender,
        loop: asyncio.AbstractEventLoop,
        activity: Activity,
        is_stale: Callable[[int], bool],
        on_bye: Callable[[str], None],
        on_end: Callable[[Exception | None], None],
        checksum: bool = False,
    ) -> None:
        self._peer = peer
        self._read_into = stream.read_into
        self._await_bytes = stream.await_bytes
        self._await_either: Callable[[], bool] | None = getattr(stream, "await_either", None)
        self._luck = _LUCK
        self._sender = sender
        self._activity = activity
        self.is_stale = is_stale
        self._on_bye = on_bye
        self._on_end = on_end
        # Receives beyond this are announced to the peer, whose messages beyond it are offered.
        self._announce_beyond = terms.eager_bytes
        self._grant = terms.early_bytes // 4
        self._owed = 0
        # What the peer has spent of its budget for early messages and was not given back.
        self._budget = terms.early_bytes
        self._spent = 0
        self._view = memoryview(bytearray(_STAGE))
        self._start = self._stop = 0
        self._bulk = False
        self._inbound: dict[int, Inbound] = {}
        self._current: Inbound | None = None
        self._left = 0
        self._guard = Guard(required=checksum)
        self.inbox = Inbox(peer, loop)
        self._announcements = Announcements(terms.eager_bytes, self.inbox, sender.control, ANNOUNCED)
        self.heard = True
        self.messages = self.bytes = self.early_bytes = 0

    # ------------------------------------------------------------------ receives

    def recv_into(self, tag: int, buffers: Sequence[Buffer], head: bytes) -> Awaitable[None]:
        """Post a receive; see `Transport.recv_into`."""
        receive = self.inbox.post(tag, buffers, head)
        if receive is None:
            return DONE
        if receive.nbytes > self._announce_beyond and not receive.matched:
            self._announcements.announce(tag)
        return Withdrawable(receive.future, self.look, self._withdrawn)

    def _withdrawn(self, future: asyncio.Future[Any]) -> None:
        """A receive was cancelled: what has come for it is still in its memory, which is its caller's now."""
        for inbound in self._under_way():
            inbound.withdraw(future)

    def probe(self, tag: int) -> Awaitable[Envelope]:
        """See `Transport.probe`."""
        return Looking.unless_ready(self.inbox.probe(tag), self.look)

    def look(self, future: asyncio.Future[Any]) -> None:
        """Somebody is about to wait for `future`: read what is there or comes within moments.

        A peer that answers late makes looking a waste, so it is done less often after every miss.
        """
        self._activity.push()
        if blocking.seconds:
            self._look_long(future)
            return
        if self._luck <= 0:
            self._luck += 1
            return
        if self._await_bytes():
            self.read()
            if future.done():
                self._luck = _LUCK
                return
        self._luck -= 1
        if not self._luck:
            self._luck = -2 * _LUCK

    def _look_long(self, future: asyncio.Future[Any]) -> None:
        """This thread may block: move bytes here, unless the loop is needed to write to others."""
        activity, sender = self._activity, self._sender
        wait: Callable[[], bool] | None
        while not future.done() and monotonic() < blocking.until:
            wait = self._await_bytes
            if sender.writing:
                sender.flush()
                if future.done():
                    return
                if sender.writing:
                    wait = self._await_either
            if wait is None or activity.writers > sender.writing or not wait():
                return
            self.read()

    def accept(self, inbound: Inbound) -> None:
        """A message has found its receive: ask for the payload, unless it comes without a word."""
        self._answer(inbound, wire.READY)
        if not inbound.nbytes:
            self._inbound.pop(inbound.ident, None)
            inbound.advance(0)

    def _given_up(self, inbound: Inbound, unstarted: bool) -> None:
        """The sender of a message will not finish it; `unstarted`: it had not begun with the payload."""
        tag = inbound.tag
        if unstarted and inbound.token and not self.is_stale(tag):
            self._announcements.give_back(inbound.token, tag, self._inbound.values())
        inbound.give_up(self._peer)

    def decline(self, inbound: Inbound) -> None:
        """Nobody will receive an offered message: let its sender go on."""
        self._answer(inbound, wire.DROP, DECLINED)

    def _answer(self, inbound: Inbound, kind: int, flags: int = 0) -> None:
        """Say what becomes of an offered message, unless its sender needs no word any more."""
        if not inbound.asked:
            inbound.asked = True
            inbound.asked_at = self._announcements.moment()
            self._sender.control(wire.encode(kind, ident=inbound.ident, flags=flags))

    def owe(self, cost: int) -> None:
        """Give budget back to the sender, in large coins."""
        self._owed += cost
        if self._owed >= self._grant:
            owed, self._owed = self._owed, 0
            self._spent -= owed
            self._sender.control(wire.encode(wire.CREDIT, 0, owed))

    # ------------------------------------------------------------------ reading

    def read(self) -> None:
        """Read what has come, at most a turn's worth."""
        budget = _TURN
        read_into = self._read_into
        try:
            while budget > 0:
                current = self._current
                if current is not None:
                    target = current.target(min(self._left, _BITE))
                    size = read_into(target)
                    if not size:
                        return self._on_end(None)
                    budget -= size
                    self.heard = True
                    if self._guard.active:
                        self._guard.add(target[:size], size == self._left)
                    self._take(current, size)
                    if size < len(target):
                        return None  # the stream is drained
                else:
                    room = self._view[self._stop : self._stop + _PEEK if self._bulk else _STAGE]
                    size = read_into(room)
                    if not size:
                        return self._on_end(None)
                    budget -= size
                    self.heard = True
                    self._stop += size
                    self._parse()
                    if size < len(room) and self._current is None:
                        return None
        except (BlockingIOError, InterruptedError):
            pass
        except (OSError, ProtocolError) as error:
            self._on_end(error)
        except (MemoryError, OverflowError):
            self._on_end(ProtocolError("a message that is larger than this process's memory"))
        return None

    def _take(self, current: Inbound, size: int) -> None:
        """`size` payload bytes of the current part have come."""
        self._left -= size
        if current.advance(size):
            self._inbound.pop(current.ident, None)
            self._current = None
        elif not self._left:
            self._current = None

    def _parse(self) -> None:
        """Handle all whole frames in the stage; leave `_current` set where a payload goes on."""
        view, start, stop = self._view, self._start, self._stop
        while self._current is None and stop - start >= wire.PREFIX_BYTES:
            frame = wire.decode_prefix(view, start)
            body = start + wire.PREFIX_BYTES + frame.head_bytes
            if body > stop:
                break
            head = bytes(view[start + wire.PREFIX_BYTES : body]) if frame.head_bytes else b""
            wire.check(frame, view[start : start + wire.PREFIX_BYTES], head)
            start = body
            kind, nbytes = frame.kind, frame.payload_bytes
            if kind == wire.MESSAGE:
                if frame.flags or self._guard.required:
                    self._guard.begin(frame, frame.ident)
                if nbytes <= stop - start and not frame.flags & FOLLOWS:
                    if self._guard.active:
                        self._guard.add(view[start : start + nbytes], True)
                    self._message(frame.tag, head, view[start : start + nbytes])
                    start += nbytes
                    self._bulk = nbytes > _PEEK
                    continue
                self._begin_message(frame.tag, head, nbytes, bool(frame.flags & FOLLOWS))
            elif kind == wire.DATA:
                self._guard.begin(frame, frame.tag)
                self._current, self._left = self._taker(frame), nbytes
                self._bulk = True
            else:
                self._handle(frame, head)
                continue
            start = self._feed(start, stop)
        if start == stop:
            start = stop = 0
        elif stop > len(view) // 2:  # what is left is a part of one frame, so this moves little
            view[: stop - start] = bytes(view[start:stop])
            start, stop = 0, stop - start
        self._start, self._stop = start, stop

    def _feed(self, start: int, stop: int) -> int:
        """Give the current payload what lies in the stage already; the new start."""
        while self._current is not None and start < stop:
            current = self._current
            target = current.target(min(self._left, stop - start))
            size = len(target)
            target[:] = self._view[start : start + size]
            start += size
            if self._guard.active:
                self._guard.add(target, size == self._left)
            self._take(current, size)
        return start

    def _taker(self, frame: wire.Frame) -> Inbound:
        """The message whose payload a `DATA` frame goes on with."""
        inbound = self._inbound.get(frame.ident)
        if (
            inbound is None
            or not 0 < frame.payload_bytes <= inbound.nbytes - inbound.received
            # Its length has not met a receive's yet, so there may be no room for it.
            or not (inbound.asked or self.is_stale(inbound.tag))
        ):
            raise ProtocolError(
                f"{frame.payload_bytes} bytes of payload for message {frame.ident}, which takes none"
            )
        return inbound

    # ------------------------------------------------------------------ frames

    def _message(self, tag: int, head: bytes, payload: memoryview) -> None:
        """A whole small message has come."""
        nbytes = len(payload)
        self.messages += 1
        self.bytes += nbytes
        self._spend(nbytes + OVERHEAD)
        receive = self.inbox.claim(tag)
        if receive is not None:
            self.owe(nbytes + OVERHEAD)
            if nbytes == receive.nbytes and head == receive.head:
                if nbytes:
                    scatter(payload, receive.buffers)
                receive.finish()
            else:
                receive.refuse(self._peer, head, nbytes)
        elif self.is_stale(tag):
            self.owe(nbytes + OVERHEAD)
        else:
            self.early_bytes += nbytes
            self.inbox.keep(tag, Arrived(head, bytes(payload), self._consumed))

    def _spend(self, cost: int) -> None:
        """The peer uses up some of its budget for early messages."""
        self._spent += cost
        if self._spent > self._budget:
            raise ProtocolError(f"more early messages came than early_bytes={self._budget} allows")

    def _consumed(self, nbytes: int) -> None:
        """An early message was received or dropped."""
        self.early_bytes -= nbytes
        self.owe(nbytes + OVERHEAD)

    def _begin_message(self, tag: int, head: bytes, nbytes: int, follows: bool) -> None:
        """A message whose payload is still coming: a small one, or a large one that was announced."""
        self.messages += 1
        self.bytes += nbytes
        if (nbytes > self._announce_beyond) is not follows:
            raise ProtocolError(f"a message of {nbytes} bytes came without an offer")
        if follows:
            self._follow(tag, nbytes)
        cost = 0 if follows else nbytes + OVERHEAD
        self._spend(cost)
        inbound = Inbound(self, -1, tag, head, nbytes, asked=True, cost=cost)
        inbound.live = self.inbox.closed is None  # if not, see `_offered`
        self._match(inbound)
        self._current, self._left = inbound, nbytes

    def _match(self, inbound: Inbound) -> None:
        """Join an envelope with its receive, or keep it."""
        receive = self.inbox.claim(inbound.tag)
        if receive is None:
            if self.is_stale(inbound.tag):
                inbound.drop()
            else:
                self.inbox.keep(inbound.tag, inbound)
        elif inbound.nbytes == receive.nbytes and inbound.head == receive.head:
            inbound.deliver(receive)
        else:
            receive.refuse(self._peer, inbound.head, inbound.nbytes)
            inbound.drop()

    def _handle(self, frame: wire.Frame, head: bytes) -> None:
        """A frame without payload."""
        kind, flags, ident = frame.kind, frame.flags, frame.ident
        sender = self._sender
        if kind == wire.OFFER:
            self._offered(frame, head)
        elif kind == wire.READY:
            if flags & ANNOUNCED:
                sender.on_announced(frame.tag, self.is_stale(frame.tag))
            else:
                sender.on_ready(ident)
        elif kind == wire.DROP:
            if flags & DECLINED:
                sender.on_declined(ident)
            else:
                inbound = self._inbound.pop(ident, None)
                if inbound is not None:
                    self._given_up(inbound, bool(flags & UNSTARTED))
        elif kind == wire.CREDIT:
            sender.on_credit(frame.payload_bytes)
        elif kind == wire.BYE:
            self._on_bye(head.decode(errors="replace"))
        elif kind != wire.PING:
            raise ProtocolError(f"a frame of kind {kind} is not expected here")

    def _offered(self, frame: wire.Frame, head: bytes) -> None:
        if frame.ident in self._inbound:
            raise ProtocolError(f"message {frame.ident} is offered twice")
        if self.inbox.closed is not None:
            return  # the link broke under a write meanwhile: this payload does not come any more
        self.messages += 1
        self.bytes += frame.payload_bytes
        tag = frame.tag
        follows = bool(frame.flags & FOLLOWS)
        inbound = Inbound(self, frame.ident, tag, head, frame.payload_bytes, asked=follows)
        self._inbound[frame.ident] = inbound
        if follows:
            self._follow(tag, frame.payload_bytes)
        elif frame.payload_bytes > self._announce_beyond:
            inbound.token = self._announcements.take(tag)  # they cross: the sender will use it for this offer
            inbound.asked = inbound.token > 0
        self._match(inbound)

    def _follow(self, tag: int, nbytes: int) -> None:
        """A message comes by an announcement, whose own receive may have been withdrawn since."""
        if not self._announcements.take(tag) and not self.is_stale(tag):
            raise ProtocolError(f"{nbytes} bytes follow that nobody was ready for")

    # ------------------------------------------------------------------ ending

    def fail(self, tag: int, error: BaseException) -> None:
        """See `Transport.fail`."""
        self.inbox.fail(tag, error)
        self._announcements.forget(tag)
        for inbound in self._under_way():
            if inbound.tag == tag:
                inbound.fail(error)

    def end(self, error: BaseException) -> None:
        """Nothing more comes: what waits fails; what is here stays readable."""
        under_way = self._under_way()
        self._inbound.clear()
        self._current = None
        for inbound in under_way:
            inbound.fail(error)
        self.inbox.close(error)

    def _under_way(self) -> list[Inbound]:
        current = self._current
        rest = [i for i in self._inbound.values() if i is not current]
        return rest if current is None else [current, *rest]
