"""One call in flight on this rank: the door from its algorithm to the transport, and how it ends early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from .collectives.native import Native
from .errors import ProtocolError, RudaError
from .fresh import allocate
from .tags import LANES, tag_of
from .transport import blocking
from .transport.base import Buffer, Capabilities, Envelope, Ready, TakenBack, UnexpectedMessage
from .transport.regions import RegionDestroyed

if TYPE_CHECKING:
    from .channel import Channel
    from .collectives.operation import Settings
    from .heap import Heap
    from .tensors import Target, TensorAdapter
    from .transport.provider import NativeCall, Provider

__all__ = ["Operation"]

T = TypeVar("T")

#: Heads of the later messages of a stream: their place in it, modulo 256. The first has the call's
#: fingerprint, which is longer.
_PLACES = tuple(bytes((place,)) for place in range(256))


class Operation:
    """One call in flight on this rank; the `collectives.operation.Link` that its algorithm runs over.

    Attributes:
        rank, size: this rank's number in the group, and how many there are.
        sequence: the call's number on its channel.
        head: the encoded fingerprint, once the input was checked.
        error: why the call has to end, once something decided that.
        present: the group ranks that are known to have entered this call.
        started, deadline: `time.monotonic` seconds.
        silent: the job's rank that gave up here and whose reason is waited for, if there is one.
        sent, received: bytes of payload in the messages that this rank has posted.
    """

    __slots__ = (
        "_busy",
        "_members",
        "_native",
        "_receives",
        "_sends",
        "_tag",
        "_transport",
        "_watches",
        "capabilities",
        "channel",
        "deadline",
        "error",
        "head",
        "heap",
        "name",
        "present",
        "providers",
        "rank",
        "received",
        "reported",
        "sent",
        "sequence",
        "settings",
        "silent",
        "size",
        "started",
    )

    def __init__(
        self, channel: Channel, name: str, sequence: int, timeout: float, settings: Settings
    ) -> None:
        node = channel.node
        self.channel = channel
        self.name = name
        self.sequence = sequence
        self.settings = settings
        self.rank = channel.rank
        self.size = channel.size
        self.capabilities: Capabilities = channel.capabilities
        self.head = b""
        self.error: RudaError | None = None
        self.started = monotonic()
        self.deadline = self.started + timeout
        self.reported = False
        self.silent: int | None = None
        self.sent = 0
        self.received = 0
        self.present: set[int] = {channel.rank}
        self.heap: Heap | None = node.heap
        self._transport = node.transport
        self._members = channel.members
        self._native: Native | None = None
        self.providers: tuple[Provider, ...] = channel.natives.providers
        self._tag = tag_of(channel.id, sequence)
        #: How many messages were posted, by peer and lane.
        self._sends: dict[int, int] = {}
        self._receives: dict[int, int] = {}
        #: Waits for shared memory, for threads and for a reason; made when there is one.
        self._watches: set[asyncio.Future[None]] | None = None
        #: What the transport cannot withdraw at once.
        self._busy: list[asyncio.Future[None]] = []

    # ------------------------------------------------------------------ what algorithms use

    def send(self, peer: int, *buffers: Buffer, lane: int = 0) -> Awaitable[None]:
        """Start one message to `peer`; see `collectives.operation.Link`."""
        if self.error is not None:
            raise self.error
        stream = peer << 4 | lane
        place = self._sends.get(stream, 0)
        self._sends[stream] = place + 1
        head = self._head_at(place)
        for buffer in buffers:
            self.sent += buffer.nbytes
        return self._transport.send(self._members[peer], self._tag | lane, buffers, head)

    def recv_into(self, peer: int, *buffers: Buffer, lane: int = 0) -> Awaitable[None]:
        """Start to receive the next message from `peer`; see `collectives.operation.Link`."""
        if self.error is not None:
            raise self.error
        stream = peer << 4 | lane
        place = self._receives.get(stream, 0)
        self._receives[stream] = place + 1
        head = self._head_at(place)
        for buffer in buffers:
            self.received += buffer.nbytes
        return self._transport.recv_into(self._members[peer], self._tag | lane, buffers, head)

    def probe(self, peer: int, lane: int = 0) -> Awaitable[Envelope]:
        """Wait for the next message from `peer` and check its head; see `collectives.operation.Link`."""
        if self.error is not None:
            raise self.error
        member, tag = self._members[peer], self._tag | lane
        expected = self._head_at(self._receives.get(peer << 4 | lane, 0))
        waiting = self._transport.probe(member, tag)
        if type(waiting) is Ready:
            envelope: Envelope = waiting.value
            if envelope.head != expected:
                raise UnexpectedMessage(member, tag, envelope, expected, envelope.nbytes)
            return waiting
        return self._checked(waiting, member, tag, expected)

    def _head_at(self, place: int) -> bytes:
        """The head of a stream's message at this place, counted from 0."""
        return _PLACES[place & 255] if place else self.head

    async def _checked(
        self, waiting: Awaitable[Envelope], member: int, tag: int, expected: bytes
    ) -> Envelope:
        envelope = await waiting
        if envelope.head != expected:
            raise UnexpectedMessage(member, tag, envelope, expected, envelope.nbytes)
        return envelope

    def native(self, call: NativeCall, exact: bool = True) -> Native | None:
        """The turn of this call where a provider runs it; see `collectives.operation.Link`."""
        self._native = native = self.channel.natives.take(self, call, exact)
        return native

    async def turn(self) -> None:
        """Let the event loop run other work; a call that runs by hand does so when its time is up."""
        if not blocking.seconds or monotonic() > blocking.until:
            await asyncio.sleep(0)
        if self.error is not None:
            raise self.error

    # ------------------------------------------------------------------ shared memory

    async def allocate(
        self, adapter: TensorAdapter[T], like: T, shape: tuple[int, ...], dtype: str
    ) -> Target[T]:
        """A fresh tensor; see `collectives.operation.Link`."""
        return await allocate(adapter, like, shape, dtype, self._watched, self.heap)

    def open(self, peer: int, number: int) -> memoryview:
        """Memory of `peer`; see `collectives.operation.Link`."""
        assert self.heap is not None
        try:
            return self.heap.regions.open(self._members[peer], number)
        except RegionDestroyed:
            raise  # with the call, which the peer has given up: `given_up_by`
        except LookupError:
            raise ProtocolError(
                f"{self}: rank {peer} offers memory that it does not have", rank=peer
            ) from None
        except OSError as error:
            raise RudaError(
                f"{self}: no room here to map shared memory of rank {peer} ({error.strerror or error}); "
                "raise this rank's limits on open files and address space (ulimit -n, ulimit -v); "
                "algorithm=pairwise does without"
            ) from error

    def signal(self, peer: int) -> None:
        """Tell `peer` that something was written; see `collectives.operation.Link`."""
        assert self.heap is not None
        self.heap.regions.signal(self._members[peer])

    def count(self, sent: int = 0, received: int = 0) -> None:
        """Bytes that pass through shared memory; see `collectives.operation.Link`."""
        self.sent += sent
        self.received += received

    def watch(self, peer: int, ready: Callable[[], bool]) -> Awaitable[None]:
        """Wait for what `peer` writes; see `collectives.operation.Link`."""
        if self.error is not None:
            raise self.error
        assert self.heap is not None
        waiting = self.heap.regions.watch(self._members[peer], ready)
        return self._watched(waiting) if isinstance(waiting, asyncio.Future) else waiting

    def _watched(self, waiting: asyncio.Future[None]) -> asyncio.Future[None]:
        """`waiting`, which fails when this call does."""
        if self._watches is None:
            self._watches = set()
        self._watches.add(waiting)
        waiting.add_done_callback(self._watches.discard)
        return waiting

    # ------------------------------------------------------------------ ending early

    def fail(self, error: RudaError, *, here: bool = True) -> None:
        """End this call with `error`: what waits on the transport fails now, later steps at once.

        `here`: this rank found the reason, and not a peer.
        """
        if self.error is None:
            self.error = error
            self.withdraw(error)
            if self._native is not None:
                self._native.fail(error, here)

    def given_up_by(self, error: BaseException) -> int | None:
        """The job's rank that gave up in this call, if that led to `error` and its reason is not heard yet.

        It takes back the messages that have not left; then others miss one, or meet a later one in its place.
        Its shared memory is gone for whoever comes late.
        """
        if self.error is None:
            if isinstance(error, TakenBack | RegionDestroyed):
                return error.peer
            if isinstance(error, UnexpectedMessage) and _place(error.head) != _place(error.expected_head):
                return error.peer
        return None

    async def reason(self, member: int) -> None:
        """Wait for a peer's word, the deadline, or that the job's rank `member` leaves: it ends this call."""
        self.silent = member
        with suppress(RudaError):
            await self._watched(asyncio.get_running_loop().create_future())

    async def settled(self) -> None:
        """Wait until the transport leaves the memory of what was withdrawn alone: it is the caller's then."""
        cancelled: asyncio.CancelledError | None = None
        for busy in self._busy:
            while not busy.done():
                try:
                    await asyncio.shield(busy)
                except asyncio.CancelledError as error:
                    cancelled = error
        if cancelled is not None:
            raise cancelled

    def end(self) -> None:
        """The call is over here, well or not."""
        if self._native is not None:
            self._native.end()

    def withdraw(self, error: BaseException) -> None:
        """Take back all that this call has posted, and drop what came for it."""
        for lane in range(LANES):
            self._busy.extend(self._transport.fail(self._tag | lane, error) or ())
        for watch in tuple(self._watches or ()):
            if not watch.done():
                watch.set_exception(error)

    def __str__(self) -> str:
        channel = self.channel
        return f"rank {self.rank} of {self.size}, channel {channel.name!r}, {self.name} #{self.sequence}"


def _place(head: bytes) -> int:
    """A message's place in its stream, modulo 256 from the second on; -1 for the first."""
    return head[0] if len(head) == 1 else -1
