"""This library as a contender: awaited on an event loop, or called blocking."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from ..communicator import AsyncCommunicator
from ..errors import ConfigError
from ..sync import Communicator
from .cases import Array, Case, numpy_dtype
from .contender import Data, time_calls
from .loops import LoopThread, Ticker
from .plan import Subject

__all__ = ["AsyncContender", "SyncContender"]


class AsyncContender:
    """Coroutines on one loop; with several in flight, all of them at once, each on its own channel."""

    note = ""

    def __init__(self, subject: Subject, comm: AsyncCommunicator, loop: LoopThread) -> None:
        self.subject = subject
        self._loop = loop
        self._comms: Sequence[AsyncCommunicator] = [comm]
        if subject.in_flight > 1:
            self._comms = loop.run(_channels(comm, subject.in_flight))

    def prepare(self, data: Data) -> None:
        """As `Contender.prepare`."""
        self._case = data.case
        value, outs = self._loop.run(_memory(self._comms, data))
        self._calls = [
            _async_call(comm, data.case, value, out) for comm, out in zip(self._comms, outs, strict=True)
        ]

    def check(self) -> str:
        """As `Contender.check`."""
        return _fault(self._case, self._loop.run(self._once()))

    def block(self, count: int) -> list[float]:
        """As `Contender.block`."""
        return self._loop.run(self._block(count))

    def stall(self, count: int) -> list[float] | None:
        """As `Contender.stall`."""
        return self._loop.run(self._stall(count))

    def close(self) -> None:
        """Nothing: the communicator belongs to the worker."""

    async def _once(self) -> list[Any]:
        return list(await asyncio.gather(*(call() for call in self._calls)))

    async def _block(self, count: int) -> list[float]:
        clock = time.perf_counter
        times = []
        if len(self._calls) > 1:
            calls, share = self._calls, 1 / len(self._calls)
            await asyncio.gather(*(call() for call in calls))
            for _ in range(count):
                start = clock()
                results = await asyncio.gather(*(call() for call in calls))
                times.append((clock() - start) * share)
                del results
            return times
        call = self._calls[0]
        await call()
        for _ in range(count):
            start = clock()
            result = await call()
            times.append(clock() - start)
            del result  # outside of the measured time
        return times

    async def _stall(self, count: int) -> list[float]:
        with Ticker() as ticker:
            await self._block(count)
        return ticker.lateness


class SyncContender:
    """Blocking calls; with several in flight, started on their channels and then waited for."""

    note = ""

    def __init__(self, subject: Subject, comm: Communicator) -> None:
        self.subject = subject
        number = subject.in_flight
        self._comms = [comm] if number == 1 else [comm.channel(f"bench{i}") for i in range(number)]

    def prepare(self, data: Data) -> None:
        """As `Contender.prepare`."""
        self._case = data.case
        value, outs = asyncio.run(_memory(self._comms, data))
        if len(self._comms) == 1:
            self._call = partial(_called, _sync_call(self._comms[0], data.case, value, outs[0]))
        else:
            starts = [
                _started(comm, data.case, value, out) for comm, out in zip(self._comms, outs, strict=True)
            ]
            self._call = partial(_all_at_once, starts)

    def check(self) -> str:
        """As `Contender.check`."""
        return _fault(self._case, self._call())

    def block(self, count: int) -> list[float]:
        """As `Contender.block`."""
        return [seconds / len(self._comms) for seconds in time_calls(self._call, count)]

    def stall(self, count: int) -> list[float] | None:
        """None, but the calls are made as on the other ranks."""
        time_calls(self._call, count)
        return None

    def close(self) -> None:
        """Nothing: the communicator belongs to the worker."""


# ---------------------------------------------------------------------- one call


def _bound(comm: Any, case: Case, value: Array, out: Array | None) -> Callable[[], Any]:
    """The call without arguments; `comm` is asynchronous, blocking, or a blocking one's ``start``."""
    options = {} if out is None else {"out": out}
    match case.operation:
        case "barrier":
            return partial(comm.barrier)
        case "broadcast":
            return partial(comm.broadcast, value, 0, **options)
        case "all_to_all_v":
            return partial(comm.all_to_all_v, value, case.counts[case.rank], **options)
        case name:
            return partial(getattr(comm, name), value, **options)


def _async_call(
    comm: AsyncCommunicator, case: Case, value: Array, out: Array | None
) -> Callable[[], Awaitable[Any]]:
    if case.operation != "send":
        return _bound(comm, case, value, out)
    after, before = _neighbours(case)

    async def ring() -> Any:
        sending = asyncio.ensure_future(comm.send(value, after))
        result = await comm.recv(before, out=out)
        await sending
        return result

    return ring


def _sync_call(comm: Communicator, case: Case, value: Array, out: Array | None) -> Callable[[], Any]:
    if case.operation != "send":
        return _bound(comm, case, value, out)
    after, before = _neighbours(case)

    def ring() -> Any:
        sending = comm.start.send(value, after)
        result = comm.recv(before, out=out)
        sending.wait()
        return result

    return ring


def _called(call: Callable[[], Any]) -> list[Any]:
    return [call()]


def _started(comm: Communicator, case: Case, value: Array, out: Array | None) -> Callable[[], list[Any]]:
    """Start the call; the handles to wait for, the last of which has the result."""
    if case.operation != "send":
        start = _bound(comm.start, case, value, out)
        return lambda: [start()]
    after, before = _neighbours(case)
    return lambda: [comm.start.send(value, after), comm.start.recv(before, out=out)]


def _all_at_once(starts: Sequence[Callable[[], list[Any]]]) -> list[Any]:
    handles = [start() for start in starts]
    return [[work.wait() for work in works][-1] for works in handles]


def _neighbours(case: Case) -> tuple[int, int]:
    """Where a ring sends to and receives from, as in nccl-tests' sendrecv."""
    return (case.rank + 1) % case.world, (case.rank - 1) % case.world


def _fault(case: Case, results: Sequence[Any]) -> str:
    """What is wrong with any of the results of concurrent calls."""
    for result in results:
        if case.operation == "all_to_all_v":
            counts = [sent[case.rank] for sent in case.counts]
            if list(result.receive_counts) != counts:
                return f"receive_counts is {list(result.receive_counts)}, not {counts}"
            result = result.value
        if fault := case.fault(result):
            return fault
    return ""


# ---------------------------------------------------------------------- memory and channels


async def _channels(comm: AsyncCommunicator, number: int) -> list[AsyncCommunicator]:
    return [comm.channel(f"bench{i}") for i in range(number)]


async def _memory(comms: Sequence[Any], data: Data) -> tuple[Array, list[Array | None]]:
    """The input, and for each communicator where results go, or None for fresh results."""
    reuse = data.reuse and data.case.operation != "barrier"
    if not data.empty:
        first = [data.result] if reuse else [None]
        return data.value, [*first, *(data.case.result() if reuse else None for _ in comms[1:])]
    value = await _empty(comms[0], data.value.shape, data)
    value[...] = data.value
    return value, [await _empty(comm, data.result.shape, data) if reuse else None for comm in comms]


async def _empty(comm: Any, shape: tuple[int, ...], data: Data) -> Array:
    if not hasattr(comm, "empty"):
        raise ConfigError("empty=True asks for comm.empty(), which this communicator lacks; leave it out")
    array = comm.empty(shape, numpy_dtype(data.case.dtype))
    result: Array = await array if inspect.isawaitable(array) else array
    return result
