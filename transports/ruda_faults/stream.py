"""Faults by bytes: between a transport and its stream to one peer."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ruda_async.transport import Buffer, ByteStream

if TYPE_CHECKING:
    from . import FaultParameters

__all__ = ["FaultyStream"]

_NEVER = math.inf


class FaultyStream:
    """See `ruda_async.transport.ByteStream`. Faults are on the way out, silence is both ways.

    Positions count the bytes that were written to this peer, so a run repeats exactly as far as its bytes do.
    """

    def __init__(self, inner: ByteStream, faults: FaultParameters, rank: int, peer: int) -> None:
        self._inner = inner
        self._random = random.Random(f"{faults.seed}/{rank}/{peer}/bytes")
        self._rate = faults.corrupt_rate
        self._written = 0
        self._drop_at = _or_never(faults.drop_after)
        self._silence_at = _or_never(faults.silence_after)
        self._damage_at = min(_or_never(faults.corrupt_after), self._gap())
        self._inner_write = inner.write
        self._inner_read = inner.read_into
        self.write: Callable[[Sequence[Buffer | bytes]], int] = self._write
        self.read_into: Callable[[memoryview], int] = self._read_into

    def _gap(self) -> float:
        """Bytes until the next damage, for damage of a fixed rate."""
        if not self._rate:
            return _NEVER
        if self._rate == 1:
            return 0
        return math.floor(math.log(1 - self._random.random()) / math.log(1 - self._rate))

    def _write(self, buffers: Sequence[Buffer | bytes]) -> int:
        """See `ByteStream.write`; a write ends where a fault begins."""
        written = self._written
        if written >= self._drop_at:
            self._inner.close()
            raise ConnectionResetError(104, f"cut after {written} bytes by drop_after")
        if written >= self._silence_at:
            size = sum(map(len, buffers))  # type: ignore[arg-type]
        elif written == self._damage_at:
            size = self._damage(buffers)
        else:
            room = min(self._drop_at, self._silence_at, self._damage_at) - written
            size = self._inner_write(buffers if room == _NEVER else _front(buffers, int(room)))
        self._written += size
        return size

    def _damage(self, buffers: Sequence[Buffer | bytes]) -> int:
        """Write the next byte with one bit flipped."""
        (first,) = _front(buffers, 1)
        size = self._inner_write([bytes((first[0] ^ 1 << self._random.randrange(8),))])
        if size:
            self._damage_at += 1 + self._gap()
        return size

    def _read_into(self, buffer: memoryview) -> int:
        """See `ByteStream.read_into`; in silence, what comes is lost."""
        if self._written < self._silence_at:
            return self._inner_read(buffer)
        waste = memoryview(bytearray(len(buffer)))
        while self._inner_read(waste):
            pass
        return 0  # the peer has given up

    def await_bytes(self) -> bool:
        """See `ByteStream.await_bytes`."""
        return self._inner.await_bytes()

    def on_readable(self, callback: Callable[[], None]) -> None:
        """See `ByteStream.on_readable`."""
        self._inner.on_readable(callback)

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """See `ByteStream.on_writable`."""
        self._inner.on_writable(callback)

    def end(self) -> None:
        """See `ByteStream.end`; in silence, not even that is heard."""
        if self._written < self._silence_at:
            self._inner.end()

    def close(self) -> None:
        """See `ByteStream.close`."""
        self._inner.close()

    def describe(self) -> str:
        """The peer's address."""
        return self._inner.describe()


def _or_never(position: int | None) -> float:
    return _NEVER if position is None else position


def _front(buffers: Sequence[Buffer | bytes], size: int) -> list[memoryview]:
    """The first `size` bytes of `buffers`, fewer where there are no more."""
    views = []
    for buffer in buffers:
        view = memoryview(buffer)[:size]  # type: ignore[arg-type]
        if len(view):
            views.append(view)
            size -= len(view)
        if not size:
            break
    return views
