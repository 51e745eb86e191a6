"""The pages of large results are found by another thread than the event loop's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from support import SCHEMES, fresh_url, outcome, run_ranks

from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    PeerLostError,
    fresh,
)
from ruda_async.tensors import pool

#: Elements of float32.
COUNT = 5_300_000


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The thread that touched each piece, and how long it was; nothing is left of earlier tests."""
    monkeypatch.setattr(pool, "_pool", pool.Pool())
    calls: list[tuple[int, int]] = []
    touch = fresh.touch

    def record(block: Any) -> None:
        calls.append((threading.get_ident(), len(block)))
        touch(block)

    monkeypatch.setattr(fresh, "touch", record)
    return calls


CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(COUNT, np.float32)),
    "all_gather_v": lambda comm: comm.all_gather_v(np.ones(COUNT // 2, np.float32)),
    "send_recv": lambda comm: comm.send(np.ones(COUNT, np.float32), 1) if comm.rank == 0 else comm.recv(0),
}


@pytest.mark.parametrize("scheme", [scheme for scheme in ("tcp", "shm") if scheme in SCHEMES])
@pytest.mark.parametrize("name", CALLS)
async def test_large_results_are_touched_once_by_a_thread(
    name: str, scheme: str, touched: list[tuple[int, int]]
) -> None:
    results: list[Any] = []

    async def body(comm: AsyncCommunicator) -> None:
        results.append(await CALLS[name](comm))

    await run_ranks(2, body, url=fresh_url(scheme))
    assert threading.get_ident() not in {thread for thread, _ in touched}
    assert sum(length for _, length in touched) >= sum(result is not None for result in results) * COUNT * 4
    assert max(length for _, length in touched) <= fresh._PIECE


async def test_memory_that_comes_back_is_not_touched_again(touched: list[tuple[int, int]]) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.all_reduce(np.ones(COUNT, np.float32))
        await comm.barrier()
        touched.clear()
        await comm.all_reduce(np.ones(COUNT, np.float32))

    await run_ranks(2, body, url=fresh_url("tcp"))
    assert touched == []


async def test_small_results_are_not(touched: list[tuple[int, int]]) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.all_reduce(np.ones(100_000, np.float32))

    await run_ranks(2, body, url=fresh_url("tcp"))
    assert touched == []


# ---------------------------------------------------------------------- calls that end meanwhile


class Held:
    """Threads that stand still before they touch, until they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.waiting = threading.Semaphore(0)

    async def reached(self) -> None:
        """Until one of them stands there."""
        async with asyncio.timeout(10):
            while not self.waiting.acquire(blocking=False):
                await asyncio.sleep(0.001)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    monkeypatch.setattr(pool, "_pool", pool.Pool())
    held = Held()
    touch = fresh.touch

    def hold(block: Any) -> None:
        if not held.go.is_set():
            held.waiting.release()
            held.go.wait(20)
        touch(block)

    monkeypatch.setattr(fresh, "touch", hold)
    yield held
    held.go.set()


SOME = [scheme for scheme in ("memory", "tcp", "shm") if scheme in SCHEMES]


def ones(rank: int = 0) -> Any:
    return np.full(COUNT, rank + 1.0, np.float32)


async def large_call(comm: AsyncCommunicator, name: str, **options: Any) -> Any:
    """A call whose fresh result every rank (`recv`: rank 1) waits for."""
    if name == "all_reduce":
        return await comm.all_reduce(ones(comm.rank), **options)
    return await (comm.send(ones(), 1, **options) if comm.rank == 0 else comm.recv(0, **options))


async def check_it_works(comm: AsyncCommunicator, held: Held) -> None:
    """The next calls are right while the pages of a call that is over are still touched, and after."""
    channel = comm.channel("after")
    held.waiting = threading.Semaphore(0)
    small = await channel.all_gather(np.array([comm.rank]))
    assert small.tolist() == [0, 1]
    held.go.set()
    results = [await channel.all_reduce(ones(comm.rank)) for _ in range(3)]
    for result in results:
        assert (result == 3).all()


@pytest.mark.parametrize("scheme", SOME)
@pytest.mark.parametrize("name", ["all_reduce", "recv"])
async def test_a_deadline_does_not_wait_for_the_pages(scheme: str, name: str, held: Held) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        started = time.monotonic()
        with pytest.raises(CollectiveTimeoutError):
            await large_call(comm, name, timeout=0.3)
        assert time.monotonic() - started < 5
        await comm.barrier()
        await check_it_works(comm, held)

    await run_ranks(2, body, url=fresh_url(scheme))


@pytest.mark.parametrize("scheme", SOME)
async def test_a_cancelled_peer_ends_the_wait_for_pages(scheme: str, held: Held) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        call = asyncio.ensure_future(comm.all_reduce(ones(comm.rank)))
        await held.reached()
        if comm.rank == 0:
            call.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError if comm.rank == 0 else CollectiveCancelledError):
            await call
        assert time.monotonic() - started < 5
        await check_it_works(comm, held)

    await run_ranks(2, body, url=fresh_url(scheme))


@pytest.mark.parametrize("scheme", SOME)
async def test_close_and_a_lost_peer_end_the_wait_for_pages(scheme: str, held: Held) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        call = asyncio.ensure_future(outcome(comm.all_reduce(ones(comm.rank))))
        await held.reached()
        async with asyncio.timeout(5):
            if comm.rank == 0:
                await comm.close()
            error = await call
        expected = (CommunicatorClosedError,) if comm.rank == 0 else (PeerLostError, CollectiveCancelledError)
        assert isinstance(error, expected), error

    await run_ranks(2, body, url=fresh_url(scheme))
    held.go.set()  # the pages go with the communicators: nobody may fall over that
    await run_ranks(2, lambda comm: check_it_works(comm, held), url=fresh_url(scheme))


# ---------------------------------------------------------------------- nobody else's threads


@asynccontextmanager
async def busy_executor() -> AsyncIterator[None]:
    """All threads of the loop's executor wait for something, as those of a server that bridges may."""
    executor = concurrent.futures.ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    end = threading.Event()
    executor.submit(end.wait, 30)
    try:
        yield
    finally:
        end.set()


@pytest.mark.parametrize("scheme", SOME)
async def test_calls_need_no_thread_of_the_loops_executor(
    scheme: str, touched: list[tuple[int, int]]
) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        assert (await comm.all_reduce(ones(comm.rank), timeout=5) == 3).all()
        text = "x" * 3_000_000  # decoded by a thread
        assert await comm.broadcast_object(text, 0, timeout=5) == text

    async with busy_executor():
        await run_ranks(2, body, url=fresh_url(scheme))
    assert touched
