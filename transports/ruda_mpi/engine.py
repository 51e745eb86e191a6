"""MPI itself: whether it is here, and what outlives the communicators that started it."""

from __future__ import annotations

import atexit
import ctypes
import errno
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from ruda_async.transport import TransportUnavailableError, how_to_install

__all__ = ["alive", "as_os_error", "keep", "keep_requests", "purge", "unavailable", "world"]

#: The MPI library too: a machine without a cluster's own has none.
_INSTALL = f"{how_to_install('mpi', 'mpich')} (or mpi4py alone, beside an MPI library that is here)"


def unavailable() -> str | None:
    """One line that says what is missing, or None. MPI is not loaded for that: loading it starts it."""
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpi4py is not installed; {_INSTALL}"
    return _trouble() if "mpi4py.MPI" in sys.modules else None


def _trouble() -> str | None:
    """What keeps MPI from being used, found by loading it; or None."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        return f"MPI cannot be loaded: {str(error).splitlines()[0] if str(error) else error!r}; {_INSTALL}"
    if MPI.Is_finalized():
        return "MPI was finalized in this process; connect before that"
    if not MPI.Is_initialized():
        return "MPI is not initialised; leave mpi4py.rc.initialize on, or call MPI.Init_thread() first"
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return (
            "MPI does not let several threads call it; leave mpi4py.rc.thread_level at 'multiple', and use "
            "an MPI that was built for it"
        )
    return None


def world() -> Any:
    """``MPI.COMM_WORLD``.

    Raises:
        TransportUnavailableError: MPI cannot be used here.
    """
    reason = unavailable() or _trouble()
    if reason is not None:
        raise TransportUnavailableError(f"mpi: {reason}")
    from mpi4py import MPI

    return MPI.COMM_WORLD


def as_os_error(error: Exception) -> OSError:
    """An MPI error about a peer, as the links know errors."""
    return OSError(errno.ECONNRESET, f"MPI says: {str(error).splitlines()[0]}")


#: Whether MPI has let go of something; may raise MPI's errors.
Test = Callable[[], bool]

#: Streams whose memory MPI has, until they are closed and drained.
alive: set[Any] = set()

_lock = threading.Lock()
_kept: list[Test] = []


def keep(test: Test) -> None:
    """Keep what `test` is about until it says that MPI has let go of it.

    MPI still reads and writes the memory of requests that were given up, and messages that nobody has
    received yet would meet the next communicator if theirs were freed.
    """
    with _lock:
        _kept.append(test)


def keep_requests(pending: Iterable[tuple[Any, Any]]) -> None:
    """Keep requests and their memory until MPI has finished them."""
    left = [pair for pair in pending if not _over(pair[0].Test)]
    if not left:
        return

    def test() -> bool:
        left[:] = [pair for pair in left if not pair[0].Test()]
        return not left

    keep(test)


def purge() -> None:
    """Release what MPI has let go of meanwhile."""
    with _lock:
        _kept[:] = [test for test in _kept if not _over(test)]


def _over(test: Test) -> bool:
    from mpi4py import MPI

    try:
        return bool(test())
    except MPI.Exception:
        return True  # its peer is gone


_home = os.getpid()


@atexit.register
def _outlive_python() -> None:
    """MPI is finalized after the interpreter, and may write to memory that is still lent to it until then.

    What was never closed is hung up: no connection ends with the process by which the peers would notice.
    """
    if (_kept or alive) and os.getpid() == _home:
        if _trouble() is None:
            for stream in list(alive):
                stream.hang_up()
            purge()
        for lent in (_kept, alive):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(lent))
