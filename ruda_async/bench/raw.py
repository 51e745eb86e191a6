"""The operations over bare non-blocking TCP sockets: the floor that a TCP transport is measured against.

One thread, no event loop, no headers, no checks: full-duplex between every two ranks, in chunks, summing
each chunk when it has come while the next are under way. Small sums travel whole; large ones as
reduce-scatter and all-gather in direct exchange, the bytes that Rabenseifner's algorithm moves.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from ..errors import CollectiveTimeoutError, PeerLostError
from ..sync import Communicator
from .cases import Array, Case
from .contender import Data, Unsupported, time_calls
from .plan import Subject

__all__ = ["Mesh", "RawSockets"]

#: Bytes that are received, added and passed on at once.
CHUNK = 256 * 1024
#: Sums up to this many bytes travel whole: one exchange instead of two.
_WHOLE = 16 * 1024
_COUNT = struct.Struct("!q")
_TOKEN = 16

Done = Callable[[], None]


class _Link:
    """One peer's socket and what is still to go each way."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer = peer
        self.sock = sock
        self.outgoing: deque[memoryview] = deque()
        self.incoming: deque[tuple[memoryview, Done | None]] = deque()

    def progress(self) -> bool:
        """Move what can be moved; whether anything was."""
        return bool(self._receive()) | bool(self._send())

    def _receive(self) -> int:
        moved = 0
        while self.incoming:
            view, done = self.incoming[0]
            try:
                n = self.sock.recv_into(view)
            except BlockingIOError:
                break
            if n == 0:
                raise PeerLostError(f"rank {self.peer} closed its socket", rank=self.peer)
            moved += n
            if n < len(view):
                self.incoming[0] = (view[n:], done)
                break  # it is drained for now
            self.incoming.popleft()
            if done is not None:
                done()
        return moved

    def _send(self) -> int:
        if not self.outgoing:
            return 0
        view = self.outgoing[0]
        try:
            n = self.sock.send(view[:CHUNK])
        except BlockingIOError:
            return 0
        if n == len(view):
            self.outgoing.popleft()
        else:
            self.outgoing[0] = view[n:]
        return n


class Mesh:
    """A socket to every other rank, and the loop that drives them.

    Args:
        control: tells the ranks where to connect.
        timeout: seconds without any progress after which `run` gives up.
    """

    def __init__(self, control: Communicator, timeout: float) -> None:
        self.rank, self.size = control.rank, control.world_size
        self._timeout = timeout
        token = bytes(control.broadcast_object(secrets.token_bytes(_TOKEN), 0))
        with socket.create_server(("127.0.0.1", 0), backlog=self.size) as server:
            server.settimeout(timeout)
            ports = control.all_gather_object(server.getsockname()[1])
            self.links: dict[int, _Link] = {}
            for peer in range(self.rank):
                sock = socket.create_connection(("127.0.0.1", ports[peer]), timeout)
                sock.sendall(token + _COUNT.pack(self.rank))
                self._add(peer, sock)
            while len(self.links) < self.size - 1:
                sock, _ = server.accept()
                sock.settimeout(timeout)
                hello = sock.recv(_TOKEN + _COUNT.size, socket.MSG_WAITALL)
                if secrets.compare_digest(hello[:_TOKEN], token) and len(hello) == _TOKEN + _COUNT.size:
                    self._add(_COUNT.unpack(hello[_TOKEN:])[0], sock)
                else:
                    sock.close()

    def _add(self, peer: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(AttributeError, OSError):  # as tcp:// does; see its `congestion`
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        sock.setblocking(False)
        self.links[peer] = _Link(peer, sock)

    def send(self, peer: int, view: memoryview) -> None:
        """Queue bytes to `peer`."""
        if len(view):
            self.links[peer].outgoing.append(view)

    def receive(self, peer: int, view: memoryview, done: Done | None = None) -> None:
        """Queue a receive that fills `view`, then calls `done`, which may queue more."""
        if len(view):
            self.links[peer].incoming.append((view, done))
        elif done is not None:
            done()

    def run(self) -> None:
        """Drive the sockets until nothing is queued.

        Raises:
            PeerLostError: a socket was closed.
            CollectiveTimeoutError: nothing moved for too long.
        """
        links = list(self.links.values())
        while busy := [link for link in links if link.outgoing or link.incoming]:
            if sum(link.progress() for link in busy):  # all of them, not up to the first
                continue
            poll = select.poll()
            for link in busy:
                events = select.POLLIN if link.incoming else 0
                poll.register(link.sock, events | (select.POLLOUT if link.outgoing else 0))
            if not poll.poll(self._timeout * 1000):
                raise CollectiveTimeoutError(
                    f"rank {self.rank}: raw sockets moved nothing for {self._timeout:g} s", rank=self.rank
                )

    def close(self) -> None:
        """Close all sockets."""
        for link in self.links.values():
            link.sock.close()


class RawSockets:
    """The contender ``raw``."""

    note = ""

    def __init__(self, subject: Subject, control: Communicator, timeout: float) -> None:
        self.subject = subject
        self._mesh = Mesh(control, timeout)

    def prepare(self, data: Data) -> None:
        """As `Contender.prepare`."""
        case = data.case
        if case.operation in ("all_reduce", "reduce_scatter") and case.dtype in ("float16", "bfloat16"):
            raise Unsupported(f"raw sockets sum no {case.dtype}")
        self._case = case
        self._result = data.result
        self._call = _CALLS[case.operation](self._mesh, case, data.value.reshape(-1), data.result.reshape(-1))

    def check(self) -> str:
        """As `Contender.check`."""
        self._result.fill(0)
        self._call()
        return self._case.fault(self._result)

    def block(self, count: int) -> list[float]:
        """As `Contender.block`."""
        return time_calls(self._call, count)

    def stall(self, count: int) -> list[float] | None:
        """None, but the calls are made as on the other ranks."""
        time_calls(self._call, count)
        return None

    def close(self) -> None:
        """Close the sockets."""
        self._mesh.close()


# ---------------------------------------------------------------------- operations


def _bytes(array: Array) -> memoryview:
    """Its memory; through uint8, since bfloat16 has no buffer format."""
    return memoryview(array.view(np.uint8).data) if array.size else memoryview(b"")


def _parts(array: Array, world: int) -> list[Array]:
    """Nearly equal parts, one for each rank."""
    ends = [len(array) * rank // world for rank in range(world + 1)]
    return [array[start:end] for start, end in pairwise(ends)]


def _chunks(array: Array) -> list[Array]:
    step = max(1, CHUNK // array.itemsize)
    return [array[start : start + step] for start in range(0, len(array), step)]


class _Sums:
    """Adds what peers send to this rank's own part, chunk by chunk and in rank order."""

    def __init__(self, mesh: Mesh, own: Array, total: Array) -> None:
        self._mesh = mesh
        self._total = _chunks(total)
        self._inputs = [
            _chunks(own if rank == mesh.rank else np.empty_like(own)) for rank in range(mesh.size)
        ]
        self.finished: Callable[[Array], None] | None = None

    def start(self) -> None:
        """Queue the receives."""
        missing = [self._mesh.size - 1] * len(self._total)
        for peer in self._mesh.links:
            for index, chunk in enumerate(self._inputs[peer]):
                self._mesh.receive(peer, _bytes(chunk), functools.partial(self._came, missing, index))

    def _came(self, missing: list[int], index: int) -> None:
        missing[index] -= 1
        if missing[index]:
            return
        total = self._total[index]
        first, second, *others = (chunks[index] for chunks in self._inputs)
        np.add(first, second, out=total)
        for chunk in others:
            np.add(total, chunk, out=total)
        if self.finished is not None:
            self.finished(total)


def _all_reduce(mesh: Mesh, case: Case, value: Array, result: Array) -> Done:
    if case.nbytes <= _WHOLE:
        return _whole_all_reduce(mesh, value, result)
    inputs, results = _parts(value, mesh.size), _parts(result, mesh.size)
    sums = _Sums(mesh, inputs[mesh.rank], results[mesh.rank])

    def pass_on(chunk: Array) -> None:
        for peer in mesh.links:
            mesh.send(peer, _bytes(chunk))

    sums.finished = pass_on

    def call() -> None:
        sums.start()
        for peer in mesh.links:
            mesh.send(peer, _bytes(inputs[peer]))
            mesh.receive(peer, _bytes(results[peer]))
        mesh.run()

    return call


def _whole_all_reduce(mesh: Mesh, value: Array, result: Array) -> Done:
    sums = _Sums(mesh, value, result)

    def call() -> None:
        sums.start()
        for peer in mesh.links:
            mesh.send(peer, _bytes(value))
        mesh.run()

    return call


def _reduce_scatter(mesh: Mesh, case: Case, value: Array, result: Array) -> Done:
    inputs = _parts(value, mesh.size)
    sums = _Sums(mesh, inputs[mesh.rank], result)

    def call() -> None:
        sums.start()
        for peer in mesh.links:
            mesh.send(peer, _bytes(inputs[peer]))
        mesh.run()

    return call


def _exchange(mesh: Mesh, outgoing: Sequence[Array], incoming: Sequence[Array]) -> Done:
    """Send part *r* to rank *r*, receive part *r* from it; this rank's own is copied."""

    def call() -> None:
        for peer in mesh.links:
            mesh.send(peer, _bytes(outgoing[peer]))
            mesh.receive(peer, _bytes(incoming[peer]))
        incoming[mesh.rank][...] = outgoing[mesh.rank]
        mesh.run()

    return call


def _all_gather(mesh: Mesh, case: Case, value: Array, result: Array) -> Done:
    return _exchange(mesh, [value] * mesh.size, _parts(result, mesh.size))


def _all_to_all(mesh: Mesh, case: Case, value: Array, result: Array) -> Done:
    return _exchange(mesh, _parts(value, mesh.size), _parts(result, mesh.size))


def _all_to_all_v(mesh: Mesh, case: Case, value: Array, result: Array) -> Done:
    """The number of rows goes before them, as the receiver does not know it."""
    row, starts = case.row_length, np.cumsum([0, *case.counts[case.rank]]) * case.row_length
    outgoing = [value[a:b] for a, b in pairwise(starts)]
    counts = [memoryview(bytearray(_COUNT.pack(n))) for n in case.counts[case.rank]]
    heard = [memoryview(bytearray(counts[rank])) for rank in range(mesh.size)]
    room = result.reshape(-1)

    def place() -> None:
        at = 0
        for peer in range(mesh.size):
            length = _COUNT.unpack(heard[peer])[0] * row
            part = room[at : at + length]
            at += length
            if peer == mesh.rank:
                part[...] = outgoing[peer]
            else:
                mesh.receive(peer, _bytes(part))

    def call() -> None:
        missing = mesh.size - 1

        def came() -> None:
            nonlocal missing
            missing -= 1
            if not missing:
                place()

        for peer in mesh.links:
            mesh.send(peer, counts[peer])
            mesh.send(peer, _bytes(outgoing[peer]))
            mesh.receive(peer, heard[peer], came)
        mesh.run()

    return call


def _broadcast(mesh: Mesh, case: Case, value: Array, result: Array) -> Done:
    """From the root straight to everyone."""

    def call() -> None:
        if mesh.rank == 0:
            for peer in mesh.links:
                mesh.send(peer, _bytes(value))
            result[...] = value
        else:
            mesh.receive(0, _bytes(result))
        mesh.run()

    return call


def _barrier(mesh: Mesh, case: Case, value: Array, result: Array) -> Done:
    return _exchange(mesh, [np.zeros(1, np.uint8)] * mesh.size, list(np.zeros((mesh.size, 1), np.uint8)))


def _send(mesh: Mesh, case: Case, value: Array, result: Array) -> Done:
    after, before = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size

    def call() -> None:
        mesh.send(after, _bytes(value))
        mesh.receive(before, _bytes(result))
        mesh.run()

    return call


_CALLS: dict[str, Callable[[Mesh, Case, Array, Array], Done]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "all_to_all_v": _all_to_all_v,
    "barrier": _barrier,
    "send": _send,
}
