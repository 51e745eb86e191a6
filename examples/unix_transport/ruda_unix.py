"""``unix://name``: Unix sockets between the processes of one Linux host, as a plugin for ruda-async."""

import asyncio
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial

import msgpack

from ruda_async import transport as ruda


class UnixStream:
    """A `ByteStream`: ordered bytes to and from one peer, without ever blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.loop, self.writing = sock, asyncio.get_running_loop(), False
        self.write: Callable[..., int] = sock.sendmsg  # takes some bytes, or raises BlockingIOError
        self.read_into: Callable[..., int] = (
            sock.recv_into
        )  # gives some bytes, 0 at the end, or raises BlockingIOError

    def await_bytes(self) -> bool:
        return True  # reading is worth a try; a stream that can look more cheaply may say False

    def on_readable(self, callback: Callable[[], None]) -> None:
        self.loop.add_reader(self.sock, callback)

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        if callback is not None:
            self.loop.add_writer(self.sock, callback)
        elif self.writing:
            self.loop.remove_writer(self.sock)
        self.writing = callback is not None

    def end(self) -> None:
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:  # harmless twice
        if self.sock.fileno() >= 0:
            self.loop.remove_reader(self.sock)
            self.on_writable(None)
            self.sock.close()

    def describe(self) -> str:
        return "a Unix socket"


@dataclass(frozen=True, slots=True)
class UnixParameters(ruda.FramedParameters):
    backlog: int = ruda.param(64, doc="connections that may wait to be accepted", minimum=1)


class UnixPlugin:
    scheme, summary, parameters = "unix", "Unix sockets between processes of one host", UnixParameters
    rank_per, example, preference = "process", "unix://example", -10

    def unavailable(self) -> str | None:
        return None if sys.platform == "linux" else "it needs Linux, for socket names without a file"

    async def connect(self, job: ruda.Job) -> ruda.Transport:
        ours: ruda.Terms = job.parameters.terms
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address := f"\0ruda-unix/{secrets.token_hex(16)}")
            listener.listen(job.world_size + job.parameters.backlog)
            listener.setblocking(False)
            meeting = await job.meet(msgpack.packb([address, *astuple(ours)]), f"\0ruda-unix/{job.name}")
            told = {r: _read(r, data) for r, data in enumerate(meeting.payloads) if r != job.rank}
            mesh = ruda.Mesh(job, meeting.session)
            await mesh.link(
                listener, {r: ruda.Endpoint(partial(_find, a), a[1:]) for r, (a, _) in told.items()}
            )
        streams = {rank: UnixStream(sock) for rank, sock in mesh.sockets.items()}
        terms = {rank: theirs for rank, (_, theirs) in told.items()}
        costs = ruda.Capabilities(eager_bytes=ours.eager_bytes, latency=20e-6, bandwidth=2e9)
        return ruda.FramedTransport(job, streams, job.parameters, terms, costs, facts={"scheme": self.scheme})


def _read(rank: int, data: bytes) -> tuple[str, ruda.Terms]:
    """What a rank told of itself: it came from another process, so nothing in it is believed unchecked."""
    try:
        address, eager, early = msgpack.unpackb(data, max_array_len=3, max_str_len=107)
        if type(address) is not str or not all(type(n) is int and n >= 0 for n in (eager, early)):
            raise ValueError
    except (ValueError, TypeError, msgpack.UnpackException):
        raise ruda.ProtocolError(f"rank {rank} sent no usable address", rank=rank) from None
    return address, ruda.Terms(eager, early)


async def _find(address: str) -> tuple[int, str]:
    return socket.AF_UNIX, address


PLUGIN = UnixPlugin()
