"""Requests, the queue they wait in, and the batches that are made of them."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import NamedTuple

import numpy as np

__all__ = ["Batcher", "RefusedError", "Slice", "Work"]

#: Bounds of what a client is told to wait, in seconds.
_SHORTEST_WAIT, _LONGEST_WAIT = 1, 30


class RefusedError(Exception):
    """A request that is not answered with scores.

    Attributes:
        status: of HTTP.
        code: the reason in one word, for programs.
        retry_after: seconds, where trying again later may help; else None.
    """

    def __init__(self, status: int, code: str, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.retry_after = retry_after


class Work:
    """One request: rows that are answered in parts, as their batches finish.

    Attributes:
        pixels: float32 ``[n, 64]``.
        over: whether nobody waits for further parts.
    """

    def __init__(self, pixels: np.ndarray, seconds: float) -> None:
        self.pixels = pixels
        self.over = False
        self.started = monotonic()
        self.on_cancel: Callable[[Work], None] = lambda work: None
        self._seconds = seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._parts: asyncio.Queue[tuple[int, np.ndarray] | RefusedError] = asyncio.Queue()
        self._missing = len(pixels)

    def deliver(self, start: int, scores: np.ndarray) -> None:
        """The scores ``[m, 10]`` of the rows from `start` on."""
        if not self.over:
            self._parts.put_nowait((start, scores))

    def fail(self, error: RefusedError) -> None:
        """End the request with an error; the first one counts."""
        if not self.over:
            self.over = True
            self._parts.put_nowait(error)
            self.on_cancel(self)

    def cancel(self) -> None:
        """Nobody waits any more. Harmless when all has been answered."""
        if not self.over:
            self.over = True
            self.on_cancel(self)

    async def parts(self) -> AsyncIterator[tuple[int, np.ndarray]]:
        """``(first row, scores)`` as they come, until all rows are answered.

        Raises:
            RefusedError: something failed, or the request took too long.
        """
        while self._missing:
            try:
                async with asyncio.timeout_at(self._deadline):
                    part = await self._parts.get()
            except TimeoutError:
                self.cancel()
                raise RefusedError(
                    504, "timeout", f"not answered within {self._seconds:g} s", _SHORTEST_WAIT
                ) from None
            if isinstance(part, RefusedError):
                raise part
            self._missing -= len(part[1])
            if not self._missing:
                self.over = True
            yield part


class Slice(NamedTuple):
    """The rows ``start … stop-1`` of a request, in one batch.

    Attributes:
        tries: batches with these rows that failed.
    """

    work: Work
    start: int
    stop: int
    tries: int = 0

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Batcher:
    """A bounded queue of rows, given out in batches.

    Attributes:
        rows: how many wait.
    """

    def __init__(self, max_batch: int, max_queue: int, linger: float) -> None:
        self.rows = 0
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._linger = linger
        self._queue: deque[Slice] = deque()
        self._changed = asyncio.Event()
        #: Rows a second that were answered lately; 0 until some were.
        self._rate = 0.0
        self._rate_at = monotonic()
        self._answered = 0

    def submit(self, work: Work) -> None:
        """Let a request wait for its batches.

        Raises:
            RefusedError: the queue is full.
        """
        count = len(work.pixels)
        if self.rows + count > self._max_queue:
            raise RefusedError(
                429, "overloaded", f"{self.rows} rows wait already; try again later", self.retry_after()
            )
        self._queue.append(Slice(work, 0, count))
        self.rows += count
        self._changed.set()

    def put_back(self, slices: list[Slice]) -> None:
        """Rows of a batch that failed are the next to be tried again."""
        for piece in reversed(slices):
            if not piece.work.over:
                self._queue.appendleft(piece)
                self.rows += piece.rows
        self._changed.set()

    def drop(self, work: Work) -> None:
        """Forget what waits of a request."""
        kept = [piece for piece in self._queue if piece.work is not work]
        if len(kept) < len(self._queue):
            self._queue = deque(kept)
            self.rows = sum(piece.rows for piece in kept)

    def fail_all(self, error: RefusedError) -> None:
        """End everything that waits."""
        for piece in list(self._queue):
            piece.work.fail(error)

    async def next(self) -> list[Slice]:
        """The next batch, of at least one row. One that is not full waits a moment for more rows."""
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            until = self._queue[0].work.started + self._linger
            while self._queue and self.rows < self._max_batch and (left := until - monotonic()) > 0:
                self._changed.clear()
                try:
                    async with asyncio.timeout(left):
                        await self._changed.wait()
                except TimeoutError:
                    break
            if self._queue:  # else those that waited have left
                return self._take()

    def _take(self) -> list[Slice]:
        room = self._max_batch
        batch: list[Slice] = []
        while room and self._queue:
            piece = self._queue.popleft()
            if piece.rows > room:
                self._queue.appendleft(piece._replace(start=piece.start + room))
                piece = piece._replace(stop=piece.start + room)
            batch.append(piece)
            room -= piece.rows
            self.rows -= piece.rows
        return batch

    def answered(self, rows: int) -> None:
        """So many rows have been answered; for `retry_after`."""
        self._answered += rows
        elapsed = monotonic() - self._rate_at
        if elapsed > 0.5:
            rate = self._answered / elapsed
            self._rate = rate if not self._rate else 0.5 * (self._rate + rate)
            self._answered, self._rate_at = 0, monotonic()

    def retry_after(self) -> int:
        """In how many seconds what waits now should be answered."""
        wait = math.ceil(self.rows / self._rate) if self._rate else _SHORTEST_WAIT
        return min(max(wait, _SHORTEST_WAIT), _LONGEST_WAIT)
