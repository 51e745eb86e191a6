"""Gloo's collectives: on host memory, on threads of Gloo's own.

torch cannot take back a collective of Gloo that has begun. A call that is given up therefore waits a moment
for it, and else leaves it its memory: Gloo ends it at the call's deadline.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ruda_async.transport import NativeCall, NativeGroup, ended

from .calls import start, tensor
from .groups import in_background
from .provider import TorchProvider

__all__ = ["GlooProvider"]


class GlooProvider(TorchProvider):
    """See `TorchProvider`."""

    name = "gloo"
    virtue = "many bytes: Gloo moves them on threads of its own"

    def make(self, store: Any, rank: int, size: int, wait: timedelta) -> Any:
        """See `TorchProvider.make`."""
        return dist.ProcessGroupGloo(store, rank, size, wait)

    async def execute(
        self,
        process_group: Any,
        group: NativeGroup,
        call: NativeCall,
        source: memoryview,
        work: memoryview,
        stop: asyncio.Future[None],
    ) -> None:
        """See `TorchProvider.execute`."""
        await finished(process_group, group, call, source, work, stop)


async def finished(
    process_group: Any,
    group: NativeGroup,
    call: NativeCall,
    source: memoryview,
    work: memoryview,
    stop: asyncio.Future[None],
) -> None:
    """Run the collective and wait for it, or until the call is given up."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    handle = _Handle(
        start(process_group, group, call, tensor(source, call), tensor(work, call)),
        done,
        process_group,
        source,
        work,
    )
    number = next(_numbers)
    _held[number] = handle
    tell = _teller(loop, number)
    try:
        handle.work.get_future().add_done_callback(lambda future: tell(future.value))
    except RuntimeError:  # not every collective of Gloo has a future
        wait = handle.work.wait
        in_background(lambda: tell(wait))
    await ended(done, stop, handle.abandon)


def _teller(loop: asyncio.AbstractEventLoop, number: int) -> Callable[[Callable[[], object]], None]:
    """What settles a collective, once called with what waits for its outcome.

    A thread of the group calls it, and lets go of it at some later time. So it holds, by whatever path, no
    reference to the group: with the last one that thread would have to join itself, which ends the process.
    """

    def tell(wait: Callable[[], object]) -> None:
        error: str | None = None
        try:
            wait()
        except BaseException as caught:
            error = str(caught)  # not itself: tracebacks have frames, and those the group
        try:
            loop.call_soon_threadsafe(_settle, number, error)
        except RuntimeError:
            pass  # that loop is closed

    return tell


def _settle(number: int, error: str | None) -> None:
    """A collective is over."""
    handle = _held.pop(number)
    if handle.abandoned:
        in_background(handle.clear)
    if not handle.done.done():
        if error is None:
            handle.done.set_result(None)
        else:
            handle.done.set_exception(RuntimeError(error))
            handle.done.exception()


class _Handle:
    """A collective in Gloo's hands and all that must live as long, the group too."""

    def __init__(self, work: Any, done: asyncio.Future[None], *needed: object) -> None:
        self.work = work
        self.done = done
        self.abandoned = False
        self._needed = needed

    def abandon(self) -> None:
        """The call was given up; Gloo has not finished it."""
        self.abandoned = True

    def clear(self) -> None:
        """Let go of it; not on a thread of the group, which its destructor joins."""
        self.work = None
        self._needed = ()


_numbers = itertools.count()
#: Collectives that Gloo has not finished, by number, among them those that were given up.
_held: dict[int, _Handle] = {}
