"""Flight records on demand: a signal makes a process write those of all its communicators."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

from .flight import write_behind
from .logs import log

__all__ = ["VARIABLE", "dump_on_signal", "from_environment"]

#: Set by `ruda-async run`: asks every rank to answer the signal.
VARIABLE = "RUDA_TRACE_SIGNAL"


def dump_on_signal(number: int | None = None, *, folder: str | Path | None = None) -> bool:
    """Write flight records whenever this process gets a signal. For the main thread.

    A handler that is there already stays: this answers False then, and changes nothing.

    Args:
        number: the signal; SIGUSR2 by default.
        folder: where to; by default each communicator's ``trace_dir``, else the current folder.

    Raises:
        ValueError: called from another thread than the main one.
    """
    number = signal.SIGUSR2 if number is None else number
    if signal.getsignal(number) is not signal.SIG_DFL:
        return False

    def handle(_number: int, _frame: object) -> None:
        _dump_all(None if folder is None else Path(folder))

    signal.signal(number, handle)
    return True


def _dump_all(folder: Path | None) -> None:
    from ..node import live_nodes

    for node in live_nodes():
        snapshot = node.flight.take("asked for by a signal")
        write_behind(snapshot, folder or node.config.trace_dir or Path())


def from_environment() -> None:
    """Do as the launcher asks, where this is the main thread and the program has no handler of its own."""
    if not os.environ.get(VARIABLE) or threading.current_thread() is not threading.main_thread():
        return
    if not dump_on_signal():
        log.debug("SIGUSR2 has a handler already; it will not write flight records")
