"""A TLS connection as the byte stream that `FramedTransport` runs over."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence

from ruda_async.transport import Buffer, blocking

from .looking import Lookout
from .tls import RECORD, TlsConnection, damage

__all__ = ["TlsStream"]

#: Encrypted at once: well under a millisecond, and the most that waits here when the socket is full.
_TURN = 256 * 1024
#: Read from the socket at once.
_BITE = 128 * 1024


class TlsStream:
    """See `ruda_async.transport.ByteStream`. Takes over a connection whose handshake is done.

    What the socket does not take at once waits here, encrypted; more is not taken until it has left. The end
    of the stream is the socket's: whether a peer meant to end is said by the frames inside.

    Args:
        spin: seconds that a blocking call looks at the socket before it sleeps.
    """

    def __init__(self, connection: TlsConnection, spin: float = 0.0) -> None:
        self._sock = connection.sock
        self._fd = connection.sock.fileno()
        self._tls = connection.tls
        self._incoming, self._outgoing = connection.incoming, connection.outgoing
        self._loop = asyncio.get_running_loop()
        self._address = connection.getpeername()[:2]
        self._stage = memoryview(bytearray(_BITE))
        self._encrypted = memoryview(b"")
        self._on_readable: Callable[[], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        self._watching = False
        self._reading_again = False
        self._ending = False
        self._closed = False
        self._wait = Lookout(self._sock, spin).wait
        self.write: Callable[[Sequence[Buffer | bytes]], int] = self._write
        self.read_into: Callable[[memoryview], int] = self._read_into

    # ------------------------------------------------------------------ out

    def _write(self, buffers: Sequence[Buffer | bytes]) -> int:
        """See `ByteStream.write`."""
        if not self._flush():
            raise BlockingIOError
        if sum(map(len, buffers)) <= RECORD:  # type: ignore[arg-type]
            buffers = (b"".join(buffers),)  # type: ignore[arg-type]
        taken = 0
        for buffer in buffers:
            view = memoryview(buffer)[: _TURN - taken]  # type: ignore[arg-type]
            taken += len(view)
            while view:
                view = view[self._tls.write(view[:RECORD]) :]
            if taken == _TURN:
                break
        self._flush()
        return taken

    def _flush(self) -> bool:
        """Hand the socket what is encrypted; whether it took all."""
        while self._encrypted or self._outgoing.pending:
            if not self._encrypted:
                self._encrypted = memoryview(self._outgoing.read())
            try:
                self._encrypted = self._encrypted[self._sock.send(self._encrypted) :]
            except (BlockingIOError, InterruptedError):
                self._watch(True)
                return False
        return True

    def _watch(self, on: bool) -> None:
        if on and not self._watching:
            self._loop.add_writer(self._fd, self._writable)
        elif self._watching and not on:
            self._loop.remove_writer(self._fd)
        self._watching = on

    def _writable(self) -> None:
        try:
            if not self._flush():
                return
            if self._ending:
                self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the next write, or read, meets it again
        if self._on_writable is not None:
            self._on_writable()
        else:
            self._watch(False)

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """See `ByteStream.on_writable`."""
        self._on_writable = callback
        self._watch(callback is not None or bool(self._encrypted))

    def end(self) -> None:
        """See `ByteStream.end`."""
        self._ending = True
        if self._flush():
            self._sock.shutdown(socket.SHUT_WR)

    # ------------------------------------------------------------------ in

    def _read_into(self, buffer: memoryview) -> int:
        """See `ByteStream.read_into`."""
        got, ended = 0, False
        while got < len(buffer):
            rest = buffer[got:]
            try:
                size: int = self._tls.read(len(rest), rest)  # type: ignore[assignment]
            except ssl.SSLWantReadError:
                state = self._fill()
                if state > 0:
                    continue
                ended = state == 0
                break
            except ssl.SSLZeroReturnError:
                size = 0
            except ssl.SSLError as error:
                raise damage(error) from None
            if not size:
                ended = True
                break
            got += size
        else:
            self._read_again()  # more may lie here, decrypted or not, which the socket does not tell of
        if self._outgoing.pending:
            self._flush()
        if got or ended:
            return got
        raise BlockingIOError

    def _fill(self) -> int:
        """Take encrypted bytes off the socket; how many, 0 at its end, -1 where none are there."""
        try:
            size = self._sock.recv_into(self._stage)
        except (BlockingIOError, InterruptedError):
            return -1
        self._incoming.write(self._stage[:size])
        return size

    def await_bytes(self) -> bool:
        """See `ByteStream.await_bytes`: looking costs as much as reading, unless it may block."""
        seconds = blocking.seconds
        return not seconds or bool(self._incoming.pending) or self._wait(seconds)

    def on_readable(self, callback: Callable[[], None]) -> None:
        """See `ByteStream.on_readable`."""
        self._on_readable = callback
        self._loop.add_reader(self._fd, callback)
        self._read_again()  # something may have come with the handshake

    def _read_again(self) -> None:
        if not self._reading_again:
            self._reading_again = True
            self._loop.call_soon(self._read_turn)

    def _read_turn(self) -> None:
        self._reading_again = False
        if not self._closed and self._on_readable is not None:
            self._on_readable()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """See `ByteStream.close`."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self._on_writable = None
        self._watch(False)
        self._sock.close()

    def describe(self) -> str:
        """The peer's address, and how it is encrypted."""
        host, port = self._address
        cipher = self._tls.cipher()
        return f"{host} port {port}, {self._tls.version()} {cipher[0] if cipher else ''}".rstrip()
