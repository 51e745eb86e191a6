"""Matching messages with receives, apart from any I/O.

One `Inbox` per peer holds, for every tag, either receives that wait for a message or messages that wait
for a receive, never both. The transport's I/O side calls `claim` when an envelope arrives and `keep` when
nobody claimed it; the caller's side is `post` and `probe`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from .base import DONE, Buffer, Envelope, Ready, TakenBack, UnexpectedMessage

__all__ = [
    "Arrived",
    "Inbox",
    "Message",
    "Receive",
    "awaitable",
    "copy",
    "fail_future",
    "gather_bytes",
    "scatter",
]

#: A memoryview assignment holds the interpreter lock; up to this size that does not matter.
_COPY_WITH_LOCK = 256 * 1024


def fail_future(future: asyncio.Future[Any], error: BaseException) -> None:
    """Fail `future` unless it is done; nobody is obliged to look at the error."""
    if not future.done():
        future.set_exception(error)
        future.exception()  # marks it as seen: an abandoned operation must not log


def copy(destination: memoryview, source: memoryview) -> None:
    """Copy bytes; large copies let other threads run."""
    if len(source) <= _COPY_WITH_LOCK:
        destination[:] = source
    else:
        import numpy as np

        np.copyto(np.frombuffer(destination, np.uint8), np.frombuffer(source, np.uint8))


def scatter(data: memoryview, buffers: Sequence[Buffer]) -> None:
    """Copy `data` over `buffers` in turn; the lengths must add up."""
    if len(buffers) == 1:
        copy(buffers[0], data)  # type: ignore[arg-type]
        return
    at = 0
    for buffer in buffers:
        size = buffer.nbytes
        copy(buffer, data[at : at + size])  # type: ignore[arg-type]
        at += size


def gather_bytes(buffers: Sequence[Buffer]) -> bytes:
    """One bytes object of all `buffers`: the copy that lets a sender go on."""
    if len(buffers) == 1:
        return bytes(buffers[0])  # type: ignore[arg-type]
    return b"".join(buffers)  # type: ignore[arg-type]


class Receive:
    """One posted receive.

    Attributes:
        future: done when the buffers are filled; cancelled by the caller to withdraw.
        matched: a message has been found for it.
    """

    __slots__ = ("buffers", "future", "head", "matched", "nbytes", "tag")

    def __init__(
        self, tag: int, buffers: Sequence[Buffer], head: bytes, nbytes: int, future: asyncio.Future[None]
    ) -> None:
        self.tag = tag
        self.buffers = buffers
        self.head = head
        self.nbytes = nbytes
        self.future = future
        self.matched = False

    @property
    def live(self) -> bool:
        """Whether the caller still waits."""
        return not self.future.done()

    def finish(self) -> None:
        """The buffers are filled."""
        if not self.future.done():
            self.future.set_result(None)

    def accepts(self, head: bytes, nbytes: int) -> bool:
        """Whether a message of this envelope is the one that was asked for."""
        return nbytes == self.nbytes and head == self.head

    def refuse(self, peer: int, head: bytes, nbytes: int) -> None:
        """Fail because another message came."""
        fail_future(
            self.future,
            UnexpectedMessage(peer, self.tag, Envelope(head, nbytes), self.head, self.nbytes),
        )

    def give_up(self, peer: int) -> None:
        """Fail because the message that it had met is not coming."""
        fail_future(self.future, TakenBack(peer, self.tag))


class Message(Protocol):
    """An envelope that came before its receive; a transport has its own kinds."""

    head: bytes
    nbytes: int

    @property
    def live(self) -> bool:
        """False once its sender took it back."""
        ...

    def deliver(self, receive: Receive) -> None:
        """Fill an accepting receive, now or as the payload comes."""
        ...

    def drop(self) -> None:
        """Nobody will receive it."""
        ...


class Arrived:
    """A message whose whole payload lies here."""

    __slots__ = ("head", "nbytes", "payload", "release")

    live = True

    def __init__(self, head: bytes, payload: bytes, release: Callable[[int], None]) -> None:
        self.head = head
        self.payload = payload
        self.nbytes = len(payload)
        self.release = release

    def deliver(self, receive: Receive) -> None:
        """Copy the payload and give its budget back."""
        if self.nbytes:
            scatter(memoryview(self.payload), receive.buffers)
        self.release(self.nbytes)
        receive.finish()

    def drop(self) -> None:
        """Give the budget back."""
        self.release(self.nbytes)


class Inbox:
    """Matches receives and early messages of one peer by tag, in order, for a transport to build on.

    Two sides call it, on the loop's thread: `post` and `probe` are for the receiver, the rest for the medium,
    when an envelope has come. An early message is a `Message` of the transport's own, which holds its bytes
    against the transport's budget until `Message.deliver` or `Message.drop`.
    """

    __slots__ = ("_early", "_loop", "_many_probes", "_peer", "_posted", "_probes", "closed")

    def __init__(self, peer: int, loop: asyncio.AbstractEventLoop) -> None:
        self._peer = peer
        self._loop = loop
        self._posted: dict[int, deque[Receive]] = {}
        self._early: dict[int, deque[Message]] = {}
        self._probes: dict[int, asyncio.Future[Envelope]] = {}
        #: With so many it is time to forget those that were withdrawn: their tags may not come again.
        self._many_probes = 64
        #: Why nothing more will arrive, once that is so.
        self.closed: BaseException | None = None

    # ------------------------------------------------------------------ the caller's side

    def post(self, tag: int, buffers: Sequence[Buffer], head: bytes) -> Receive | None:
        """Post a receive; None means that an early message filled it already.

        Raises:
            UnexpectedMessage: an early message is not the one asked for.
            BaseException: the inbox is closed and nothing is left to read.
        """
        nbytes = buffers[0].nbytes if len(buffers) == 1 else sum(b.nbytes for b in buffers)
        message = self._take(tag) if tag in self._early else None
        if message is None and self.closed is not None:
            raise self.closed
        if message is not None and (nbytes != message.nbytes or head != message.head):
            message.drop()
            raise UnexpectedMessage(self._peer, tag, Envelope(message.head, message.nbytes), head, nbytes)
        receive = Receive(tag, buffers, head, nbytes, self._loop.create_future())
        if message is not None:
            receive.matched = True
            message.deliver(receive)
            return None if receive.future.done() else receive
        waiting = self._posted.get(tag)
        if waiting is None:
            self._posted[tag] = deque((receive,))
        else:
            while waiting and not waiting[-1].live:
                waiting.pop()  # receives that timed out one after the other must not pile up
            waiting.append(receive)
        return receive

    def probe(self, tag: int) -> Awaitable[Envelope]:
        """Wait for the next message of `tag` and leave it in place."""
        message = self._first(tag)
        if message is not None:
            return Ready(Envelope(message.head, message.nbytes))
        if self.closed is not None:
            raise self.closed
        waiting = self._probes.get(tag)
        if waiting is not None and not waiting.done():
            raise RuntimeError(f"tag {tag:#x} from rank {self._peer} is probed already")
        if len(self._probes) >= self._many_probes:
            self._probes = {tag: probe for tag, probe in self._probes.items() if not probe.done()}
            self._many_probes = max(64, 2 * len(self._probes))
        future: asyncio.Future[Envelope] = self._loop.create_future()
        self._probes[tag] = future
        return future

    def _first(self, tag: int) -> Message | None:
        """The oldest early message that its sender still wants delivered."""
        waiting = self._early.get(tag)
        if waiting is None:
            return None
        while waiting:
            if waiting[0].live:
                return waiting[0]
            waiting.popleft()
        del self._early[tag]
        return None

    def _take(self, tag: int) -> Message | None:
        message = self._first(tag)
        if message is not None:
            waiting = self._early[tag]
            waiting.popleft()
            if not waiting:
                del self._early[tag]
        return message

    # ------------------------------------------------------------------ the transport's side

    def claim(self, tag: int) -> Receive | None:
        """The receive that the next message of `tag` belongs to, if one waits."""
        waiting = self._posted.get(tag)
        if waiting is None:
            return None
        while waiting:
            receive = waiting.popleft()
            if not receive.future.done():
                if not waiting:
                    del self._posted[tag]
                receive.matched = True
                return receive
        del self._posted[tag]
        return None

    def waiting(self, tag: int, beyond: int) -> int:
        """How many receives of `tag` wait for messages of more than `beyond` bytes."""
        return sum(r.nbytes > beyond and not r.future.done() for r in self._posted.get(tag, ()))

    def keep(self, tag: int, message: Message) -> None:
        """Hold a message for which nobody waits, and wake a probe."""
        waiting = self._early.get(tag)
        if waiting is None:
            self._early[tag] = deque((message,))
        else:
            waiting.append(message)
        probe = self._probes.pop(tag, None)
        if probe is not None and not probe.done():
            probe.set_result(Envelope(message.head, message.nbytes))

    def put_back(self, tag: int, message: Message) -> None:
        """Return a message whose receive was withdrawn to the front of its queue, or to who waits now."""
        receive = self.claim(tag)
        if receive is None:
            self._early.setdefault(tag, deque()).appendleft(message)
            probe = self._probes.pop(tag, None)
            if probe is not None and not probe.done():
                probe.set_result(Envelope(message.head, message.nbytes))
        elif receive.accepts(message.head, message.nbytes):
            message.deliver(receive)
        else:
            receive.refuse(self._peer, message.head, message.nbytes)
            message.drop()

    def fail(self, tag: int, error: BaseException) -> None:
        """Fail what waits for `tag` and drop its early messages."""
        posted = self._posted.pop(tag, None)
        if posted:
            for receive in posted:
                fail_future(receive.future, error)
        early = self._early.pop(tag, None)
        if early:
            for message in early:
                message.drop()
        probe = self._probes.pop(tag, None)
        if probe is not None:
            fail_future(probe, error)

    def close(self, error: BaseException) -> None:
        """Nothing more arrives: fail what waits; early messages stay readable."""
        if self.closed is None:
            self.closed = error
        posted, self._posted = self._posted, {}
        for receives in posted.values():
            for receive in receives:
                fail_future(receive.future, error)
        probes, self._probes = self._probes, {}
        for probe in probes.values():
            fail_future(probe, error)

    def drop_all(self) -> None:
        """Forget early messages; for a transport that closes."""
        early, self._early = self._early, {}
        for messages in early.values():
            for message in messages:
                message.drop()


def awaitable(receive: Receive | None) -> Awaitable[None]:
    """What `Transport.recv_into` returns for the outcome of `Inbox.post`."""
    return DONE if receive is None else receive.future
