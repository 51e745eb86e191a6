"""Ctrl-C, kept from striking where it would leave the state of an event loop broken."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    # The module that `signal` wraps: the wrapper's enums would cost more than a small collective.
    import _signal  # type: ignore[import-not-found]
except ImportError:  # pragma: no cover
    import signal as _signal

__all__ = ["Interrupt", "deferred_interrupt"]

_SIGINT = int(_signal.SIGINT)
_DEFAULT_HANDLER = _signal.default_int_handler
_MAIN_THREAD = threading.main_thread().ident


class Interrupt:
    """An interrupt that waits until the loop's state is sound."""

    def __init__(self) -> None:
        self.pending = False
        self._act: Any = None

    def on_interrupt(self, act: Any) -> None:
        """What to do at once when the interrupt comes (or has come)."""
        self._act = act
        if self.pending:
            act()

    def handle(self, *_: object) -> None:
        """The signal handler."""
        if self.pending:
            raise KeyboardInterrupt  # the second one does not wait
        self.pending = True
        if self._act is not None:
            self._act()


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """In the main thread, keep Ctrl-C from striking in the middle of the loop's work.

    As `asyncio.Runner` does, and like it only where the program has no handler of its own.
    """
    interrupt = Interrupt()
    if threading.get_ident() != _MAIN_THREAD or _signal.getsignal(_SIGINT) is not _DEFAULT_HANDLER:
        yield interrupt
        return
    _signal.signal(_SIGINT, interrupt.handle)
    try:
        yield interrupt
    finally:
        _signal.signal(_SIGINT, _DEFAULT_HANDLER)
    if interrupt.pending:
        raise KeyboardInterrupt
