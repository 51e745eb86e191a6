"""Gloo's collectives: on host memory, on threads of Gloo's own.

torch cannot take back a collective of Gloo that has begun. A call that is given up therefore waits a moment
for it, and else leaves it its memory: Gloo ends it at the call's deadline.
"""

from __future__ import annotations

import asyncio
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

    def settle(error: BaseException | None) -> None:
        _held.discard(handle)
        if handle.abandoned:
            in_background(handle.clear)
        if not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
                done.exception()

    def over(wait: Callable[[], object]) -> None:
        error: BaseException | None = None
        try:
            wait()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:
            pass  # that loop is closed

    handle = _Handle(
        start(process_group, group, call, tensor(source, call), tensor(work, call)),
        process_group,
        source,
        work,
    )
    _held.add(handle)
    try:
        handle.work.get_future().add_done_callback(lambda future: over(future.value))
    except RuntimeError:  # not every collective of Gloo has a future
        in_background(lambda: over(handle.work.wait))
    await ended(done, stop, handle.abandon)


class _Handle:
    """A collective in Gloo's hands and all that must live as long, the group too."""

    def __init__(self, work: Any, *needed: object) -> None:
        self.work = work
        self.abandoned = False
        self._needed = needed

    def abandon(self) -> None:
        """The call was given up; Gloo has not finished it."""
        self.abandoned = True

    def clear(self) -> None:
        """Let go of it; not on a thread of the group, which its destructor joins."""
        self.work = None
        self._needed = ()


#: Collectives that Gloo has not finished, among them those that were given up.
_held: set[_Handle] = set()
