"""A process group for each channel that uses torch's collectives, made when it first does.

torch matches collectives by order in a group, and a group whose call was given up is of no further use. So
every channel has its own, and every epoch of it. They meet in the job's store under a prefix of their own,
apart from the program's groups: the default group is not touched.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from ruda_async.transport import EngineContexts, NativeGroup, in_thread

__all__ = ["Groups", "in_background", "missing", "seconds_left"]

#: Its stores are no part of what it declares for type checkers.
_dist: Any = dist
#: Seconds that a rank waits for the others to join a group; they have agreed to, so this is for the worst.
_LONGEST = 60.0
_SHORTEST = 0.1
#: Seconds between two looks for the other ranks.
_PAUSE = 0.001


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
    threading.Thread(target=release, name="ruda torch group", daemon=True).start()


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
        #: Set when nobody waits for the group any more that this task makes.
        self._given_up: weakref.WeakKeyDictionary[asyncio.Task[Any], threading.Event] = (
            weakref.WeakKeyDictionary()
        )

    async def make(self, group: NativeGroup) -> Any:
        """See `EngineContexts.make`."""
        ranks = "-".join(map(str, group.members))
        prefix = f"{group.channel}/{group.epoch}/{ranks}"
        wait = min(seconds_left(group), timedelta(seconds=_LONGEST))

        given_up = threading.Event()
        making = asyncio.current_task()
        assert making is not None
        self._given_up[making] = given_up

        def start() -> Any:
            store = _dist.PrefixStore(prefix, self._dial(wait))
            _meet(store, group, wait, given_up)
            return self._make(store, group.rank, group.size, wait)

        return await in_thread(start)

    def release(self, channel: int, making: asyncio.Task[Any]) -> None:
        """See `EngineContexts.release`."""
        if (given_up := self._given_up.get(making)) is not None:
            given_up.set()
        making.add_done_callback(self._release)

    def _release(self, making: asyncio.Task[Any]) -> None:
        if not self.failed(making):
            held = [making.result()]
            in_background(held.clear)


def _meet(store: Any, group: NativeGroup, wait: timedelta, given_up: threading.Event) -> None:
    """Wait here, and not in torch, until all ranks make the group: one whose call was given up never does.

    A thread that waits in torch cannot be ended, and aborts the process where that ends meanwhile.

    Raises:
        RuntimeError: they did not come in time, or nobody waits any more.
    """
    until = monotonic() + wait.total_seconds()
    keys = [f"here/{rank}" for rank in range(group.size)]
    store.set(keys[group.rank], "")
    while not store.check(keys):
        if given_up.wait(_PAUSE):
            raise RuntimeError("the call was given up")
        if monotonic() > until:
            raise RuntimeError(f"not all ranks came to the process group within {wait.total_seconds():g} s")
