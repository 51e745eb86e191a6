"""A task that is cancelled while it waits in a call is cancelled, in whatever moment that comes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from support import fresh_url, outcome, run_ranks

import ruda_async
from ruda_async import AsyncCommunicator, CollectiveCancelledError, RudaError

SIZE = 30_000
CALLS: dict[str, Callable[[AsyncCommunicator], Awaitable[Any]]] = {
    "all_reduce": lambda c: c.all_reduce(np.ones(SIZE)),
    "small all_reduce": lambda c: c.all_reduce(np.ones(4)),
    "all_gather_v": lambda c: c.all_gather_v(np.ones((SIZE, 2))),
    "all_to_all_v": lambda c: c.all_to_all_v(np.ones((2 * SIZE, 1)), [SIZE, SIZE]),
    "broadcast": lambda c: c.broadcast(np.ones(SIZE), 1),
    "gather": lambda c: c.gather(np.ones(SIZE), 0),
    "scatter": lambda c: c.scatter(np.ones(2 * SIZE) if c.rank else None, 1),
    "reduce_scatter": lambda c: c.reduce_scatter(np.ones(2 * SIZE)),
    "all_gather_object": lambda c: c.all_gather_object("x" * 1000),
    "barrier": lambda c: c.barrier(),
    "split": lambda c: c.split(0),
}
TRANSFERS: dict[str, Callable[[AsyncCommunicator], Awaitable[Any]]] = {
    "recv": lambda c: c.recv(1),
    "large recv": lambda c: c.recv(1, tag=1),
    "recv_any": lambda c: c.recv_any(),
    "large send": lambda c: c.send(np.ones(8 * SIZE), 1, tag=2),
}


async def cancelled_after(turns: int, call: Awaitable[Any]) -> bool:
    """Whether the task still ran when it was cancelled; then it has to end as one that was."""
    task = asyncio.ensure_future(call)
    for _ in range(turns):
        await asyncio.sleep(0)
    if not task.cancel():
        task.result()
        return False
    await asyncio.wait((task,))
    assert task.cancelled(), (turns, task)
    return True


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_a_collective(url: str, name: str) -> None:
    async def body(comm: AsyncCommunicator) -> int:
        seen = 0
        for turns in range(1, 40):
            channel = comm.channel(f"turn {turns}")
            if comm.rank == 0:
                seen += await cancelled_after(turns, CALLS[name](channel))
            else:
                error = await outcome(CALLS[name](channel))
                assert not isinstance(error, RudaError) or isinstance(error, CollectiveCancelledError), error
            assert (await comm.all_reduce(np.ones(3))).tolist() == [2.0] * 3
        return seen

    seen, _ = await run_ranks(2, body, url=url)
    assert seen  # some were still under way


@pytest.mark.parametrize("name", sorted(TRANSFERS))
async def test_a_transfer(url: str, name: str) -> None:
    """No message is lost by it either."""

    async def body(comm: AsyncCommunicator) -> int:
        seen = 0
        if comm.rank:
            for turns in range(1, 40):
                sends = [comm.send(np.full(4, turns), 0), comm.send(np.full(8 * SIZE, turns), 0, tag=1)]
                sending = [asyncio.ensure_future(one) for one in sends]
                await comm.barrier()
                size = 0
                while size != 1:  # what came of the sends that were cancelled, up to the mark after each
                    size = len(await comm.recv(0, tag=2))
                    assert size in (1, 8 * SIZE)
                await asyncio.gather(*sending)
            return 1
        for turns in range(1, 40):
            cancelled = await cancelled_after(turns, TRANSFERS[name](comm))
            seen += cancelled
            await comm.barrier()
            if cancelled or name not in ("recv", "recv_any"):
                assert (await comm.recv(1)).tolist() == [turns] * 4
            if cancelled or name != "large recv":
                assert (await comm.recv(1, tag=1) == turns).all()
            await comm.send(np.ones(1), 1, tag=2)
        return seen

    seen, _ = await run_ranks(2, body, url=url)
    assert seen


@pytest.mark.parametrize("scheme", ["memory", "tcp", "shm"])
async def test_connecting(scheme: str) -> None:
    """Whether others have come or not; and the place is free for the next job."""
    for turns in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89):
        url = fresh_url(scheme)
        alone = ruda_async.connect(url, rank=0, world_size=2, timeout=20)
        assert await cancelled_after(turns, alone.__aenter__())

        async def body(comm: AsyncCommunicator) -> float:
            return float((await comm.all_reduce_sum(np.ones(1)))[0])

        assert await run_ranks(2, body, url=url) == [2.0, 2.0]


async def test_shrinking_and_closing(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank:
            await comm.recv(0)
            return
        assert await cancelled_after(3, comm.shrink())  # rank 1 never does
        await comm.send(np.ones(1), 1)
        closing = asyncio.ensure_future(comm.close())
        await asyncio.sleep(0)
        if closing.cancel():
            await asyncio.wait((closing,))
            assert closing.cancelled()
        await comm.close()  # it went on all the same
        assert comm.closed

    await run_ranks(2, body, url=url)
