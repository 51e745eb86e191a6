"""A connected socket as the byte stream that `FramedTransport` runs over."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable, Sequence

from ruda_async.transport import Buffer, blocking

__all__ = ["SocketStream"]


class SocketStream:
    """See `ruda_async.transport.ByteStream`. Takes over a connected, non-blocking socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = asyncio.get_running_loop()
        self._address = sock.getpeername()[:2]
        self._writing = False
        self._closed = False
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        self._poll = poller.poll
        # The two hot calls are the socket's own, without a wrapper around them.
        self.write: Callable[[Sequence[Buffer | bytes]], int] = sock.sendmsg  # type: ignore[assignment]
        self.read_into: Callable[[memoryview], int] = sock.recv_into

    def await_bytes(self) -> bool:
        """See `ByteStream.await_bytes`: looking costs as much as reading, unless it may block."""
        seconds = blocking.seconds
        return not seconds or bool(self._poll(seconds * 1000))

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
