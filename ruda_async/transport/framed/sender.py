"""The outgoing half of a link: small messages at once, large ones in parts, in turn."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .. import wire
from ..base import DONE, Buffer
from ..matching import fail_future
from .activity import Activity, Looking
from .payloads import Item, Outbound
from .stream import ByteStream, Terms

__all__ = ["ANNOUNCED", "DECLINED", "FOLLOWS", "OVERHEAD", "UNSTARTED", "Sender"]

#: Flags of OFFER, READY and DROP; see `wire`.
FOLLOWS = ANNOUNCED = DECLINED = 1
UNSTARTED = 2
#: What an early message costs the receiver beyond its payload.
OVERHEAD = 128
#: Payload bytes in one part of a large message.
_PART = 512 * 1024
#: Bytes written before the loop gets its turn: well under a millisecond.
_TURN = 512 * 1024
#: Buffers handed to one write; systems allow 1024.
_VECTOR = 256
#: Frames in the queue that share one write.
_COMPANY = 16


class Sender:
    """Frames to one peer.

    Attributes:
        loop: the event loop that writes.
        look: reads what the peer has said; given by the link.
        refusal: why nothing can be sent any more, once that is so.
        writing: the stream is full, and tells when it is not.
        spoke: something was written since the last ping.
        bye_sent: the goodbye is queued or written.
    """

    def __init__(
        self,
        stream: ByteStream,
        terms: Terms,
        loop: asyncio.AbstractEventLoop,
        activity: Activity,
        on_broken: Callable[[OSError], BaseException],
        checksum: bool = False,
    ) -> None:
        self._stream = stream
        self._write = stream.write
        self.loop = loop
        self._activity = activity
        self._on_broken = on_broken
        self._checksum = checksum
        self._eager = terms.eager_bytes
        self._credit = terms.early_bytes
        self._queue: deque[Item] = deque()
        self._streams: deque[Outbound] = deque()
        self._offers: dict[int, Outbound] = {}
        self._offered_tags: dict[int, deque[Outbound]] = {}
        self._announced: dict[int, int] = {}
        self._ident = 0
        self.writing = False
        self._flushing = False
        self._ended = False
        self.look: Callable[[asyncio.Future[Any]], None] = _look_nowhere
        self.refusal: BaseException | None = None
        self.spoke = False
        self.bye_sent = False
        self.messages = self.bytes = 0

    # ------------------------------------------------------------------ starting

    def send(self, tag: int, buffers: Sequence[Buffer], head: bytes) -> Awaitable[None]:
        """Start one message; see `Transport.send`."""
        if self.refusal is not None:
            raise self.refusal
        nbytes = buffers[0].nbytes if len(buffers) == 1 else sum(b.nbytes for b in buffers)
        self.messages += 1
        self.bytes += nbytes
        flags = ident = 0
        if nbytes > self._eager:
            if nbytes > _PART or not self._take_announcement(tag):
                return self._offer(tag, buffers, head, nbytes)
            flags = FOLLOWS
        elif nbytes + OVERHEAD > self._credit:
            return self._offer(tag, buffers, head, nbytes)
        else:
            self._credit -= nbytes + OVERHEAD
        if self._checksum and nbytes:
            flags |= wire.CHECKED
            ident = wire.payload_crc(buffers)  # type: ignore[arg-type]
        frame = wire.encode(wire.MESSAGE, tag, nbytes, head, ident, flags)
        views = [frame, *buffers]
        if self.writing or self._streams or len(buffers) + len(self._queue) >= _VECTOR:
            return self._enqueue([memoryview(v) for v in views], tag)  # type: ignore[arg-type]
        return self._write_now(views, len(frame) + nbytes, tag)

    def _take_announcement(self, tag: int) -> bool:
        """Use up the peer's word that a large receive of `tag` waits, if it gave one."""
        announced = self._announced.get(tag, 0)
        if not announced:
            return False
        if announced == 1:
            del self._announced[tag]
        else:
            self._announced[tag] = announced - 1
        return True

    def _write_now(self, views: list[Any], total: int, tag: int) -> Awaitable[None]:
        """Write a message of `total` bytes at once, behind control frames that wait for company."""
        queue = self._queue
        while queue:
            company = queue.pop().views
            total += sum(map(len, company))
            views = [*company, *views]
        try:
            sent = self._write(views)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            raise self._on_broken(error) from None
        self.spoke = True
        if sent == total:
            return DONE
        return self._enqueue(_rest([memoryview(v) for v in views], sent), tag)

    def _enqueue(self, views: list[memoryview], tag: int) -> Awaitable[None]:
        """Write behind what is being written already; the caller's memory is used until then."""
        future: asyncio.Future[None] = self.loop.create_future()
        item = Item([v for v in views if len(v)], future, tag)
        if self._checksum:
            item.detach()  # a cancelled caller may change its memory, which would look like damage
        else:
            future.add_done_callback(item.detach)
        self._queue.append(item)
        self._want_write()
        return Looking(future, self.look)

    def control(self, frame: bytes) -> None:
        """Write a frame that has no payload: with the next message, or when the loop turns."""
        if self._ended:
            return
        self._queue.append(Item([memoryview(frame)]))
        if not self.writing and not self._flushing:
            self._flushing = True
            self._activity.wait_for_company(self)

    def push(self) -> None:
        """Write what waits for company."""
        self._flushing = False
        if self._queue and not self.writing:
            self.flush()

    def _offer(self, tag: int, buffers: Sequence[Buffer], head: bytes, nbytes: int) -> Awaitable[None]:
        """Start a message that waits for its receive."""
        self._ident = ident = (self._ident + 1) & 0xFFFFFFFF
        future: asyncio.Future[None] = self.loop.create_future()
        message = Outbound(ident, tag, buffers, nbytes, future)
        if nbytes > self._eager and self._take_announcement(tag):
            frame = wire.encode(wire.OFFER, tag, nbytes, head, ident, FOLLOWS)
            self._queue.append(Item([memoryview(frame)]))
            future.add_done_callback(message.detach)
            self._start(message)
        else:
            self._offers[ident] = message
            self._offered_tags.setdefault(tag, deque()).append(message)
            # Before anybody waits, so that this runs before the caller goes on and may change the memory.
            future.add_done_callback(lambda _: self._over(message))
            self.control(wire.encode(wire.OFFER, tag, nbytes, head, ident))
        return Looking(future, self.look)

    def _start(self, message: Outbound) -> None:
        """Let the payload flow."""
        self._streams.append(message)
        if not self.writing:
            self.flush()

    # ------------------------------------------------------------------ what the peer says

    def on_credit(self, nbytes: int) -> None:
        """The peer gives back budget for early messages."""
        self._credit += nbytes

    def on_announced(self, tag: int, stale: bool) -> None:
        """A large receive of `tag` waits at the peer; its message need not be offered first."""
        waiting = self._offered_tags.get(tag)
        message = next((m for m in waiting if m.nbytes > self._eager), None) if waiting else None
        if message is not None:
            self._ready(message)
        elif not stale:
            self._announced[tag] = self._announced.get(tag, 0) + 1

    def on_ready(self, ident: int) -> None:
        """The peer asks for an offered message."""
        message = self._offers.get(ident)
        if message is not None:
            self._ready(message)

    def on_declined(self, ident: int) -> None:
        """The peer has no use for a message: it is over, and the peer is told so."""
        message = self._offers.get(ident)
        if message is not None:
            self._unoffer(message)
            self.control(wire.encode(wire.DROP, ident=ident, flags=UNSTARTED))
        else:
            message = next((m for m in self._streams if m.ident == ident), None)
        if message is not None and not message.future.done():
            message.future.set_result(None)

    def on_bye(self, gone: BaseException) -> None:
        """The peer takes nothing more."""
        self.refusal = self.refusal or gone
        for message in list(self._offers.values()):
            self._unoffer(message)
            fail_future(message.future, gone)

    def _ready(self, message: Outbound) -> None:
        self._unoffer(message)
        if message.nbytes:
            self._start(message)
        elif not message.future.done():
            message.future.set_result(None)

    def _over(self, message: Outbound) -> None:
        """The send of an offered message has ended, well or not."""
        message.detach()
        self._take_back(message)

    def _take_back(self, message: Outbound) -> None:
        """An offer's sender was cancelled or failed before the receiver asked for it."""
        if self._unoffer(message):
            self.control(wire.encode(wire.DROP, ident=message.ident, flags=UNSTARTED))

    def _unoffer(self, message: Outbound) -> bool:
        if self._offers.pop(message.ident, None) is None:
            return False
        waiting = self._offered_tags[message.tag]
        waiting.remove(message)
        if not waiting:
            del self._offered_tags[message.tag]
        return True

    # ------------------------------------------------------------------ writing

    def flush(self) -> None:
        """Write what the stream takes, at most a turn's worth."""
        written = 0
        queue = self._queue
        try:
            while written < _TURN:
                if not queue:
                    if not self._streams:
                        self._stop_write()
                        if self.bye_sent:
                            self._stream.end()
                        return
                    self._next_part()
                views = queue[0].views
                if len(queue) > 1:
                    views = [view for item in itertools.islice(queue, _COMPANY) for view in item.views]
                sent = self._write(views[:_VECTOR])
                self.spoke = True
                written += sent
                self._sent(sent)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._on_broken(error)
            return
        self._want_write()

    def _sent(self, size: int) -> None:
        """`size` bytes off the front of the queue have left."""
        queue = self._queue
        while queue:
            item = queue[0]
            length = sum(map(len, item.views))
            if size < length:
                item.views = _rest(item.views, size)
                return
            size -= length
            queue.popleft()
            item.views = []
            if item.future is not None and not item.future.done():
                item.future.set_result(None)

    def _next_part(self) -> None:
        """Queue the next part of the next large message, in turn."""
        message = self._streams.popleft()
        if message.future.done():  # cancelled, failed or declined: the peer is told, and no more is read
            self._queue.append(Item([memoryview(wire.encode(wire.DROP, ident=message.ident))]))
            return
        views = message.take(_PART)
        size = sum(map(len, views))
        if self._checksum:
            views = [memoryview(b"".join(views))]  # see `_enqueue`
            crc = wire.payload_crc(views)
            frame = memoryview(wire.encode(wire.DATA, crc, size, ident=message.ident, flags=wire.CHECKED))
        else:
            frame = memoryview(wire.encode(wire.DATA, 0, size, ident=message.ident))
        message.part = item = Item([frame, *views], None if message.left else message.future, message.tag)
        self._queue.append(item)
        if message.left:
            self._streams.append(message)

    def _want_write(self) -> None:
        if not self.writing and not self._ended:
            self.writing = True
            self._activity.writers += 1
            self._stream.on_writable(self.flush)

    def _stop_write(self) -> None:
        if self.writing:
            self.writing = False
            self._activity.writers -= 1
            self._stream.on_writable(None)

    # ------------------------------------------------------------------ ending

    def ping(self) -> None:
        """Show that this end lives, unless what was sent lately did."""
        if not self.spoke and not self._queue and not self._streams:
            self.control(wire.encode(wire.PING))
        self.spoke = False

    def say_bye(self, reason: str) -> None:
        """End this half once what was accepted is written."""
        if self.bye_sent or self._ended:
            return
        self.bye_sent = True
        self.control(wire.encode(wire.BYE, head=reason.encode()[:200]))

    def fail(self, tag: int, error: BaseException) -> None:
        """See `Transport.fail`."""
        self._announced.pop(tag, None)
        for message in list(self._offered_tags.get(tag, ())):
            self._take_back(message)
            fail_future(message.future, error)
        for message in self._streams:
            if message.tag == tag:
                message.fail(error)
        for item in self._queue:
            if item.tag == tag:
                item.fail(error)

    def end(self, error: BaseException) -> None:
        """The link is over: everything that waits fails."""
        self._ended = True
        self.refusal = error
        self._stop_write()
        waiting = [item.future for item in self._queue if item.future is not None]
        waiting += [message.future for message in (*self._streams, *self._offers.values())]
        self._queue.clear()
        self._streams.clear()
        self._offers.clear()
        self._offered_tags.clear()
        for future in waiting:
            fail_future(future, error)


def _look_nowhere(_: object) -> None:
    """There is no receiver yet."""


def _rest(views: list[memoryview], sent: int) -> list[memoryview]:
    """What is left of `views` after `sent` bytes of them."""
    for index, view in enumerate(views):
        size = view.nbytes
        if sent < size:
            rest = views[index:]
            rest[0] = memoryview(view)[sent:]
            return [v for v in rest if v.nbytes]
        sent -= size
    return []
