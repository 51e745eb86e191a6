"""A connected socket as the byte stream that `FramedTransport` runs over."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence

from ruda_async.transport import Buffer, blocking

from .looking import Lookout

__all__ = ["SocketStream"]


class SocketStream:
    """See `ruda_async.transport.ByteStream`. Takes over a connected, non-blocking socket.

    Args:
        spin: seconds that a blocking call looks at the socket before it sleeps.
    """

    def __init__(self, sock: socket.socket, spin: float = 0.0) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._address = sock.getpeername()[:2]
        self._writing = False
        self._closed = False
        lookout = Lookout(sock, spin)
        self._wait = lookout.wait
        self._wait_either = lookout.wait_either
        # The two hot calls are the socket's own, without a wrapper around them.
        self.write: Callable[[Sequence[Buffer | bytes]], int] = sock.sendmsg  # type: ignore[assignment]
        self.read_into: Callable[[memoryview], int] = sock.recv_into

    def await_bytes(self) -> bool:
        """See `ByteStream.await_bytes`: looking costs as much as reading, unless it may block."""
        seconds = blocking.seconds
        return not seconds or self._wait(seconds)

    def await_either(self) -> bool:
        """See `ByteStream`: wait for bytes, or for room to write."""
        return self._wait_either(blocking.seconds)

    def on_readable(self, callback: Callable[[], None]) -> None:
        """See `ByteStream.on_readable`."""
        self._loop.add_reader(self._fd, callback)

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """See `ByteStream.on_writable`."""
        if callback is not None:
            self._writing = True
            self._loop.add_writer(self._fd, callback)
        elif self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)

    def end(self) -> None:
        """See `ByteStream.end`."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """See `ByteStream.close`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self.on_writable(None)
        self._sock.close()

    def describe(self) -> str:
        """The peer's address."""
        host, port = self._address
        return f"{host} port {port}"
