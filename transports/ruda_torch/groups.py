"""A process group for each channel that uses torch's collectives, made when it first does.

torch matches collectives by order in a group, and a group whose call was given up is of no further use. So
every channel has its own, and every epoch of it. They meet in the job's store under a prefix of their own,
apart from the program's groups: the default group is not touched.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import torch
import torch.distributed as dist

from ruda_async.transport import EngineContexts, NativeGroup, in_thread

__all__ = ["PATIENCE", "Groups", "in_background", "inside", "meet", "missing", "seconds_left"]

#: Its stores are no part of what it declares for type checkers.
_dist: Any = dist
#: Seconds that a rank waits for the others to join a group; they have agreed to, so this is for the worst.
_LONGEST = 60.0
_SHORTEST = 0.1
#: Seconds between two looks for the other ranks.
_PAUSE = 0.001
#: Seconds that the end of the process waits for threads that are in torch.
PATIENCE = 5.0


def missing(backend: str) -> str | None:
    """What torch lacks for `backend`, or None."""
    if not dist.is_available() or not getattr(dist, f"is_{backend}_available")():
        return f"this torch is built without {backend}; install one that has it (pip install torch)"
    if backend == "nccl" and not torch.cuda.is_available():
        return "torch finds no GPU that it can use; use torch+gloo, or tcp"
    return None


def seconds_left(group: NativeGroup) -> timedelta:
    """What torch may take, given the call's deadline."""
    return timedelta(seconds=max(group.deadline - monotonic(), _SHORTEST))


def in_background(release: Callable[[], object]) -> None:
    """Do elsewhere what may take a while, such as to let go of a group, which joins threads."""

    def run() -> None:
        with inside():
            release()

    threading.Thread(target=run, name="ruda torch group", daemon=True).start()


@contextmanager
def inside() -> Iterator[None]:
    """Around what may keep a thread in torch for a moment; the end of the process waits for it.

    One that came back from there when the interpreter is at its end would abort the process.
    """
    here = object()
    with _changed:
        _inside.add(here)
    try:
        yield
    finally:
        with _changed:
            _inside.remove(here)
            _changed.notify_all()


_inside: set[object] = set()
_changed = threading.Condition()


@atexit.register
def _leave() -> None:
    with _changed:
        _changed.wait_for(lambda: not _inside, PATIENCE)


class Groups(EngineContexts[Any]):
    """The process groups of one transport.

    Args:
        dial: opens the job's store, where ranks meet, for a group; it may take so long at most.
        make: a process group of ``(store, rank, size, timeout)``.
    """

    def __init__(
        self, dial: Callable[[timedelta], Any], make: Callable[[Any, int, int, timedelta], Any]
    ) -> None:
        super().__init__()
        self._dial = dial
        self._make = make

    async def make(self, group: NativeGroup) -> Any:
        """See `EngineContexts.make`."""
        ranks = "-".join(map(str, group.members))
        prefix = f"{group.channel}/{group.epoch}/{ranks}"
        wait = min(seconds_left(group), timedelta(seconds=_LONGEST))

        making = asyncio.current_task()
        assert making is not None

        def given_up() -> bool:
            return making.done() or not self.holds(group.channel, making)

        def start() -> Any:
            store = _dist.PrefixStore(prefix, self._dial(wait))
            store.set(f"here/{group.rank}", "")
            if not meet(store, (f"here/{rank}" for rank in range(group.size)), wait, given_up):
                raise RuntimeError(
                    f"not all ranks came to the process group within {wait.total_seconds():g} s"
                )
            with inside():
                return self._make(store, group.rank, group.size, wait)

        return await in_thread(start)

    def release(self, channel: int, making: asyncio.Task[Any]) -> None:
        """See `EngineContexts.release`."""
        making.add_done_callback(self._release)

    def _release(self, making: asyncio.Task[Any]) -> None:
        if not self.failed(making):
            held = [making.result()]
            in_background(held.clear)


def meet(store: Any, keys: Iterable[str], wait: timedelta, given_up: Callable[[], bool]) -> bool:
    """Wait here, and not in torch, until `store` has all the keys: the rank that sets one may never come.

    A thread that waits in torch cannot be ended, and may abort the process where that ends meanwhile.

    Returns:
        Whether they came in time.

    Raises:
        RuntimeError: nobody waits any more.
    """
    until = monotonic() + wait.total_seconds()
    wanted = list(keys)
    while not store.check(wanted):
        if given_up():
            raise RuntimeError("the call was given up")
        if monotonic() > until:
            return False
        sleep(_PAUSE)
    return True
