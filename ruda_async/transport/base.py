"""What a transport is: rank-addressed, tagged messages, and nothing about collectives.

A message has a *tag* (an integer below 2**64), a *head* (up to `MAX_HEAD` bytes that say what it is)
and a payload. Matching is by ``(peer, tag)``; messages of one ``(peer, tag)`` keep their order, and
nothing is said about order between tags. `send` and `recv_into` **start at the call** and return an
awaitable that may be finished already, so an algorithm posts its receives, then sends, then waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from .job import Job

__all__ = [
    "DONE",
    "MAX_HEAD",
    "Buffer",
    "Capabilities",
    "DeviceBuffer",
    "Envelope",
    "Plugin",
    "Ready",
    "TakenBack",
    "Transport",
    "UnexpectedMessage",
]

#: The longest head a message may have, in bytes.
MAX_HEAD = 4096


class DeviceBuffer(Protocol):
    """Memory on an accelerator, as CUDA's array interface (version 3) describes it.

    A transport reads it when the stream that the interface names has done all that is queued there, and
    writes it when that stream has let go of it; without a name it is the stream that is current when the
    message is posted. It may also have the attribute ``device_index``, the number of its device; else that is
    the current one.

    Attributes:
        nbytes: its length.
    """

    nbytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


#: A contiguous run of bytes: a memoryview of format ``B`` on the host, or device memory where
#: `Capabilities.device_memory` says that the transport takes it.
Buffer: TypeAlias = "memoryview | DeviceBuffer"


class Envelope(NamedTuple):
    """What is known of a message before its payload is received."""

    head: bytes
    nbytes: int


class UnexpectedMessage(Exception):
    """A receive met a message with another head or another length than it asked for.

    The message is used up. `head` and `nbytes` are the message's; the waiting receive's own are
    `expected_head` and `expected_nbytes`.
    """

    def __init__(
        self, peer: int, tag: int, envelope: Envelope, expected_head: bytes, expected_nbytes: int
    ) -> None:
        super().__init__(
            f"the message from rank {peer} (tag {tag:#x}) has a head of {len(envelope.head)} bytes and "
            f"{envelope.nbytes} bytes of payload; the receive expected {len(expected_head)} and "
            f"{expected_nbytes}"
        )
        self.peer = peer
        self.tag = tag
        self.head = envelope.head
        self.nbytes = envelope.nbytes
        self.expected_head = expected_head
        self.expected_nbytes = expected_nbytes


class TakenBack(Exception):
    """The sender of the message that a receive had met was cancelled, or has failed the tag.

    The message never happened; the next receive gets the next one.
    """

    def __init__(self, peer: int, tag: int) -> None:
        super().__init__(f"rank {peer} took its message (tag {tag:#x}) back")
        self.peer = peer
        self.tag = tag


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do and roughly what it costs; algorithms are chosen by these, never by name.

    Attributes:
        ordered: messages of different tags from one peer also arrive in the order they were sent.
        shared_memory: all ranks see the same memory: the transport has `Regions`. Set by the library.
        device_memory: buffers may be `DeviceBuffer`.
        secure: bytes on the wire are encrypted.
        notices_loss: a dead peer fails pending receives without waiting for their deadline.
        grows: new ranks may come to a running job; not where another engine places and numbers them.
        max_message: the largest payload of one message in bytes, or None for no limit.
        eager_bytes: payloads up to this size leave at once; larger ones wait for their receive.
        segment_bytes: the payload size at which throughput has levelled off; pipelines cut to this.
        latency: seconds for an empty message, one way.
        bandwidth: bytes per second one way, for large messages.
        hosts: the number of each rank's host, counted from 0, where several ranks share one and there are
            several; else None. Links within a host are taken to be faster than those between hosts.
        overhead: seconds that each further message costs a rank that sends or receives several at once, or
            None for a usual share of the latency.
        reduction: bytes per second that a rank adds to others.
    """

    ordered: bool = True
    shared_memory: bool = False
    device_memory: bool = False
    secure: bool = False
    notices_loss: bool = True
    grows: bool = True
    max_message: int | None = None
    eager_bytes: int = 64 * 1024
    segment_bytes: int = 512 * 1024
    latency: float = 20e-6
    bandwidth: float = 2e9
    hosts: tuple[int, ...] | None = None
    overhead: float | None = None
    reduction: float = 8e9


class Ready:
    """An awaitable that is finished already and costs no event-loop turn."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __await__(self) -> Any:
        return self.value
        yield  # never reached: makes this a generator that ends at once


#: The finished awaitable without a value.
DONE: Awaitable[None] = Ready()


class Transport(Protocol):
    """One rank's end of a job's links. Bound to the event loop on which it was made.

    Errors that the awaitables raise: `UnexpectedMessage` where head or length differ from what a receive
    asked for; `TakenBack` where the message that a receive had met is not coming; `PeerLostError` once
    nothing more can come from (or go to) that peer: messages that had already arrived are readable first;
    `CommunicatorClosedError` after `close`; and whatever error `fail` was given.

    Cancelling an awaitable withdraws it exactly: a message that a cancelled receive would have taken
    stays for the next receive of its tag, and the cancelled receive's buffers are not written any more;
    a cancelled send either never happened or arrives whole, and its buffers are not read any more.

    A transport whose ranks can all see one memory may also have an attribute ``regions``, a
    `ruda_async.transport.Regions`.
    """

    rank: int
    world_size: int
    capabilities: Capabilities

    # A transport that runs whole collectives natively also has the attribute `providers`, a tuple of
    # `ruda_async.transport.provider.Provider`. It is optional, and so no member of this protocol.

    #: Asked about the tag of a message that nobody waits for: True drops it, since its operation is
    #: over here (it failed, or was cancelled). Set by the communicator; by default nothing is stale.
    is_stale: Callable[[int], bool]

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        """Send one message; finished when the buffers may be changed again.

        Up to `Capabilities.eager_bytes` of payload leave without waiting for a receive, as long as the
        peer's budget for early messages lasts; more waits until the peer posts its receive.
        """
        ...

    def recv_into(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        """Receive the next message of ``(peer, tag)`` into `buffers`, which it must fill exactly.

        The message's head must equal `head`.
        """
        ...

    def probe(self, peer: int, tag: int) -> Awaitable[Envelope]:
        """Wait for the next message of ``(peer, tag)`` without taking it: its head and length.

        Finished at once, without a turn of the event loop, where the message is here already.
        At most one probe per ``(peer, tag)`` waits at a time, and none while a receive waits there.
        """
        ...

    def fail(self, tag: int, error: BaseException) -> Iterable[asyncio.Future[None]] | None:
        """End every pending send, receive and probe of `tag`, on all peers, with `error`.

        Messages of `tag` that are waiting here or under way are dropped. Does not block. A medium that
        cannot stop in the middle returns futures, done once it neither reads nor writes their buffers.
        """
        ...

    def describe(self) -> dict[str, object]:
        """A few facts for people: scheme, addresses, parameters. No secrets.

        A transport that chooses among others says under ``links`` which it took: scheme → peers.
        """
        ...

    def stats(self) -> dict[int, dict[str, int]]:
        """Counters per peer: messages and bytes sent and received, bytes waiting early."""
        ...

    async def close(self) -> None:
        """Send what was accepted, say goodbye, release everything; bounded in time, harmless twice."""
        ...

    def abort(self, reason: str) -> None:
        """Drop all links at once, without waiting; peers see a lost peer. Harmless twice."""
        ...


class Plugin(Protocol):
    """What an entry point of the group ``ruda_async.transports`` names; the entry's name is the scheme.

    Attributes:
        scheme: the URL scheme.
        summary: one line for `ruda-async doctor` and the docs.
        parameters: a frozen dataclass of the URL parameters; see `ruda_async.transport.parameters`.
        rank_per: ``"task"`` when ranks may be tasks or threads of one process, ``"process"`` when each is a
            process, ``"engine"`` when another engine (such as mpiexec) has to start and number them.
        example: a URL that works on one host for the self-test and the docs, without rank and
            world size.
        preference: among transports that can serve, the highest is taken where no scheme is named.
        needs: optional: what the user has to give before any URL works, so that there is no self-test.

    A plugin may also have the attribute ``reach``, ``"host"`` where its links end at this host (see
    `host_identity`), or ``"network"``. It promises to link up with the ranks of `Meeting.peers` alone, and so
    can be one of several transports in a job that takes the best link for each pair of ranks.

    A plugin whose transports have providers also has the attribute ``provider_names``, a tuple of the names
    that ``algorithm=`` then takes.

    A plugin whose ranks another engine may have placed also has the method ``placed()``. It returns this
    process's rank and the number of ranks, which then need not be given; or None, where no engine has.
    Ranks that were placed also need no address to meet at.

    A plugin with ``rank_per = "engine"`` may also have the method ``command(ranks)``: the command line that
    starts so many ranks of Python on this host, to which the arguments of Python are appended; None where
    that cannot be done here. The self-test and the benchmark start their ranks with it.
    """

    scheme: str
    summary: str
    parameters: type[Any]
    rank_per: str
    example: str
    preference: int

    def unavailable(self) -> str | None:
        """None when usable here, else one line: what is missing and how to install it."""
        ...

    async def connect(self, job: Job) -> Transport:
        """Join the job; all ranks are linked when this returns.

        Raises:
            ConfigError, CollectiveTimeoutError, AuthenticationError, ProtocolError
        """
        ...


def no_peer(peer: int, rank: int, world_size: int) -> ValueError:
    """What to raise for a peer that is not another rank of this job."""
    return ValueError(f"peer {peer} is not another rank of a job of {world_size} (this is rank {rank})")


def never_stale(tag: int) -> bool:
    """The default for `Transport.is_stale`."""
    return False
