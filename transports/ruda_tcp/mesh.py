"""Where each rank listens, and how the others learn of it; `Mesh` makes the connections."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from ruda_async.transport import MAX_STRANGERS, ConfigError, Endpoint, Job, Mesh, ProtocolError, Terms

if TYPE_CHECKING:
    from . import TcpParameters

__all__ = ["dial_mesh"]


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

    def endpoint(self, job: Job) -> Endpoint:
        """Where to dial this rank."""
        return Endpoint(partial(self._find, job), f"{self.host} port {self.port}", self._name(job))

    def _name(self, job: Job) -> str:
        if ipaddress.ip_address(self.host).is_unspecified:
            return job.host or "127.0.0.1"
        return self.host

    async def _find(self, job: Job) -> tuple[int, Any]:
        if ipaddress.ip_address(self.host).is_unspecified:
            return (await _resolve(job, self._name(job), self.port))[0]
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET, (self.host, self.port)


async def dial_mesh(job: Job, parameters: TcpParameters) -> tuple[Mesh | None, dict[int, Terms]]:
    """A connection to each rank of `Meeting.peers`, and the terms of each; no mesh for a job of one rank.

    Raises:
        ConfigError: there is no address to listen on; and what `Job.meet` raises.
        CollectiveTimeoutError: some ranks did not come or did not link up; ``missing`` names them.
        PeerLostError: a rank died after the meeting.
        AuthenticationError: what listens where a rank should be did not prove the secret.
        ProtocolError: a rank told nonsense of itself.
    """
    if job.world_size == 1:
        await job.meet(b"")
        return None, {}
    listener = await _listen(job, parameters)
    with listener:
        host, port = await _public_address(job, listener)
        meeting = await job.meet(_Peer(host, port, parameters.terms).pack())
        peers = {r: _Peer.unpack(data, r) for r, data in meeting.peers(job.rank).items()}
        mesh = Mesh(job, meeting.session, partial(_tune, parameters))
        await mesh.link(listener, {rank: peer.endpoint(job) for rank, peer in peers.items()})
    return mesh, {rank: peer.terms for rank, peer in peers.items()}


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
                listener.listen(job.world_size + MAX_STRANGERS)
                listener.setblocking(False)
            except BaseException:
                listener.close()
                raise
            return listener
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
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


def _tune(parameters: TcpParameters, sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    size = parameters.socket_bytes
    if size:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
    patience = getattr(socket, "TCP_USER_TIMEOUT", None)
    if patience is not None and parameters.heartbeat:
        # Let the kernel give up on data that is not acknowledged for two heartbeats (Linux).
        sock.setsockopt(socket.IPPROTO_TCP, patience, max(int(2000 * parameters.heartbeat), 1))
