"""Where each rank listens, and how the others learn of it; `Mesh` makes the connections."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from ruda_async.transport import (
    ConfigError,
    Endpoint,
    Job,
    Mesh,
    Terms,
    listen_for_ranks,
    no_address,
    reachable_address,
    resolve,
)

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
            raise no_address(rank) from None
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
            return (await resolve(job, self._name(job), self.port))[0]
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET, (self.host, self.port)


async def dial_mesh(job: Job, parameters: TcpParameters) -> tuple[Mesh | None, dict[int, Terms]]:
    """A connection to each rank of `Meeting.peers`, and the terms of each; no mesh for a job of one rank.

    Raises:
        ConfigError: there is no address to listen on, or no such congestion control; and what `Job.meet`
            raises.
        CollectiveTimeoutError: some ranks did not come or did not link up; ``missing`` names them.
        PeerLostError: a rank died after the meeting.
        AuthenticationError: what listens where a rank should be did not prove the secret.
        ProtocolError: a rank told nonsense of itself.
    """
    _check_congestion(parameters.congestion)
    if job.world_size == 1:
        await job.meet(b"")
        return None, {}
    listener = await listen_for_ranks(job, parameters.bind)
    with listener:
        host, port = await reachable_address(job, listener)
        meeting = await job.meet(_Peer(host, port, parameters.terms).pack())
        peers = {r: _Peer.unpack(data, r) for r, data in meeting.peers(job.rank).items()}
        mesh = Mesh(job, meeting.session, partial(_tune, parameters))
        await mesh.link(listener, {rank: peer.endpoint(job) for rank, peer in peers.items()})
    for sock in mesh.sockets.values():
        _choose_congestion(sock, parameters.congestion)
    return mesh, {rank: peer.terms for rank, peer in peers.items()}


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


def _check_congestion(asked: str) -> None:
    """Try what was asked for on a socket of no use, before anybody is met.

    Raises:
        ConfigError: it is not to be had.
    """
    if not asked:
        return
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, asked.encode())
    except (AttributeError, OSError) as error:
        reason = getattr(error, "strerror", None) or "this system lets no program choose"
        raise ConfigError(
            f"congestion={asked}: not to be had here ({reason}); leave it out, or see "
            "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
        ) from None


def _choose_congestion(sock: socket.socket, asked: str) -> None:
    """Set the congestion control: the one asked for, or within a host one that does not pace.

    There a connection has no link to share, and the pace that BBR finds for it is half of what two cores can
    copy. Reno is in every kernel.
    """
    if asked or sock.getsockname()[0] == sock.getpeername()[0]:
        with contextlib.suppress(AttributeError, OSError):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, (asked or "reno").encode())
