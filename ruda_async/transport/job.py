"""What a plugin is told when it joins a job, and how it learns of the other ranks."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from ..errors import CollectiveTimeoutError
from .alike import check_alike, with_alike, without_alike

if TYPE_CHECKING:
    import socket

    from .framed.stream import ByteStream

__all__ = ["Connection", "Job", "Meeting", "Secret", "Secure", "StreamWrapper"]


class Secret:
    """The job's shared secret: bytes that never print."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        """The bytes, for `hmac` alone."""
        return self._value

    def __bool__(self) -> bool:
        return bool(self._value)

    def __repr__(self) -> str:
        return "Secret(set)" if self._value else "Secret(not set)"

    __str__ = __repr__

    def __reduce__(self) -> Any:
        raise TypeError("a secret is not pickled")


class Meeting(NamedTuple):
    """What a rendezvous gives every rank.

    Attributes:
        payloads: each rank's payload, in rank order.
        session: 16 random bytes that rank 0 drew for this meeting, the same on all ranks.
        linked: the ranks that this one is to link up with, or None for all others.
    """

    payloads: list[bytes]
    session: bytes
    linked: frozenset[int] | None = None

    def peers(self, rank: int) -> dict[int, bytes]:
        """The payload of each rank that `rank`, this one, is to link up with, in rank order."""
        linked = self.linked
        return {
            peer: payload
            for peer, payload in enumerate(self.payloads)
            if peer != rank and (linked is None or peer in linked)
        }


class Connection(Protocol):
    """What is asked of a connection that is no bare socket, while ranks link up: TLS, or another medium."""

    async def recv_into(self, view: memoryview) -> int:
        """Fill the front of `view`; how many bytes came, 0 at the end of the connection."""
        ...

    async def sendall(self, data: bytes) -> None:
        """Send all of `data`."""
        ...

    def getpeername(self) -> Any:
        """The peer's address, as of a socket."""
        ...


#: ``(socket, server, name) -> connection``: what secures a new connection before anything is said on it;
#: `name` is the host that a client dialled.
Secure: TypeAlias = "Callable[[socket.socket, bool, str], Awaitable[Connection]]"

#: ``(peer, stream) -> stream``: what goes between a transport and its stream to `peer`.
StreamWrapper: TypeAlias = "Callable[[int, ByteStream], ByteStream]"

#: ``(job, payload, address) -> Meeting``; the core gives it to the job, plugins call `Job.meet`.
Rendezvous = Callable[["Job", bytes, "tuple[str, int] | str"], Awaitable[Meeting]]


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's view of the job it joins.

    Attributes:
        name: the job's name, from the URL's path (or host, for schemes without hosts).
        rank, world_size: this rank and how many there are.
        host, port: from the URL; ``None`` where it has none.
        parameters: an instance of the plugin's parameter dataclass.
        secret: the job secret.
        deadline: `time.monotonic` seconds by which set-up must be over.
        timeout: the same as a duration in seconds, for texts.
        ports: candidates to try in turn where no single port is known (see `env://`).
        listen_fd: an inherited listening socket for rank 0's rendezvous, from the launcher.
        secure: from a plugin: secures every connection of the rendezvous and of `Mesh`.
        wrap_stream: from a wrapper: called with every stream that `FramedTransport` is about to run over.
        alike: the parameters that have to be the same on all ranks, as text; None where a meeting has seen
            to it already.
        grows: as `Capabilities.grows` has it, of the place where ranks meet.
        extra_dials: from a wrapper: connections that `Mesh` makes to each lower rank beyond the one it uses.
    """

    name: str
    rank: int
    world_size: int
    host: str | None
    port: int | None
    parameters: Any
    secret: Secret
    deadline: float
    timeout: float
    ports: tuple[int, ...] = ()
    listen_fd: int | None = None
    rendezvous: Rendezvous | None = field(default=None, repr=False)
    secure: Secure | None = field(default=None, repr=False)
    wrap_stream: StreamWrapper | None = field(default=None, repr=False)
    extra_dials: int = 0
    alike: str | None = None
    grows: bool = True

    async def meet(self, payload: bytes, address: tuple[str, int] | str | None = None) -> Meeting:
        """Give every rank this rank's `payload`; get all ranks' payloads, in rank order.

        Ranks meet at `address`: ``(host, port)``, by default the URL's, or the path of a Unix socket
        (``"\\0name"`` for an abstract one). Rank 0 listens there; every connection proves the job
        secret first. The payload is at most 63 KiB.

        Raises:
            ConfigError: the ranks disagree on `alike`; on all of them. And what the rendezvous raises.
        """
        if self.rendezvous is None:
            raise RuntimeError("this job has no rendezvous")
        if address is None:
            address = (self.host or "127.0.0.1", self.port or 0)
        if self.alike is None:
            return await self.rendezvous(self, payload, address)
        meeting = await self.rendezvous(self, with_alike(self.alike, payload), address)
        told = [without_alike(data, rank) for rank, data in enumerate(meeting.payloads)]
        check_alike({rank: alike for rank, (alike, _) in enumerate(told)})
        return meeting._replace(payloads=[payload for _, payload in told])

    def remaining(self) -> float:
        """Seconds left for set-up.

        Raises:
            CollectiveTimeoutError: none are left.
        """
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise CollectiveTimeoutError(
                f"rank {self.rank} of {self.world_size}: joining job {self.name!r} took longer than "
                f"timeout={self.timeout:g} s; start the ranks closer together or raise timeout="
            )
        return left

    def silent(self, rank: int, silence: str) -> CollectiveTimeoutError:
        """The error that says that one rank linked up and kept this one waiting until the deadline.

        Args:
            silence: what it did not do, such as "did not share memory".
        """
        return CollectiveTimeoutError(
            f"rank {self.rank} of {self.world_size}: rank {rank} linked up and {silence} within "
            f"timeout={self.timeout:g} s; see whether its event loop stands still, or raise timeout=",
            missing=(rank,),
        )
