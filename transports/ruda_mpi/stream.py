"""MPI messages between two ranks as the byte stream that `FramedTransport` runs over.

Every message is a piece of the stream, up to `chunk` bytes, sent from and received into memory of the
stream's own: MPI cannot take back a send, so it must never read a caller's memory after that was withdrawn.
An empty message ends the stream.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from mpi4py import MPI

from ruda_async.transport import Buffer, blocking

from .engine import alive, as_os_error, keep_requests
from .pump import Pump

__all__ = ["MpiStream"]

#: Messages under way in each direction.
_DEPTH = 4
_TAG = 0


class MpiStream:
    """See `ruda_async.transport.ByteStream`.

    Args:
        communicator: linked for this transport alone.
        peer: the rank in it.
        pump: looks after the stream.
        chunk: bytes of a message.
    """

    def __init__(self, communicator: Any, peer: int, pump: Pump, chunk: int) -> None:
        self._communicator = communicator
        self._peer = peer
        self._pump = pump
        self._chunk = chunk
        self._free = [memoryview(bytearray(chunk)) for _ in range(_DEPTH)]
        self._sends: deque[tuple[Any, memoryview | None]] = deque()
        self._receives: deque[tuple[Any, memoryview]] = deque()
        self._status = MPI.Status()
        #: Bytes that have come and were not read yet.
        self._rest = memoryview(b"")
        self._spent: memoryview | None = None
        self._ended = False
        self._said_end = False
        self._error: OSError | None = None
        self._closed = False
        self._on_readable: Callable[[], None] | None = None
        self._on_writable: Callable[[], None] | None = None
        self.write: Callable[[Sequence[Buffer | bytes]], int] = self._write
        self.read_into: Callable[[memoryview], int] = self._read_into
        for _ in range(_DEPTH):
            self._post(memoryview(bytearray(chunk)))
        pump.add(self)
        alive.add(self)

    # ------------------------------------------------------------------ writing

    def _write(self, buffers: Sequence[Buffer | bytes]) -> int:
        """See `ByteStream.write`."""
        self._collect()
        if self._error is not None:
            raise self._error
        if not self._free:
            raise BlockingIOError
        room = self._free.pop()
        at = 0
        for buffer in buffers:
            piece = memoryview(buffer)[: self._chunk - at]  # type: ignore[arg-type]
            room[at : at + len(piece)] = piece
            at += len(piece)
            if at == self._chunk:
                break
        self._send(room, at)
        return at

    def _send(self, room: memoryview, size: int) -> None:
        try:
            request = self._communicator.Isend([room[:size], MPI.BYTE], self._peer, _TAG)
        except MPI.Exception as error:
            self._free.append(room)
            self._error = as_os_error(error)
            raise self._error from None
        self._sends.append((request, room))
        self._pump.kick()

    def _collect(self) -> bool:
        """Take back the memory of messages that have left."""
        moved = False
        try:
            while self._sends and self._sends[0][0].Test():
                _, room = self._sends.popleft()
                moved = True
                if room is not None:
                    self._free.append(room)
        except MPI.Exception as error:
            self._error = self._error or as_os_error(error)
        return moved

    def end(self) -> None:
        """See `ByteStream.end`."""
        if self._said_end:
            return
        self._said_end = True
        nothing = memoryview(bytearray(0))
        try:
            request = self._communicator.Isend([nothing, MPI.BYTE], self._peer, _TAG)
        except MPI.Exception as error:
            raise as_os_error(error) from None
        self._sends.append((request, None))
        self._pump.kick()

    # ------------------------------------------------------------------ reading

    def _post(self, room: memoryview) -> None:
        request = self._communicator.Irecv([room, MPI.BYTE], self._peer, _TAG)
        self._receives.append((request, room))

    def _arrived(self) -> bool:
        """Whether there is something to read; takes the next message where one has come."""
        if len(self._rest) or self._ended or self._error is not None:
            return True
        try:
            if self._spent is not None:
                self._post(self._spent)
                self._spent = None
            request, room = self._receives[0]
            if not request.Test(self._status):
                return False
            self._receives.popleft()
            size = self._status.Get_count(MPI.BYTE)
            self._rest = room[:size]
            self._spent = room
            self._ended = not size
        except MPI.Exception as error:
            self._error = as_os_error(error)
        return True

    def _read_into(self, buffer: memoryview) -> int:
        """See `ByteStream.read_into`."""
        size = 0
        while size < len(buffer):
            if not len(self._rest) and (not self._arrived() or self._ended or self._error is not None):
                break
            piece = self._rest[: len(buffer) - size]
            buffer[size : size + len(piece)] = piece
            self._rest = self._rest[len(piece) :]
            size += len(piece)
        if size or self._ended:
            return size
        if self._error is not None:
            raise self._error
        raise BlockingIOError

    def await_bytes(self) -> bool:
        """See `ByteStream.await_bytes`."""
        if self._arrived():
            return True
        seconds = blocking.seconds
        if seconds:
            end = monotonic() + seconds
            while monotonic() < end:
                if self._arrived():
                    return True
                os.sched_yield()
        return False

    # ------------------------------------------------------------------ the loop's side

    def poll(self) -> bool:
        """Call back who waits for what has become possible; whether anything moved."""
        moved = self._collect()
        if self._on_readable is not None and self._arrived():
            moved = True
            self._on_readable()
        if self._on_writable is not None and (self._free or self._error is not None):
            moved = True
            self._on_writable()
        return moved

    def on_readable(self, callback: Callable[[], None]) -> None:
        """See `ByteStream.on_readable`."""
        self._on_readable = callback
        self._pump.kick()

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """See `ByteStream.on_writable`."""
        self._on_writable = callback
        self._pump.kick()

    def close(self) -> None:
        """See `ByteStream.close`."""
        if self._closed:
            return
        self._closed = True
        self._on_readable = self._on_writable = None
        self._pump.remove(self)
        self.hang_up()
        keep_requests(self._sends)
        self._sends.clear()
        self._rest = memoryview(b"")

    def hang_up(self) -> None:
        """End the stream; without a goodbye before it, that is how the peer learns that this end is gone."""
        with suppress(OSError):
            self.end()

    def drained(self) -> bool:
        """After `close`: whether all that the peer has sent is here, so that the communicator may go."""
        while not self._ended and self._error is None:
            if not self._arrived():
                return False
            self._rest = memoryview(b"")
        for request, _ in self._receives:
            request.Cancel()
        keep_requests(self._receives)
        self._receives.clear()
        alive.discard(self)
        return True

    def describe(self) -> str:
        """The peer, as MPI has it."""
        return f"MPI rank {self._peer}"
