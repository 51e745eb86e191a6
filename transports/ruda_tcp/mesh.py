"""Linking all ranks: each listens, the addresses are exchanged, and the higher rank dials the lower.

Every connection proves the job's secret, bound to the session that rank 0 drew, before anything else is
read from it; a stray connection holds nothing up.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from ruda_async.transport import (
    AuthenticationError,
    CollectiveTimeoutError,
    ConfigError,
    Job,
    PeerLostError,
    ProtocolError,
    Terms,
    prove,
    read_exactly,
)

if TYPE_CHECKING:
    from . import TcpParameters

__all__ = ["dial_mesh"]

_RANK = struct.Struct("<I")
#: Connections that have not proved the secret yet, at most, beyond one for each rank.
_MAX_STRANGERS = 64
_STRANGER_SECONDS = 5.0
#: Seconds before the next try where a connection could not be accepted.
_ACCEPT_PAUSE = 0.02


class _Peer(NamedTuple):
    """What a rank tells the others of itself.

    Rank 0 may listen at all addresses of its machine; the others then know how they reached it.
    """

    host: str
    port: int
    terms: Terms

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb([self.host, self.port, self.terms.eager_bytes, self.terms.early_bytes])
        return packed

    @classmethod
    def unpack(cls, data: bytes, rank: int) -> _Peer:
        """Read and check what rank `rank` told."""
        try:
            host, port, eager, early = msgpack.unpackb(data, max_str_len=256, max_array_len=4)
            numbers = all(type(n) is int and n >= 0 for n in (port, eager, early))
            if type(host) is not str or not numbers or port > 65535:
                raise ValueError
            ipaddress.ip_address(host)
        except (ValueError, TypeError, msgpack.UnpackException):
            raise ProtocolError(f"rank {rank} sent no usable address", rank=rank) from None
        return cls(host, port, Terms(eager, early))


async def dial_mesh(
    job: Job, parameters: TcpParameters, ours: Terms
) -> tuple[dict[int, socket.socket], dict[int, Terms]]:
    """A connected, authenticated, non-blocking socket to every other rank, and the terms of each.

    Raises:
        ConfigError: there is no address to listen on; and what `Job.meet` raises.
        CollectiveTimeoutError: some ranks did not come or did not link up; ``missing`` names them.
        PeerLostError: a rank died after the meeting.
        AuthenticationError: what listens where a rank should be did not prove the secret.
        ProtocolError: a rank told nonsense of itself.
    """
    if job.world_size == 1:
        await job.meet(b"")
        return {}, {}
    listener = await _listen(job, parameters)
    with listener:
        host, port = await _public_address(job, listener)
        meeting = await job.meet(_Peer(host, port, ours).pack())
        peers = {r: _Peer.unpack(data, r) for r, data in enumerate(meeting.payloads) if r != job.rank}
        context = b"mesh|" + meeting.session
        mesh = _Mesh(job, context, parameters)
        try:
            await mesh.link(listener, peers)
        except BaseException:
            for sock in mesh.sockets.values():
                sock.close()
            raise
    return mesh.sockets, {rank: peer.terms for rank, peer in peers.items()}


async def _listen(job: Job, parameters: TcpParameters) -> socket.socket:
    """A listener for higher ranks, by default on the address by which this host reaches rank 0."""
    host = job.host or "127.0.0.1"
    bind = parameters.bind or host
    failure: OSError | None = None
    for family, address in await _resolve(job, bind, job.port or 1):
        try:
            where = address[0] if parameters.bind or job.rank == 0 else _route_to(family, address)
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.bind((where, 0))
                listener.listen(job.world_size + _MAX_STRANGERS)
                listener.setblocking(False)
            except BaseException:
                listener.close()
                raise
            return listener
        except OSError as error:
            failure = error
    raise ConfigError(
        f"rank {job.rank} cannot listen on {bind!r}: {failure.strerror if failure else 'no address'}; "
        "give this host's own address as bind="
    )


async def _public_address(job: Job, listener: socket.socket) -> tuple[str, int]:
    """Where the other ranks reach `listener`."""
    host, port = listener.getsockname()[:2]
    if job.rank and ipaddress.ip_address(host).is_unspecified:
        # Nobody can dial "all addresses": name the one that rank 0 sees this host at.
        family, address = (await _resolve(job, job.host or "127.0.0.1", job.port or 1))[0]
        host = _route_to(family, address)
    return host, port


async def _resolve(job: Job, host: str, port: int) -> list[tuple[int, Any]]:
    """The families and addresses that `host` stands for; at least one.

    Raises:
        ConfigError: it is not found.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(job.remaining()):
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or "no answer in time"
        raise ConfigError(
            f"rank {job.rank}: the host {host!r} is not found: {reason}; check the URL and bind="
        ) from None
    return [(family, address) for family, _, _, _, address in infos]


def _route_to(family: int, address: Any) -> str:
    """The local address from which `address` is reached; sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        host: str = probe.getsockname()[0]
        return host


class _Mesh:
    """The connections of one rank while they are being made."""

    def __init__(self, job: Job, context: bytes, parameters: TcpParameters) -> None:
        self.job = job
        self.context = context
        self.sockets: dict[int, socket.socket] = {}
        self._parameters = parameters
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[asyncio.Task[None], None] = {}  # oldest first
        self._linked = asyncio.Event()
        #: The last connection that did not prove the secret.
        self._unproved = ""

    async def link(self, listener: socket.socket, peers: dict[int, _Peer]) -> None:
        """Dial the lower ranks and wait for the higher ones."""
        job = self.job
        dialling = [
            self._loop.create_task(self._dial(rank, peer)) for rank, peer in peers.items() if rank < job.rank
        ]
        accepting = self._loop.create_task(self._accept(listener))
        try:
            async with asyncio.timeout(job.remaining()):
                await asyncio.gather(*dialling)
                while len(self.sockets) < job.world_size - 1:
                    self._linked.clear()
                    await self._linked.wait()
        except TimeoutError:
            raise self._too_late(tuple(r for r in peers if r not in self.sockets)) from None
        finally:
            tasks = [accepting, *dialling, *self._strangers]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _too_late(self, missing: tuple[int, ...]) -> CollectiveTimeoutError:
        job = self.job
        several = "s" if len(missing) > 1 else ""
        shown = ", ".join(map(str, missing[:16])) + (f" and {len(missing) - 16} more" if missing[16:] else "")
        text = (
            f"rank {job.rank} of {job.world_size}: rank{several} {shown} did not link up within "
            f"timeout={job.timeout:g} s; they died or hang, or a firewall is between"
        )
        if self._unproved:
            text += f"; a connection from {self._unproved} did not prove the secret"
        return CollectiveTimeoutError(text, missing=missing)

    async def _dial(self, rank: int, peer: _Peer) -> None:
        """Connect to a lower rank.

        Raises:
            PeerLostError, AuthenticationError: at once.
            CollectiveTimeoutError: it took the connection and did not answer.
        """
        job = self.job
        where = f"rank {rank} at {peer.host} port {peer.port}"
        try:
            family, address = await self._find(peer)
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                self._tune(sock)
                await self._loop.sock_connect(sock, address)
                await prove(sock, job.secret, server=False, context=self.context, deadline=job.deadline)
                await self._loop.sock_sendall(sock, _RANK.pack(job.rank))
            except BaseException:
                sock.close()
                raise
        except CollectiveTimeoutError:
            raise
        except AuthenticationError as error:
            raise AuthenticationError(f"rank {job.rank} dialled {where}: {error}", rank=rank) from None
        except (OSError, ProtocolError) as error:
            raise PeerLostError(f"rank {job.rank} cannot reach {where}: {error}", rank=rank) from None
        self.sockets[rank] = sock

    async def _find(self, peer: _Peer) -> tuple[int, Any]:
        """The family and address to dial for `peer`."""
        if ipaddress.ip_address(peer.host).is_unspecified:
            return (await _resolve(self.job, self.job.host or "127.0.0.1", peer.port))[0]
        return socket.AF_INET6 if ":" in peer.host else socket.AF_INET, (peer.host, peer.port)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, address = await self._loop.sock_accept(listener)
            except OSError:  # descriptors have run out: make room, and look again soon
                self._evict()
                await asyncio.sleep(_ACCEPT_PAUSE)
                continue
            task = self._loop.create_task(self._greet(sock, f"{address[0]} port {address[1]}"))
            self._strangers[task] = None
            task.add_done_callback(partial(self._ended, sock))
            if len(self._strangers) > self.job.world_size + _MAX_STRANGERS:
                self._evict()

    def _evict(self) -> None:
        """Send the oldest stranger away, so that the newest, which may be a rank, is heard."""
        if self._strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()

    def _ended(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        # Closed here, since a task that is cancelled before its first step never enters a `finally`.
        self._strangers.pop(task, None)
        if sock not in self.sockets.values():
            sock.close()

    async def _greet(self, sock: socket.socket, address: str) -> None:
        """Find out which rank this is; strangers are sent away."""
        job = self.job
        try:
            sock.setblocking(False)
            self._tune(sock)
            async with asyncio.timeout(min(_STRANGER_SECONDS, job.remaining())):
                await prove(sock, job.secret, server=True, context=self.context, deadline=job.deadline)
                (rank,) = _RANK.unpack(await read_exactly(self._loop, sock, _RANK.size))
        except AuthenticationError:
            self._unproved = address
        except OSError:  # and, by inheritance, all else that `prove` raises: no rank of this job
            pass
        else:
            if job.rank < rank < job.world_size and rank not in self.sockets:
                self.sockets[rank] = sock
                self._linked.set()

    def _tune(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        size = self._parameters.socket_bytes
        if size:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        patience = getattr(socket, "TCP_USER_TIMEOUT", None)
        if patience is not None and self._parameters.heartbeat:
            # Let the kernel give up on data that is not acknowledged for two heartbeats (Linux).
            sock.setsockopt(socket.IPPROTO_TCP, patience, max(int(2000 * self._parameters.heartbeat), 1))
