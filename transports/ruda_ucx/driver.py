"""A thread that drives a UCX worker while the loop does other things."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Driver"]

#: Milliseconds after which the thread looks at UCX even if nothing woke it.
_PATIENCE = 100


class Driver:
    """Drives `worker`, and calls `turn` on the loop whenever something moved.

    UCX copies without the interpreter lock, so a large payload is on its way while Python runs.
    """

    def __init__(
        self, worker: Any, fd: int, loop: asyncio.AbstractEventLoop, turn: Callable[[], object]
    ) -> None:
        self._worker = worker
        self._fd = fd
        self._loop = loop
        self._turn = turn
        self._woken = False
        self._stopping = False
        self._signal, self._signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="ruda-ucx-progress", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; returns when it has ended, which takes one call of UCX at most."""
        if self._stopping:
            return
        self._stopping = True
        os.write(self._signalled, b"x")
        self._thread.join()
        self._worker = None
        os.close(self._signal)
        os.close(self._signalled)

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._fd, select.POLLIN)
        poller.register(self._signal, select.POLLIN)
        worker = self._worker
        while not self._stopping:
            moved = False
            while worker.progress_once() and not self._stopping:
                moved = True
                self._wake()
            # Not armed: there is an event already.
            if not moved and worker.arm() and poller.poll(_PATIENCE):
                self._wake()

    def _wake(self) -> None:
        if self._woken or self._stopping:
            return
        self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._on_loop)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._stopping = True

    def _on_loop(self) -> None:
        self._woken = False
        self._turn()
