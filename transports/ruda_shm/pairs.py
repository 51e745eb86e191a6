"""Linking the ranks of one host: a Unix socket per pair, and over it a memory file with two rings."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from ruda_async.transport import (
    MAX_STRANGERS,
    CollectiveTimeoutError,
    ConfigError,
    Endpoint,
    Job,
    Mesh,
    PeerLostError,
    ProtocolError,
    Spin,
    Terms,
    no_address,
)

from .regions import SharedRegions
from .ring import HEADER_BYTES, Ring
from .stream import RingStream

if TYPE_CHECKING:
    from . import ShmParameters

__all__ = ["open_pairs"]

_SIZE = struct.Struct("<Q")
#: A Unix socket's name has room for 107 bytes in all.
_LONG_NAME = 64
#: Ring capacities by world size: all pairs together stay within a few hundred megabytes.
_CAPACITIES = ((8, 1 << 20), (24, 1 << 18), (1 << 31, 1 << 16))


class _Peer(NamedTuple):
    """What a rank tells the others of itself."""

    address: str
    pid: int
    terms: Terms

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(
            [self.address, self.pid, self.terms.eager_bytes, self.terms.early_bytes]
        )
        return packed

    @classmethod
    def unpack(cls, data: bytes, rank: int) -> _Peer:
        """Read and check what rank `rank` told."""
        try:
            address, pid, eager, early = msgpack.unpackb(data, max_str_len=108, max_array_len=4)
            if type(address) is not str or not all(type(n) is int and n >= 0 for n in (pid, eager, early)):
                raise ValueError
        except (ValueError, TypeError, msgpack.UnpackException):
            raise no_address(rank) from None
        return cls(address, pid, Terms(eager, early))

    def endpoint(self) -> Endpoint:
        """Where to dial this rank."""

        async def find() -> tuple[int, Any]:
            return socket.AF_UNIX, self.address

        return Endpoint(find, f"process {self.pid}")


async def open_pairs(
    job: Job, parameters: ShmParameters
) -> tuple[dict[int, RingStream], dict[int, Terms], SharedRegions]:
    """A stream to each rank of `Meeting.peers`, the terms of each, and the memory that all of them can see.

    Raises:
        ConfigError: the rings cannot be had; and what `Job.meet` and `Mesh.link` raise.
    """
    _check(job, parameters)
    # Names that begin with a zero byte are the kernel's own: no file, gone with the socket.
    name = job.name
    if len(name.encode()) > _LONG_NAME:
        name = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    meeting_place = f"\0ruda-async/{os.getuid()}/{name}"
    if job.world_size == 1:
        await job.meet(b"", meeting_place)
        return {}, {}, SharedRegions({}, {})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        address = f"\0ruda-async/{os.getuid()}/{secrets.token_hex(16)}"
        listener.bind(address)
        listener.listen(job.world_size + MAX_STRANGERS)
        listener.setblocking(False)
        meeting = await job.meet(_Peer(address, os.getpid(), parameters.terms).pack(), meeting_place)
        peers = {r: _Peer.unpack(data, r) for r, data in meeting.peers(job.rank).items()}
        mesh = Mesh(job, meeting.session)
        await mesh.link(listener, {rank: peer.endpoint() for rank, peer in peers.items()})
    streams: dict[int, RingStream] = {}
    for_regions: dict[int, socket.socket] = {}
    try:
        ring_bytes = parameters.ring_bytes or _usual_ring_bytes(len(peers) + 1)
        spin = Spin.of(parameters.spin, len(peers) + 1)
        for rank in sorted(mesh.sockets):
            label = f"process {peers[rank].pid}"
            sock = mesh.sockets[rank]
            # The higher rank of a pair makes the memory, as it is the one that dialled.
            give = rank < job.rank
            opening = _give(job, sock, rank, ring_bytes) if give else _take(job, sock, rank)
            memory, for_regions[rank] = await opening
            streams[rank] = _stream(sock, memory, rank < job.rank, spin, label)
    except BaseException:
        for stream in streams.values():
            stream.close()
        for sock in (*mesh.sockets.values(), *for_regions.values()):
            sock.close()
        raise
    terms = {rank: peer.terms for rank, peer in peers.items()}
    return streams, terms, SharedRegions(streams, for_regions)


def _check(job: Job, parameters: ShmParameters) -> None:
    """See before anybody is met that this process may have anonymous memory, and rings of that size.

    Raises:
        ConfigError: not so.
    """
    size = parameters.ring_bytes
    if size and (size & (size - 1) or size < 4096):
        raise ConfigError(
            f"ring_bytes={size} is not a power of two from 4096 on; try {1 << size.bit_length()}"
        )
    try:
        os.close(os.memfd_create("ruda-async", os.MFD_CLOEXEC))
    except OSError as error:
        raise ConfigError(
            f"rank {job.rank} may not make anonymous memory ({error.strerror}), as in some sandboxes; use a "
            "transport over the network"
        ) from None


def _usual_ring_bytes(ranks: int) -> int:
    return next(capacity for most, capacity in _CAPACITIES if ranks <= most)


async def _give(job: Job, sock: socket.socket, rank: int, ring_bytes: int) -> tuple[mmap.mmap, socket.socket]:
    """Make the pair's memory, and a socket for more of it; hand both to the peer."""
    size = 2 * (HEADER_BYTES + ring_bytes)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    try:
        descriptor = os.memfd_create("ruda-async", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            os.posix_fallocate(descriptor, 0, size)  # now, rather than a SIGBUS in the middle of a copy
            memory = mmap.mmap(descriptor, size)
            await _ready(
                job,
                sock,
                rank,
                partial(socket.send_fds, sock, [_SIZE.pack(size)], [descriptor, theirs.fileno()]),
            )
        finally:
            os.close(descriptor)
            theirs.close()
    except BrokenPipeError:
        ours.close()
        raise PeerLostError(
            f"rank {rank} is lost: it died while rank {job.rank} shared memory with it", rank=rank
        ) from None
    except CollectiveTimeoutError:  # which is an OSError too
        ours.close()
        raise
    except OSError as error:
        ours.close()
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        raise ConfigError(
            f"rank {job.rank} cannot have {size} bytes of shared memory per pair of ranks "
            f"({error.strerror}); give a smaller ring_bytes= than {ring_bytes}, or more memory"
        ) from None
    return memory, ours


async def _take(job: Job, sock: socket.socket, rank: int) -> tuple[mmap.mmap, socket.socket]:
    """The pair's memory, and the socket for more of it, from the peer."""
    data, descriptors, flags, _ = await _ready(
        job, sock, rank, partial(socket.recv_fds, sock, _SIZE.size, 2), reading=True
    )
    try:
        if flags & socket.MSG_CTRUNC:  # the kernel had no place for the descriptors
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if len(data) != _SIZE.size or len(descriptors) != 2:
            raise PeerLostError(f"rank {rank} is lost: it died, or had no memory to share", rank=rank)
        (size,) = _SIZE.unpack(data)
        capacity = size // 2 - HEADER_BYTES
        if (
            os.fstat(descriptors[0]).st_size != size
            or capacity < 4096
            or capacity & (capacity - 1)
            or size % 2
        ):
            raise ProtocolError(f"rank {rank} shared {size} bytes, which are no two rings", rank=rank)
        memory = mmap.mmap(descriptors[0], size)
        for_regions = socket.socket(fileno=descriptors.pop())
        for_regions.setblocking(False)
        return memory, for_regions
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


async def _ready(
    job: Job, sock: socket.socket, rank: int, call: Callable[[], Any], *, reading: bool = False
) -> Any:
    """Repeat a call on the non-blocking socket to `rank` until it goes through, before the deadline.

    Raises:
        CollectiveTimeoutError: it did not.
    """
    loop = asyncio.get_running_loop()
    while True:
        with contextlib.suppress(BlockingIOError):
            return call()
        able: asyncio.Future[None] = loop.create_future()
        watch, forget = (
            (loop.add_reader, loop.remove_reader) if reading else (loop.add_writer, loop.remove_writer)
        )
        watch(sock.fileno(), _settle, able)
        try:
            async with asyncio.timeout(job.deadline - monotonic()):
                await able
        except TimeoutError:
            raise job.silent(rank, "did not share memory") from None
        finally:
            forget(sock.fileno())


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _stream(sock: socket.socket, memory: mmap.mmap, higher: bool, spin: Spin, label: str) -> RingStream:
    """The first ring is the higher rank's to write, the second the lower's."""
    view = memoryview(memory)
    half = len(view) // 2
    first, second = Ring(view[:half]), Ring(view[half:])
    outgoing, incoming = (first, second) if higher else (second, first)
    view.release()
    return RingStream(sock, memory, outgoing, incoming, spin, label)
