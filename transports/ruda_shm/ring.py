"""A ring of bytes in shared memory: one process writes, one reads, neither takes a lock.

The counters of bytes written and bytes read only grow; each is written by one side. Each side has a
flag by which it asks for a doorbell when it has to wait. A side that is about to wait raises its flag and
then looks once more; the other side moves its counter and then looks at the flag. With a full memory
barrier between the two steps, at least one of them sees the other, and no wake-up is lost.

Layout, each on a cache line of its own: written, reader waits, read, writer waits; then the bytes. Beside
the reader's flag lies another for whoever waits for something else that the writer may write.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

__all__ = ["HEADER_BYTES", "Ring"]

HEADER_BYTES = 256
_WRITTEN, _READER_WAITS, _READ, _WRITER_WAITS = 0, 8, 16, 24
_READER_WATCHES = 9

#: Taking a free lock is an atomic read-modify-write: on x86-64 a full memory barrier, elsewhere at least
#: an acquire and a release, and about the cheapest that Python code can have.
_barrier = threading.Lock()


class Ring:
    """One direction of a pair. `memory` is `HEADER_BYTES` and then the ring's capacity.

    Capacities are powers of two, so positions are masked, not divided.
    """

    __slots__ = ("_capacity", "_counters", "_mask", "_mine", "_space")

    def __init__(self, memory: memoryview) -> None:
        self._counters = memory[:HEADER_BYTES].cast("Q")
        self._space = memory[HEADER_BYTES:]
        self._capacity = len(self._space)
        self._mask = self._capacity - 1
        if self._capacity & self._mask:
            raise ValueError(f"a ring's capacity is a power of two, not {self._capacity}")
        #: The counter that this side alone writes, so that it need not be read from shared memory.
        self._mine = 0

    # ------------------------------------------------------------------ the writer's side

    def write(self, buffers: Sequence[Any]) -> int:
        """Copy in what fits; how many bytes. 0 means full, and that the reader was asked for a doorbell."""
        counters, space, capacity, mask = self._counters, self._space, self._capacity, self._mask
        written = self._mine
        free = capacity - (written - counters[_READ])
        if not free:
            counters[_WRITER_WAITS] = 1
            with _barrier:
                free = capacity - (written - counters[_READ])
            if not free:
                return 0
            counters[_WRITER_WAITS] = 0
        start = written
        for buffer in buffers:
            size = len(buffer)
            if size > free:
                buffer = memoryview(buffer)[:free]
                size = free
            at = written & mask
            end = at + size
            if end <= capacity:
                space[at:end] = buffer
            else:
                first = capacity - at
                view = memoryview(buffer)
                space[at:] = view[:first]
                space[: size - first] = view[first:]
            written += size
            free -= size
            if not free:
                break
        with _barrier:
            counters[_WRITTEN] = self._mine = written
        return written - start

    def reader_waits(self) -> bool:
        """After a write: whether the reader wants a doorbell; asked once per wait."""
        with _barrier:
            if not self._counters[_READER_WAITS]:
                return False
        self._counters[_READER_WAITS] = 0
        return True

    def reader_watches(self) -> bool:
        """After a write elsewhere: whether the reader wants a doorbell for that; asked once per wait."""
        with _barrier:
            if not self._counters[_READER_WATCHES]:
                return False
        self._counters[_READER_WATCHES] = 0
        return True

    # ------------------------------------------------------------------ the reader's side

    def read_into(self, buffer: memoryview) -> int:
        """Copy out what is there, up to the buffer's length; how many bytes."""
        counters = self._counters
        read = self._mine
        size = counters[_WRITTEN] - read
        if not size:
            return 0
        if size > len(buffer):
            size = len(buffer)
        space, capacity = self._space, self._capacity
        at = read & self._mask
        end = at + size
        if end <= capacity:
            buffer[:size] = space[at:end]
        else:
            first = capacity - at
            buffer[:first] = space[at:]
            buffer[first:size] = space[: size - first]
        with _barrier:
            counters[_READ] = self._mine = read + size
        return size

    def spin(self, seconds: float) -> bool:
        """Wait a moment for bytes, with the doorbell switched off; whether there are some."""
        counters, read = self._counters, self._mine
        if counters[_WRITTEN] != read:
            return True
        if not seconds:
            return False
        counters[_READER_WAITS] = 0
        end = perf_counter() + seconds
        while counters[_WRITTEN] == read:
            if perf_counter() > end:
                return not self.wait_as_reader()
        return True

    def filled(self) -> bool:
        """Whether there is something to read."""
        return self._counters[_WRITTEN] != self._mine

    def wait_as_reader(self) -> bool:
        """Ask for a doorbell at the next write; False where something came meanwhile."""
        self._counters[_READER_WAITS] = 1
        with _barrier:
            if self._counters[_WRITTEN] == self._mine:
                return True
        self._counters[_READER_WAITS] = 0
        return False

    def watch(self, ready: Callable[[], bool]) -> bool:
        """Ask for a doorbell at the writer's next signal; True where `ready` holds meanwhile."""
        self._counters[_READER_WATCHES] = 1
        with _barrier:
            pass
        return ready()

    def writer_waits(self) -> bool:
        """After a read: whether the writer wants a doorbell; asked once per wait."""
        if not self._counters[_WRITER_WAITS]:
            return False
        self._counters[_WRITER_WAITS] = 0
        return True

    def release(self) -> None:
        """Let go of the memory."""
        self._counters.release()
        self._space.release()
