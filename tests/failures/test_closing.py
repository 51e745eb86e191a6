"""Closing beside a process that stands still, and while an exception is on its way."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import numpy as np
import pytest
from support import BETWEEN_PROCESSES, fresh_url, outcome, running_programs

import ruda_async
from ruda_async import AsyncCommunicator, CollectiveTimeoutError, CommunicatorClosedError, sync

PEER = """
import sys
import ruda_async
with ruda_async.sync.connect(sys.argv[1], rank=1, world_size=2, timeout=60) as comm:
    comm.barrier()
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def beside_one_that_stands_still(url: str) -> Iterator[Callable[[], None]]:
    """Rank 1, a process, that stands still once the function that is given is called."""
    with running_programs(PEER, url, [1]) as (peer,):

        def stop() -> None:
            assert peer.stdout is not None
            assert peer.stdout.readline() == "ready\n"
            peer.send_signal(signal.SIGSTOP)

        yield stop


async def in_the_end(comm: AsyncCommunicator) -> None:
    await comm.close()


async def twice_at_once(comm: AsyncCommunicator) -> None:
    await asyncio.gather(comm.close(), comm.close())
    await comm.close()


async def while_unwinding(comm: AsyncCommunicator) -> None:
    async def fails() -> None:
        try:
            raise ZeroDivisionError
        finally:
            await comm.close()

    error = await outcome(fails())
    assert isinstance(error, ZeroDivisionError)
    assert error.__context__ is None


async def in_an_except_clause(comm: AsyncCommunicator) -> None:
    async def fails() -> None:
        try:
            await comm.channel("other").barrier(timeout=0.05)
        except CollectiveTimeoutError:
            await comm.close()
            raise

    assert isinstance(await outcome(fails()), CollectiveTimeoutError)


async def by_its_context(comm: AsyncCommunicator) -> None:
    with pytest.raises(ZeroDivisionError):
        async with comm:
            raise ZeroDivisionError


async def in_a_task_that_is_cancelled(comm: AsyncCommunicator) -> None:
    async def task() -> None:
        try:
            await comm.channel("other").barrier()
        finally:
            await comm.close()

    running = asyncio.ensure_future(task())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait((running,))
    assert running.cancelled()


WAYS = [
    *(in_the_end, twice_at_once, while_unwinding, in_an_except_clause, by_its_context),
    in_a_task_that_is_cancelled,
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
async def test_a_peer_that_stands_still(
    scheme: str, way: Callable[[AsyncCommunicator], Awaitable[None]]
) -> None:
    """Whatever is in flight ends, and no longer than a few seconds are waited for a farewell."""
    url = f"{fresh_url(scheme)}?linger=0.3"
    with beside_one_that_stands_still(url) as stop:
        comm = await ruda_async.connect(url, rank=0, world_size=2, timeout=300)
        await comm.barrier()
        await asyncio.to_thread(stop)
        calls: list[Awaitable[Any]] = [comm.send(np.ones(8_000_000), 1), comm.recv(1, tag=1)]
        calls += [comm.send(np.ones(5_000), 1, tag=2) for _ in range(400)]  # more than any buffer takes
        calls.append(comm.all_reduce(np.ones(1_000_000)))
        flying = [asyncio.ensure_future(call) for call in calls]
        for _ in range(100):  # so that what fills up is full
            await asyncio.sleep(0)
        started = monotonic()
        await way(comm)
        assert monotonic() - started < 5
        ends = await asyncio.wait_for(asyncio.gather(*flying, return_exceptions=True), 5)
        assert {type(end) for end in ends} <= {CommunicatorClosedError, type(None)}
        assert isinstance(ends[0], CommunicatorClosedError)
        assert isinstance(ends[-1], CommunicatorClosedError)
        assert comm.closed


@pytest.mark.timeout(60)
@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_a_blocking_communicator_beside_it(scheme: str) -> None:
    url = f"{fresh_url(scheme)}?linger=0.3"
    with beside_one_that_stands_still(url) as stop:
        comm = sync.connect(url, rank=0, world_size=2, timeout=300)
        comm.barrier()
        stop()
        work = comm.start.send(np.ones(8_000_000), 1)
        with pytest.raises(CollectiveTimeoutError):
            comm.all_reduce(np.ones(1_000_000), timeout=0.1)
        started = monotonic()
        with pytest.raises(ZeroDivisionError), comm:
            raise ZeroDivisionError
        assert monotonic() - started < 5
        with pytest.raises(CommunicatorClosedError):
            work.wait(5)
        comm.close()  # harmless
