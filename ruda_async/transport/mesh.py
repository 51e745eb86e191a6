"""Linking all ranks by sockets: each listens, and the higher rank dials the lower.

Every connection proves the job's secret, bound to the session that rank 0 drew, before anything else is
read from it; a stray connection holds nothing up.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from ..errors import AuthenticationError, CollectiveTimeoutError, PeerLostError, RudaError
from .handshake import Peer, address_text, authenticate, read_exactly, write_all
from .job import Connection, Job

__all__ = ["Endpoint", "Mesh"]

_RANK = struct.Struct("<I")
#: Connections that have not proved the secret yet, at most, beyond one for each rank.
MAX_STRANGERS = 64
#: Seconds that each of them has.
STRANGER_SECONDS = 5.0
#: Seconds before the next try where a connection could not be accepted.
_ACCEPT_PAUSE = 0.02


class Endpoint(NamedTuple):
    """Where a rank listens.

    Attributes:
        find: gives the socket family and the address to dial; may look a name up.
        label: for error texts.
        name: the host, as a certificate of it would say.
    """

    find: Callable[[], Awaitable[tuple[int, Any]]]
    label: str
    name: str = ""


class Mesh:
    """The connections of one rank while they are being made.

    Args:
        job: the job that is joined.
        session: what `Job.meet` gave; binds every proof of the secret to this meeting.
        tune: called with every new socket, before it is used.

    Attributes:
        sockets: a connected, authenticated, non-blocking socket for each rank that has linked up.
        secured: what secures each of them, where `Job.secure` does.
    """

    def __init__(
        self, job: Job, session: bytes, tune: Callable[[socket.socket], None] = lambda _: None
    ) -> None:
        self.job = job
        self.context = b"mesh|" + session
        self.sockets: dict[int, socket.socket] = {}
        self.secured: dict[int, Connection] = {}
        self._expected: frozenset[int] = frozenset()
        self._tune = tune
        self._loop = asyncio.get_running_loop()
        self._strangers: dict[asyncio.Task[None], None] = {}  # oldest first
        self._linked = asyncio.Event()
        self._paused: asyncio.TimerHandle | None = None
        #: The last connection that did not prove the secret, and why the last one was not accepted.
        self._unproved = self._unaccepted = ""

    async def link(self, listener: socket.socket, peers: Mapping[int, Endpoint]) -> None:
        """Dial the lower ranks of `peers` and wait for the higher ones; all sockets are closed if that fails.

        Raises:
            CollectiveTimeoutError: some ranks did not link up; ``missing`` names them.
            PeerLostError: a rank died after the meeting.
            AuthenticationError: what listens where a rank should be did not prove the secret.
        """
        try:
            await self._link(listener, peers)
        except BaseException:
            for sock in self.sockets.values():
                sock.close()
            raise

    async def _link(self, listener: socket.socket, peers: Mapping[int, Endpoint]) -> None:
        job = self.job
        self._expected = frozenset(rank for rank in peers if rank > job.rank)
        dialling = [
            self._loop.create_task(self._dial(rank, peer)) for rank, peer in peers.items() if rank < job.rank
        ]
        self._loop.add_reader(listener, self._accept, listener)
        try:
            async with asyncio.timeout(job.remaining()):
                await asyncio.gather(*dialling)
                while len(self.sockets) < len(peers):
                    self._linked.clear()
                    await self._linked.wait()
        except TimeoutError:
            raise self._too_late(tuple(r for r in peers if r not in self.sockets)) from None
        finally:
            self._loop.remove_reader(listener)
            if self._paused is not None:
                self._paused.cancel()
            tasks = [*dialling, *self._strangers]
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
        if self._unaccepted:
            text += f"; a connection could not be accepted ({self._unaccepted})"
        return CollectiveTimeoutError(text, missing=missing)

    async def _dial(self, rank: int, peer: Endpoint) -> None:
        """Connect to a lower rank.

        Raises:
            PeerLostError, AuthenticationError: at once.
            CollectiveTimeoutError: it took the connection and did not answer.
        """
        job = self.job
        where = f"rank {rank} at {peer.label}"
        try:
            family, address = await peer.find()
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.setblocking(False)
                self._tune(sock)
                await self._loop.sock_connect(sock, address)
                link = await authenticate(
                    job, sock, server=False, context=self.context, deadline=job.deadline, name=peer.name
                )
                await write_all(self._loop, link, _RANK.pack(job.rank))
            except BaseException:
                sock.close()
                raise
        except OSError as error:  # and, by inheritance, all else that `authenticate` raises
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # this rank's own trouble
            raise self._unreached(error, rank, where) from None
        self._keep(rank, sock, link)
        for _ in range(job.extra_dials):
            await self._dial_again(peer)

    def _unreached(self, error: OSError, rank: int, where: str) -> RudaError:
        job = self.job
        if isinstance(error, CollectiveTimeoutError):
            return error
        if isinstance(error, AuthenticationError):
            return AuthenticationError(f"rank {job.rank} dialled {where}: {error}", rank=rank)
        return PeerLostError(f"rank {job.rank} cannot reach {where}: {error}", rank=rank)

    def _keep(self, rank: int, sock: socket.socket, link: Peer) -> None:
        self.sockets[rank] = sock
        if not isinstance(link, socket.socket):
            self.secured[rank] = link

    async def _dial_again(self, peer: Endpoint) -> None:
        """One more connection that claims this rank's place; the peer, which has it, hangs up."""
        family, address = await peer.find()
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            async with asyncio.timeout(STRANGER_SECONDS):
                await self._loop.sock_connect(sock, address)
                job = self.job
                link = await authenticate(
                    job, sock, server=False, context=self.context, deadline=job.deadline, name=peer.name
                )
                await write_all(self._loop, link, _RANK.pack(job.rank))
                await read_exactly(self._loop, link, 1)

    def _accept(self, listener: socket.socket) -> None:
        """Take one connection; called whenever there is one, so a flood leaves the loop its turns."""
        try:
            sock, address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # descriptors have run out: make room, and look again soon
            self._unaccepted = error.strerror or str(error)
            self._evict()
            self._loop.remove_reader(listener)
            self._paused = self._loop.call_later(
                _ACCEPT_PAUSE, self._loop.add_reader, listener, self._accept, listener
            )
            return
        task = self._loop.create_task(self._greet(sock, address_text(address)))
        self._strangers[task] = None
        task.add_done_callback(partial(self._ended, sock))
        if len(self._strangers) > self.job.world_size + MAX_STRANGERS:
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
            async with asyncio.timeout(min(STRANGER_SECONDS, job.remaining())):
                link = await authenticate(job, sock, server=True, context=self.context, deadline=job.deadline)
                (rank,) = _RANK.unpack(await read_exactly(self._loop, link, _RANK.size))
        except AuthenticationError:
            self._unproved = address
        except OSError:  # and, by inheritance, all else that `prove` raises: no rank of this job
            pass
        else:
            if rank in self._expected and rank not in self.sockets:
                self._keep(rank, sock, link)
                self._linked.set()
