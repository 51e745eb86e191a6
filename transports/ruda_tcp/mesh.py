"""Linking all ranks: each listens, the addresses are exchanged, and the higher rank dials the lower.

Every connection proves the job's secret, bound to the session that rank 0 drew, before anything else is
read from it; a stray connection holds nothing up.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from ruda_async.transport import (
    AuthenticationError,
    CollectiveTimeoutError,
    ConfigError,
    Job,
    PeerLostError,
    ProtocolError,
    RudaError,
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


class _Peer(NamedTuple):
    """What a rank tells the others of itself."""

    host: str
    port: int
    terms: Terms

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(
            [self.host, self.port, self.terms.eager_bytes, self.terms.early_bytes]
        )
        return packed

    @classmethod
    def unpack(cls, data: bytes, rank: int) -> _Peer:
        """Read and check what rank `rank` told."""
        try:
            host, port, eager, early = msgpack.unpackb(data, max_str_len=256, max_array_len=4)
        except (ValueError, TypeError, msgpack.UnpackException):
            raise ProtocolError(f"rank {rank} sent no usable address", rank=rank) from None
        numbers = (port, eager, early)
        if not isinstance(host, str) or not all(type(n) is int and n >= 0 for n in numbers) or port > 65535:
            raise ProtocolError(f"rank {rank} sent no usable address", rank=rank)
        return cls(host, port, Terms(eager, early))


async def dial_mesh(
    job: Job, parameters: TcpParameters, ours: Terms
) -> tuple[dict[int, socket.socket], dict[int, Terms]]:
    """A connected, authenticated, non-blocking socket to every other rank, and the terms of each.

    Raises:
        ConfigError, CollectiveTimeoutError, AuthenticationError, PeerLostError, ProtocolError
    """
    if job.world_size == 1:
        await job.meet(b"")
        return {}, {}
    listener = await _listen(job, parameters)
    with listener:
        host, port = listener.getsockname()[:2]
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
    """A listener for higher ranks, on the address by which this host is reached."""
    loop = asyncio.get_running_loop()
    host = job.host or "127.0.0.1"
    try:
        infos = await loop.getaddrinfo(parameters.bind or host, job.port or 1, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"rank {job.rank}: the host {parameters.bind or host!r} is not found: {error.strerror or error}"
        ) from None
    failure: OSError | None = None
    for family, _, _, _, address in infos:
        try:
            where = address[0] if parameters.bind or job.rank == 0 else _route_to(family, address)
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.bind((str(where), 0))
                listener.listen(job.world_size + _MAX_STRANGERS)
                listener.setblocking(False)
            except BaseException:
                listener.close()
                raise
            return listener
        except OSError as error:
            failure = error
    raise ConfigError(
        f"rank {job.rank} cannot listen on {parameters.bind or host!r}: "
        f"{failure.strerror if failure else 'no address'}; give this host's own address as bind="
    )


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
        self._strangers: set[asyncio.Task[None]] = set()
        self._complete = asyncio.Event()
        self._error: RudaError | None = None

    async def link(self, listener: socket.socket, peers: dict[int, _Peer]) -> None:
        """Dial the lower ranks and wait for the higher ones."""
        job = self.job
        dialling = [
            self._loop.create_task(self._dial(rank, peer)) for rank, peer in peers.items() if rank < job.rank
        ]
        accepting = self._loop.create_task(self._accept(listener))
        try:
            async with asyncio.timeout(job.remaining()):
                for task in dialling:
                    await task
                while len(self.sockets) < job.world_size - 1:
                    self._complete.clear()
                    await self._complete.wait()
        except TimeoutError:
            missing = tuple(r for r in peers if r not in self.sockets)
            raise CollectiveTimeoutError(
                f"rank {job.rank} of {job.world_size}: ranks {', '.join(map(str, missing))} did not link up within "
                f"timeout={job.timeout:g} s; they died, or a firewall is between",
                missing=missing,
            ) from None
        finally:
            tasks = [accepting, *dialling, *self._strangers]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _dial(self, rank: int, peer: _Peer) -> None:
        job = self.job
        family = socket.AF_INET6 if ":" in peer.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            self._tune(sock)
            try:
                await self._loop.sock_connect(sock, (peer.host, peer.port))
                await prove(sock, job.secret, server=False, context=self.context, deadline=job.deadline)
                await self._loop.sock_sendall(sock, _RANK.pack(job.rank))
            except (OSError, ProtocolError) as error:
                if isinstance(error, AuthenticationError):
                    raise
                raise PeerLostError(
                    f"rank {job.rank} cannot reach rank {rank} at {peer.host} port {peer.port}: {error}", rank=rank
                ) from None
        except BaseException:
            sock.close()
            raise
        self.sockets[rank] = sock

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            sock, _ = await self._loop.sock_accept(listener)
            if len(self._strangers) >= self.job.world_size + _MAX_STRANGERS:
                sock.close()
                continue
            task = self._loop.create_task(self._greet(sock))
            self._strangers.add(task)
            task.add_done_callback(self._strangers.discard)

    async def _greet(self, sock: socket.socket) -> None:
        """Find out which rank this is; strangers are sent away."""
        job = self.job
        kept = False
        try:
            sock.setblocking(False)
            self._tune(sock)
            async with asyncio.timeout(min(_STRANGER_SECONDS, job.remaining())):
                await prove(sock, job.secret, server=True, context=self.context, deadline=job.deadline)
                (rank,) = _RANK.unpack(await read_exactly(self._loop, sock, _RANK.size))
            if job.rank < rank < job.world_size and rank not in self.sockets:
                self.sockets[rank] = sock
                kept = True
                self._complete.set()
        except (OSError, TimeoutError, RudaError):
            pass
        finally:
            if not kept:
                sock.close()

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
