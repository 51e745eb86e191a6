"""Gloo's collectives: on host memory, on threads of Gloo's own.

torch cannot take back a collective of Gloo that has begun. A call that is given up therefore waits a moment
for it, and else leaves it its memory: Gloo ends it at the call's deadline, or when a peer closes its group.

A thread of Gloo that calls Python when the interpreter is at its end aborts the process. So Gloo is given
nothing to call: a thread of this module looks whether collectives are over. And what Gloo has not finished
when the process ends is never freed, since its destructor waits for Gloo's threads.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import itertools
import threading
from datetime import timedelta
from time import monotonic, sleep
from typing import Any

import numpy as np
import torch.distributed as dist

from ruda_async.transport import NativeCall, NativeGroup, copy_in_turns, ended

from .calls import start, tensor
from .groups import PATIENCE, in_background
from .provider import TorchProvider

__all__ = ["GlooProvider"]

#: Seconds between two looks: this part of the time that the newest call has taken, within bounds.
_PART = 1 / 16
_SHORTEST_PAUSE = 20e-6
_LONGEST_PAUSE = 2e-3


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
        """See `TorchProvider.execute`.

        A reduce-scatter is an all-reduce and a copy, as in torch, whose own does the copy in whoever waits:
        it is never over for one who looks.
        """
        if call.operation != "reduce_scatter":
            await _finished(process_group, group, call, source, work, stop)
            return
        total = np.empty(len(source), np.uint8).data
        await copy_in_turns(total, source)
        await _finished(process_group, group, call._replace(operation="all_reduce"), source, total, stop)
        at = group.rank * len(work)
        await copy_in_turns(work, total[at : at + len(work)])


async def _finished(
    process_group: Any,
    group: NativeGroup,
    call: NativeCall,
    source: memoryview,
    work: memoryview,
    stop: asyncio.Future[None],
) -> None:
    """Run the collective and wait for it, or until the call is given up."""
    loop = asyncio.get_running_loop()
    given, result = tensor(source, call), tensor(work, call)
    collective = _Collective(
        loop, start(process_group, group, call, given, result), process_group, given, result, source, work
    )
    _watch.add(collective)
    await ended(collective.done, stop, collective.abandon)
    error = collective.done.result()
    if error is not None:
        raise RuntimeError(error)


class _Collective:
    """A collective in Gloo's hands and all that must live as long, the group too."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Any, *needed: object) -> None:
        self.began = monotonic()
        self.work = work
        #: What went wrong, once it is over; a text, for an error would have a traceback, and that the group.
        self.done: asyncio.Future[str | None] = loop.create_future()
        self._loop = loop
        self._needed = needed
        self._abandoned = False

    def abandon(self) -> None:
        """The call was given up; Gloo has not finished it."""
        self._abandoned = True

    def end(self) -> None:
        """Gloo has finished it. On any thread."""
        error: str | None = None
        try:
            self.work.wait()
        except BaseException as caught:
            error = str(caught)
        try:
            self._loop.call_soon_threadsafe(self._settle, error)
        except RuntimeError:  # that loop is closed
            self._clear()

    def _settle(self, error: str | None) -> None:
        if self._abandoned:
            in_background(self._clear)
        if not self.done.done():
            self.done.set_result(error)

    def _clear(self) -> None:
        """Let go of it; not on the loop, for it may be the last user of the group, which joins threads."""
        self.work = None
        self._needed = ()


class _Watch:
    """The thread that looks whether collectives are over."""

    def __init__(self) -> None:
        #: Those that Gloo has not finished, among them such as were given up.
        self.held: dict[int, _Collective] = {}
        self._numbers = itertools.count()
        self._begun = threading.Event()
        self._leaving = False
        self._thread: threading.Thread | None = None
        # Whatever is in it when the process ends is never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.held))

    def add(self, collective: _Collective) -> None:
        """Tell it when it is over. On a loop."""
        self.held[next(self._numbers)] = collective
        with _starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ruda gloo", daemon=True)
                self._thread.start()
                atexit.register(self._leave)
        self._begun.set()

    def _run(self) -> None:
        while not self._leaving:
            if not self.held:
                self._begun.wait()
                self._begun.clear()
                continue
            newest = 0.0
            for number, collective in list(self.held.items()):
                if collective.work.is_completed():
                    del self.held[number]
                    collective.end()
                newest = max(newest, collective.began)
            del collective  # it may be the last user of a group, and this thread may sleep for long
            sleep(min(max((monotonic() - newest) * _PART, _SHORTEST_PAUSE), _LONGEST_PAUSE))

    def _leave(self) -> None:
        """The process ends."""
        assert self._thread is not None
        self._leaving = True
        self._begun.set()
        self._thread.join(PATIENCE)


_starting = threading.Lock()
_watch = _Watch()
