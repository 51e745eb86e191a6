"""What ranks of `spawn` run: functions of a module that fresh processes import, quickly."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

import ruda_async
from ruda_async import PeerLostError, RudaError


def rank() -> int:
    return int(os.environ["RUDA_RANK"])


def variables(*names: str) -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in names)


def add_up(start: float) -> tuple[int, float]:
    import numpy as np

    with ruda_async.sync.connect(timeout=20) as comm:
        return comm.rank, comm.all_reduce_sum(np.array([start + comm.rank])).item()


async def add_up_async(start: float) -> tuple[int, float]:
    import numpy as np

    async with ruda_async.connect(timeout=20) as comm:
        return comm.rank, (await comm.all_reduce_sum(np.array([start + comm.rank]))).item()


def connect_twice() -> list[float]:
    import numpy as np

    found = []
    for _ in range(2):
        with ruda_async.sync.connect(timeout=20) as comm:
            found.append(comm.all_reduce_sum(np.ones(1)).item())
    return found


def fail_on(failing: int, marker: str) -> None:
    """One rank raises; the others would wait for ever."""
    if rank() == failing:
        raise LookupError(f"{marker} on rank {failing}")
    threading.Event().wait()


def fail_among_peers() -> None:
    """One rank raises within a job, which its peers notice as a loss."""
    with ruda_async.sync.connect(timeout=20) as comm:
        comm.barrier()
        if comm.rank == 1:
            raise LookupError("the reason")
        comm.barrier()


def blame(other: int) -> None:
    if rank() == 0:
        raise PeerLostError("rank 1 is lost", rank=other)
    raise LookupError("the reason")


def die(failing: int) -> None:
    if rank() == failing:
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def die_with_a_forked_child(file: str) -> None:
    """The child keeps the rank's descriptors open after its death."""
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    with open(file, "w") as out:
        out.write(str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def leave(code: int) -> None:
    sys.exit(code)


class Picky(Exception):
    """Cannot be unpickled: its arguments are not what it was made with."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def raise_picky() -> None:
    raise Picky(1, 2)


def raise_wordless() -> None:
    class Wordless(Exception):
        def __str__(self) -> str:
            raise ValueError

    raise Wordless


def return_unpicklable() -> Any:
    return threading.Lock()


def raise_ruda() -> None:
    raise RudaError("mine", rank=rank())


def announce_and_wait() -> None:
    """Print this process's number, and wait for ever."""
    os.write(1, b"%d\n" % os.getpid())
    threading.Event().wait()
