"""Two rings and a Unix socket as the byte stream that `FramedTransport` runs over.

The socket carries no data: one byte is a doorbell, and its end is the peer's. The kernel closes it with
the process, however that dies, so a dead peer is noticed at once; what it wrote before stays readable.
"""

from __future__ import annotations

import asyncio
import mmap
import select
import socket
from collections.abc import Callable, Sequence
from time import perf_counter

from ruda_async.transport import Buffer, Spin, blocking

from .ring import Ring

__all__ = ["RingStream"]


class RingStream:
    """See `ruda_async.transport.ByteStream`.

    Args:
        sock: connected to the peer, non-blocking.
        memory: the mapping that both rings lie in.
        outgoing, incoming: this side's rings.
        spin: how long a waiting rank looks before it asks for a doorbell.
        label: for people.
    """

    def __init__(
        self,
        sock: socket.socket,
        memory: mmap.mmap,
        outgoing: Ring,
        incoming: Ring,
        spin: Spin,
        label: str,
    ) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._memory = memory
        self._out = outgoing
        self._in = incoming
        self._spin = spin
        self._label = label
        self._loop = asyncio.get_running_loop()
        self._on_readable: Callable[[], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        # Readiness is level-triggered, as a socket's: while there is more to do and no doorbell was asked
        # for, the loop comes back by itself.
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        self._poll = poller.poll
        self._reading_again = False
        self._writing_again = False
        self._looking = False
        self._full = False
        self._on_signal: Callable[[], None] | None = None
        self._on_loss: Callable[[], None] | None = None
        #: Whether the peer's process is gone, or has ended its side.
        self.gone = False
        self._closed = False
        self.write: Callable[[Sequence[Buffer | bytes]], int] = self._write
        self.read_into: Callable[[memoryview], int] = self._read_into

    # ------------------------------------------------------------------ bytes

    def _write(self, buffers: Sequence[Buffer | bytes]) -> int:
        """See `ByteStream.write`. Where it takes nothing, it has asked for a doorbell."""
        if self.gone:
            raise BrokenPipeError("the peer's process is gone")
        size = self._out.write(buffers)
        if not size:
            self._full = True
            raise BlockingIOError
        if self._out.reader_waits():
            self._ring()
        return size

    def _read_into(self, buffer: memoryview) -> int:
        """See `ByteStream.read_into`. Where it finds less than asked, it has asked for a doorbell.

        Not so while somebody looks instead of waiting: the peer then need not ring, and this side asks
        when its loop turns.
        """
        incoming = self._in
        size = incoming.read_into(buffer)
        if self._looking:
            self._looking = size == len(buffer)
            self._read_again()
        else:
            while size < len(buffer):
                if incoming.wait_as_reader():
                    break
                size += incoming.read_into(buffer[size:])
            else:
                self._read_again()
        if size:
            if incoming.writer_waits():
                self._ring()
            return size
        if self.gone:
            return 0
        raise BlockingIOError

    def await_bytes(self) -> bool:
        """See `ByteStream.await_bytes`: spin on the ring, which needs no doorbell meanwhile."""
        self._looking = self._in.spin(self._spin.now()) or (blocking.seconds > 0 and self._sleep())
        return self._looking

    def _sleep(self) -> bool:
        """Wait for the doorbell, since this thread may block; whether bytes came."""
        if self._in.wait_as_reader() and self._poll(blocking.seconds * 1000):
            try:
                if not self._sock.recv(4096):
                    self._lose()
            except OSError:
                self._lose()
            if self._on_signal is not None:  # the bell may have been for it
                self._on_signal()
        return self._in.filled()

    # ------------------------------------------------------------------ other shared memory

    def signal(self) -> None:
        """Something was written elsewhere that the peer may wait for."""
        if not self._closed and self._out.reader_watches():
            self._ring()

    def spin_for(self, ready: Callable[[], bool]) -> bool:
        """Look for a moment whether `ready` holds."""
        seconds = self._spin.now()
        if not seconds:
            return ready()
        end = perf_counter() + seconds
        while not ready():
            if perf_counter() > end:
                return False
        return True

    def ask_for_signal(self, ready: Callable[[], bool]) -> bool:
        """Have the peer ring at its next `signal`; True where `ready` holds already."""
        return not self._closed and self._in.watch(ready)

    def on_signal(self, callback: Callable[[], None], lost: Callable[[], None]) -> None:
        """Call `callback` when the peer has rung, and `lost` when it is gone."""
        self._on_signal = callback
        self._on_loss = lost

    # ------------------------------------------------------------------ doorbells

    def _ring(self) -> None:
        try:
            self._sock.send(b"\0")
        except BlockingIOError:
            pass  # it has more doorbells than it has answered
        except OSError:
            self._lose()

    def _doorbell(self) -> None:
        try:
            if not self._sock.recv(4096):
                self._lose()
        except BlockingIOError:
            return
        except OSError:
            self._lose()
        self._full = False
        self._write_again()
        if self._on_signal is not None:
            self._on_signal()
        if self._on_readable is not None:
            self._on_readable()

    def _lose(self) -> None:
        """The peer's process is gone, or has ended its side."""
        if not self.gone:
            self.gone = True
            self._loop.remove_reader(self._fd)
            self._read_again()
            if self._on_loss is not None:
                self._on_loss()

    def _read_again(self) -> None:
        if not self._reading_again:
            self._reading_again = True
            self._loop.call_soon(self._read_turn)

    def _read_turn(self) -> None:
        self._reading_again = False
        if not self._closed and self._on_readable is not None:
            if self.gone:
                self._read_again()  # until the reader has come to the end and closes
            self._on_readable()

    def _write_again(self) -> None:
        if self._on_writable is not None and not self._writing_again:
            self._writing_again = True
            self._loop.call_soon(self._write_turn)

    def _write_turn(self) -> None:
        self._writing_again = False
        if not self._closed and self._on_writable is not None and not self._full:
            self._on_writable()
            if not self._full:
                self._write_again()

    def on_readable(self, callback: Callable[[], None]) -> None:
        """See `ByteStream.on_readable`."""
        self._on_readable = callback
        self._loop.add_reader(self._fd, self._doorbell)
        self._read_again()  # something may have come before this side was there to be told

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """See `ByteStream.on_writable`."""
        self._on_writable = callback
        if not self._full:
            self._write_again()

    def end(self) -> None:
        """See `ByteStream.end`."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """See `ByteStream.close`."""
        if self._closed:
            return
        self._closed = True
        if not self.gone:
            self._loop.remove_reader(self._fd)
        self._sock.close()
        self._out.release()
        self._in.release()
        try:
            self._memory.close()
        except BufferError:
            pass  # a payload is just being copied; the mapping goes with the last view of it

    def describe(self) -> str:
        """The peer's process."""
        return self._label
