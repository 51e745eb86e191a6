"""How ranks link up: they meet, hold a lifeline to each other, and make UCX endpoints."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from ruda_async.transport import (
    Capabilities,
    CollectiveTimeoutError,
    ConfigError,
    Endpoint,
    Job,
    Mesh,
    PeerLostError,
    Spin,
    Terms,
    Transport,
    in_thread,
    listen_for_ranks,
    no_address,
    reachable_address,
    read_exactly,
    resolve,
)

from .engine import CONTROL_BYTES, Engine, control_tag
from .link import Link
from .listening import Listening
from .loading import api_error, load, open_context
from .memory import find_accelerator
from .namespaces import NAMESPACES_BYTES, boot_id, divided, memory_unasked, namespaces, without_memory
from .transport import UcxTransport

if TYPE_CHECKING:
    from . import UcxParameters

__all__ = ["join"]

#: Ranks are numbered in 16 bits of a tag.
_MOST_RANKS = 1 << 16
#: No worker's address is longer.
_MOST_ADDRESS = 1 << 16


class _Peer(NamedTuple):
    """What a rank tells the others of itself.

    Attributes:
        worker: the address of its UCX worker.
        ucx_port: where its UCX listener is; 0 where it has none.
        machine: the same on all ranks that share a kernel.
        namespaces: see `namespaces`.
    """

    host: str
    port: int
    terms: Terms
    worker: bytes
    ucx_port: int
    machine: bytes
    namespaces: bytes

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(
            [
                self.host,
                self.port,
                self.terms.eager_bytes,
                self.terms.early_bytes,
                self.worker,
                self.ucx_port,
                self.machine,
                self.namespaces,
            ]
        )
        return packed

    @classmethod
    def unpack(cls, data: bytes, rank: int) -> _Peer:
        """Read and check what rank `rank` told."""
        try:
            host, port, eager, early, worker, ucx_port, machine, spaces = msgpack.unpackb(
                data, max_str_len=256, max_bin_len=_MOST_ADDRESS, max_array_len=8
            )
            numbers = all(type(n) is int and n >= 0 for n in (port, eager, early, ucx_port))
            if type(host) is not str or not numbers or max(port, ucx_port) > 65535:
                raise ValueError
            if type(worker) is not bytes or not worker or type(machine) is not bytes:
                raise ValueError
            if type(spaces) is not bytes or len(spaces) not in (0, NAMESPACES_BYTES):
                raise ValueError
            ipaddress.ip_address(host)
        except (ValueError, TypeError, msgpack.UnpackException):
            raise no_address(rank) from None
        return cls(host, port, Terms(eager, early), worker, ucx_port, machine, spaces)

    def endpoint(self, job: Job) -> Endpoint:
        """Where to dial this rank's lifeline."""
        return Endpoint(partial(self._find, job), f"{self.host} port {self.port}")

    async def address(self, job: Job) -> tuple[str, int]:
        """Host and port of its lifeline's listener."""
        host, port = (await self._find(job))[1][:2]
        return host, port

    async def _find(self, job: Job) -> tuple[int, Any]:
        if ipaddress.ip_address(self.host).is_unspecified:  # rank 0 listens everywhere: as it was reached
            return (await resolve(job, job.host or "127.0.0.1", self.port))[0]
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET, (self.host, self.port)


async def join(job: Job) -> Transport:
    """Meet the other ranks and link up with each.

    Raises:
        ConfigError: there is no address to listen on, UCX takes a parameter not, or finds no way to a peer.
        TransportUnavailableError: ucxx does not load.
        CollectiveTimeoutError: some ranks did not come or did not link up; ``missing`` names them.
        PeerLostError: a rank died after the meeting.
        AuthenticationError: what listens where a rank should be did not prove the secret.
        ProtocolError: a rank told nonsense of itself.
    """
    parameters: UcxParameters = job.parameters
    facts: dict[str, object] = {"scheme": "ucx", "progress": parameters.progress}
    if job.world_size == 1:
        await job.meet(b"")
        return UcxTransport(job, None, _capabilities(parameters, False), facts)
    _check(job, parameters)
    api = await in_thread(load)
    context = await in_thread(partial(open_context, api, parameters))
    accelerator = find_accelerator(bool(context.cuda_support))
    spin = Spin.of(parameters.spin, job.world_size)

    def drive(context: Any) -> Engine:
        return Engine(api, context, parameters.progress, spin, parameters.error_handling)

    engine = drive(context)
    facts["cuda"] = accelerator.native
    transport = UcxTransport(job, engine, _capabilities(parameters, accelerator.native), facts)
    try:
        listener = await listen_for_ranks(job, parameters.bind)
        with listener:
            host, port = await reachable_address(job, listener)
            listening = Listening(engine) if parameters.listen else None
            ucx_port = listening.port if listening else 0
            us = _Peer(host, port, parameters.terms, engine.address, ucx_port, _machine(), namespaces())
            meeting = await job.meet(us.pack())
            linked = meeting.peers(job.rank)
            everyone = {
                r: _Peer.unpack(data, r) for r, data in enumerate(meeting.payloads) if data or r in linked
            }
            peers = {r: everyone[r] for r in linked}
            mesh = Mesh(job, meeting.session)
            await mesh.link(listener, {rank: peer.endpoint(job) for rank, peer in peers.items()})
        if divided(peer.namespaces for peer in everyone.values()):
            try:
                if memory_unasked(parameters):
                    context = await in_thread(partial(open_context, api, without_memory(parameters)))
                    engine = drive(context)
                    if listening is not None:
                        listening.close()
                    transport.drive_instead(engine)
                    listening = Listening(engine) if parameters.listen else None
                told = engine.address, listening.port if listening else 0
                peers = await _tell_again(job, told, mesh.sockets, peers)
            except BaseException:
                for sock in mesh.sockets.values():
                    sock.close()
                raise
        links: dict[int, Link] = {}
        try:
            if listening is None:
                endpoints = {rank: _endpoint(job, api, engine, rank, peer) for rank, peer in peers.items()}
            else:
                hosts = {rank: (await peer.address(job))[0] for rank, peer in peers.items()}
                endpoints = await listening.link(
                    job,
                    meeting.session,
                    mesh.sockets,
                    lambda rank: _dial(job, api, engine, rank, hosts[rank], peers[rank].ucx_port),
                )
                listening.close()
            for rank, peer in peers.items():
                links[rank] = Link(
                    rank,
                    engine,
                    endpoints[rank],
                    engine.tag(control_tag(_key(job, meeting.session, rank), job.rank)),
                    mesh.sockets[rank],
                    parameters,
                    peer.terms,
                    accelerator,
                    transport.stale,
                    transport.pulse,
                )
        except BaseException:
            for rank, sock in mesh.sockets.items():
                if rank not in links:
                    sock.close()
            raise
        finally:
            transport.link(links)
        engine.start(_key(job, meeting.session, job.rank), transport.on_control)
        await _greet(job, transport, links)
    except BaseException:
        transport.abort("it could not be set up")
        raise
    return transport


def _check(job: Job, parameters: UcxParameters) -> None:
    if job.world_size > _MOST_RANKS:
        raise ConfigError(f"ucx:// takes up to {_MOST_RANKS} ranks, not {job.world_size}")
    largest = CONTROL_BYTES // 2
    if parameters.eager_bytes > largest:
        raise ConfigError(f"eager_bytes={parameters.eager_bytes} is over the limit of {largest} of ucx://")


def _capabilities(parameters: UcxParameters, device_memory: bool) -> Capabilities:
    return Capabilities(
        device_memory=device_memory,
        eager_bytes=parameters.eager_bytes,
        segment_bytes=parameters.segment_bytes,
        latency=15e-6,
        bandwidth=5e9,
    )


async def _tell_again(
    job: Job, told: tuple[bytes, int], lifelines: Mapping[int, socket.socket], peers: dict[int, _Peer]
) -> dict[int, _Peer]:
    """`peers` with the addresses that they have now, told over the lifelines.

    Raises:
        PeerLostError: a rank died meanwhile.
        CollectiveTimeoutError: a rank said nothing.
        ProtocolError: a rank told nonsense.
    """
    loop = asyncio.get_running_loop()
    packed = msgpack.packb(told)
    found: dict[int, _Peer] = {}
    rank = -1
    try:
        async with asyncio.timeout(job.remaining()):
            for rank in lifelines:
                await loop.sock_sendall(lifelines[rank], len(packed).to_bytes(4, "little") + packed)
            for rank, lifeline in lifelines.items():
                size = int.from_bytes(await read_exactly(loop, lifeline, 4), "little")
                if size > _MOST_ADDRESS + 16:
                    raise ValueError
                worker, port = msgpack.unpackb(await read_exactly(loop, lifeline, size), max_array_len=2)
                if type(worker) is not bytes or not worker or type(port) is not int or port >> 16:
                    raise ValueError
                found[rank] = peers[rank]._replace(worker=worker, ucx_port=port)
    except TimeoutError:
        missing = tuple(rank for rank in peers if rank not in found)
        raise CollectiveTimeoutError(
            f"rank {job.rank} of {job.world_size}: ranks {', '.join(map(str, missing))} did not say where "
            f"their UCX workers are within timeout={job.timeout:g} s; start them again",
            missing=missing,
        ) from None
    except OSError as error:
        raise PeerLostError(
            f"rank {job.rank}: rank {rank} died while it joined: {error}", rank=rank
        ) from None
    except (ValueError, TypeError, msgpack.UnpackException):
        raise no_address(rank) from None
    return found


def _endpoint(job: Job, api: Any, engine: Engine, rank: int, peer: _Peer) -> Any:
    """An endpoint to a peer's worker."""
    try:
        return engine.endpoint(peer.worker)
    except api_error(api) as error:
        where = "on this host" if peer.machine == _machine() else f"at {peer.host}"
        raise ConfigError(
            f"rank {job.rank}: UCX finds no way to rank {rank} {where} ({error}); give all ranks the same "
            "tls= and net_devices=, with a transport that reaches it (tcp does)",
            rank=job.rank,
        ) from None


def _dial(job: Job, api: Any, engine: Engine, rank: int, host: str, port: int) -> Any:
    """An endpoint to a peer's listener."""
    try:
        return engine.dial(host, port)
    except api_error(api) as error:
        raise ConfigError(
            f"rank {job.rank}: UCX finds no way to rank {rank} at {host} port {port} ({error}); give all "
            "ranks the same tls= and net_devices=, or leave listen= out",
            rank=job.rank,
        ) from None


async def _greet(job: Job, transport: UcxTransport, links: dict[int, Link]) -> None:
    try:
        async with asyncio.timeout(job.remaining()):
            await transport.greet()
    except TimeoutError:
        missing = tuple(rank for rank, link in links.items() if not link.met.done())
        raise CollectiveTimeoutError(
            f"rank {job.rank} of {job.world_size}: nothing came over UCX from ranks "
            f"{', '.join(map(str, missing))} within timeout={job.timeout:g} s; give all ranks the "
            "same tls= and net_devices=, without shared memory for ranks in containers of one machine "
            "(tls=tcp), or look for a firewall between them",
            missing=missing,
        ) from None


def _key(job: Job, session: bytes, rank: int) -> int:
    """What marks small messages to `rank`: known to who knows the secret and was at the meeting."""
    text = b"ruda-async ucx|" + session + b"|" + rank.to_bytes(4, "big")
    return int.from_bytes(hmac.digest(job.secret.reveal(), text, hashlib.sha256)[:8], "big")


def _machine() -> bytes:
    """Names the kernel this process runs on, for error texts."""
    return hashlib.blake2b(boot_id() or socket.gethostname().encode(), digest_size=8).digest()
