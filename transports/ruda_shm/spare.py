"""A file descriptor kept for the moment in which there is no other."""

from __future__ import annotations

import contextlib
import os
from types import TracebackType

__all__ = ["Spare"]


class Spare:
    """Descriptors pass through this process for an instant only; `with` gives one of them its place."""

    def __init__(self) -> None:
        self._held: int | None = None
        self._take()

    def _take(self) -> None:
        with contextlib.suppress(OSError):  # somebody else was faster: do without
            self._held = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give it back for good."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def __enter__(self) -> None:
        self.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take()
