"""A file descriptor kept for the moment in which there is no other."""

from __future__ import annotations

import contextlib
import os
import threading
from types import TracebackType

__all__ = ["Spare"]


class Spare:
    """Descriptors pass through this process for an instant only; `with` gives one of them its place.

    Any thread may enter, one at a time: memory is made where `empty` is called, and news of a peer's are
    read by the loop.
    """

    def __init__(self) -> None:
        self._held: int | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._take()

    def _take(self) -> None:
        if self._held is not None or self._closed:
            return
        with contextlib.suppress(OSError):  # somebody else was faster: do without
            self._held = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give it back for good."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._release()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take()
        self._lock.release()
