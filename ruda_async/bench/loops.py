"""Event loops that run all the time, each in a thread, and a ticker that says when one is held up.

A loop that only ran during its own blocks would miss heartbeats meanwhile.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["PERIOD", "LoopThread", "Ticker"]

R = TypeVar("R")

#: Seconds between a ticker's ticks.
PERIOD = 0.001


class LoopThread:
    """An event loop of one kind in a thread of its own.

    Args:
        mode: ``"async"`` for asyncio's, ``"uvloop"`` for uvloop's.
    """

    def __init__(self, mode: str) -> None:
        if mode == "uvloop":
            import uvloop

            self._loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        else:
            self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=f"bench {mode} loop", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def run(self, call: Coroutine[Any, Any, R]) -> R:
        """Run `call` there and wait for it."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def stop(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Ticker:
    """Asks the running loop to be called every `PERIOD` seconds and notes how late it is.

    Ticks that fell due while the loop was held up count too, each with its own lateness: without them
    one long stall would be one sample among many good ones (G. Tene's "coordinated omission").
    """

    def __init__(self) -> None:
        self.lateness: list[float] = []
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Ticker:
        self._schedule()
        return self

    def __exit__(self, *error: object) -> None:
        self._handle.cancel()
        self._note()  # the last tick, if it is overdue

    def _schedule(self) -> None:
        # Not loop.time(): uvloop keeps that in whole milliseconds.
        self._due = time.perf_counter() + PERIOD
        self._handle = self._loop.call_later(PERIOD, self._tick)

    def _tick(self) -> None:
        if not self._note():
            self.lateness.append(0.0)  # uvloop rounds delays, and may be early
        self._schedule()

    def _note(self) -> bool:
        late = time.perf_counter() - self._due
        noted = late >= 0
        while late >= 0:
            self.lateness.append(late)
            late -= PERIOD
        return noted
