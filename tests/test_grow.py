"""Taking new ranks into a running job."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fresh_url, outcome, run_ranks

import ruda_async
from ruda_async import (
    AsyncCommunicator,
    AuthenticationError,
    CollectiveCancelledError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    RudaError,
    TensorContractError,
    admission,
)
from ruda_async.config import resolve
from ruda_async.opening import open_transport

pytestmark = pytest.mark.timeout(120)


async def works(comm: AsyncCommunicator) -> None:
    """A sum is right, in both directions of every link."""
    total = await comm.all_reduce_sum(np.array([comm.rank + 1.0, 10.0]), timeout=20)
    assert total.tolist() == [sum(range(1, comm.world_size + 1)), 10.0 * comm.world_size]
    gathered = await comm.all_to_all_v(np.full((comm.world_size, 1), float(comm.rank)), [1] * comm.world_size)
    assert gathered.value[:, 0].tolist() == list(range(comm.world_size))


async def with_newcomers(
    url: str,
    members: int,
    member: Callable[[AsyncCommunicator], Awaitable[Any]],
    newcomers: int,
    newcomer: Callable[[AsyncCommunicator], Awaitable[Any]] = works,
) -> list[Any]:
    """Run `member` on the ranks of a job, and `newcomer` on processes that join it; what newcomers gave."""

    async def join() -> Any:
        async with ruda_async.connect(url, join=True, timeout=40) as comm:
            return await newcomer(comm)

    joining = [asyncio.ensure_future(join()) for _ in range(newcomers)]
    try:
        await run_ranks(members, member, url=url, limit=90, timeout=40)
        return await asyncio.gather(*joining, return_exceptions=True)
    finally:
        for task in joining:
            task.cancel()


async def test_new_ranks_follow_the_old(url: str) -> None:
    seen = []

    async def member(comm: AsyncCommunicator) -> None:
        async with await comm.grow(2, timeout=40) as grown:
            assert (grown.rank, grown.world_size) == (comm.rank, 5)
            assert grown.timeout == comm.timeout
            await works(grown)
            await works(comm)  # the old one goes on
            assert (await grown.channel("x").all_gather_object(comm.rank))[:3] == [0, 1, 2]
            await grown.barrier()

    async def newcomer(comm: AsyncCommunicator) -> None:
        seen.append(comm.rank)
        await works(comm)
        assert (await comm.channel("x").all_gather_object("new"))[3:] == ["new", "new"]
        await comm.barrier()

    assert await with_newcomers(url, 3, member, 2, newcomer) == [None, None]
    assert sorted(seen) == [3, 4]


async def test_a_grown_job_grows_again_and_the_old_one_may_close(url: str) -> None:
    async def member(comm: AsyncCommunicator) -> None:
        first = await comm.grow(1, timeout=40)
        await comm.close()
        await works(first)
        second = await first.grow(1, timeout=40)
        await first.close()
        await works(second)
        assert second.world_size == 4
        await second.close()

    async def newcomer(comm: AsyncCommunicator) -> None:
        await works(comm)
        if comm.world_size == 3:
            async with await comm.grow(1, timeout=40) as second:
                assert second.rank == 2
                await works(second)

    assert await with_newcomers(url, 2, member, 2, newcomer) == [None, None]


async def test_one_rank_alone_can_grow(url: str) -> None:
    async def member(comm: AsyncCommunicator) -> None:
        async with await comm.grow(1, timeout=40) as grown:
            await works(grown)
            await grown.barrier()

    async def newcomer(comm: AsyncCommunicator) -> None:
        await works(comm)
        await comm.barrier()

    assert await with_newcomers(url, 1, member, 1, newcomer) == [None]


async def test_nobody_comes(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        error = await outcome(comm.grow(1, timeout=0.5))
        assert isinstance(error, CollectiveTimeoutError), error
        assert str(error).startswith("grow waited 0.5 s: 0 of 1 new ranks came to ")
        assert str(error).endswith("and this job's secret meanwhile, or raise timeout=")
        assert "start 1 more with connect(url, join=True)" in str(error)
        await works(comm)

    await run_ranks(3, body, url=url, limit=60)


async def test_after_a_failed_growth_the_next_one_works(url: str) -> None:
    async def member(comm: AsyncCommunicator) -> None:
        error = await outcome(comm.grow(2, timeout=0.7))  # one comes: too few
        assert isinstance(error, CollectiveTimeoutError), error
        assert "1 of 2" in str(error) or "0 of 2" in str(error)
        await works(comm)
        async with await comm.grow(1, timeout=40) as grown:
            await works(grown)
            await grown.barrier()

    async def newcomer(comm: AsyncCommunicator) -> None:
        await works(comm)
        await comm.barrier()

    assert await with_newcomers(url, 2, member, 1, newcomer) == [None]


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
async def test_a_newcomer_with_another_secret(scheme: str) -> None:
    url = fresh_url(scheme)

    async def member(comm: AsyncCommunicator) -> None:
        growing = asyncio.ensure_future(outcome(comm.grow(1, timeout=2)))
        if comm.rank == 0:  # not before: the job itself would turn it away while it comes together
            with pytest.raises(AuthenticationError):
                await ruda_async.connect(url, join=True, timeout=40, secret="another")
        error = await growing
        assert isinstance(error, CollectiveTimeoutError)
        assert "connections dropped: " in str(error)
        assert "did not prove this job's secret" in str(error)
        await works(comm)

    await run_ranks(2, member, url=url)


async def test_a_newcomer_that_was_taken_in_and_does_not_link_up(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of these steps is none that the caller gave, so another remedy is named."""
    monkeypatch.setattr(admission, "LINK_SECONDS", 1.5)

    async def member(comm: AsyncCommunicator) -> None:
        error = await outcome(comm.grow(1, timeout=30))
        assert isinstance(error, CollectiveTimeoutError), error
        assert "all new ranks had come, and then rank" in str(error)
        assert "2 of the grown job did not link up within 1.5 s" in str(error)
        assert "call grow() and connect(join=True) again" in str(error)
        assert "raise timeout=" not in str(error)
        await works(comm)

    knocking = asyncio.ensure_future(admission.knock(resolve(url, join=True, timeout=30)))
    await run_ranks(2, member, url=url, limit=60)
    assert (await knocking).rank == 2


async def test_more_come_than_are_taken_in(url: str) -> None:
    """Those left out go on waiting, for the next growth or for their deadline."""
    grown_twice = asyncio.Event()

    async def member(comm: AsyncCommunicator) -> None:
        first = await comm.grow(1, timeout=40)
        await works(first)
        assert len(entered) == 1
        second = await comm.grow(1, timeout=40)
        await works(second)
        await asyncio.gather(first.barrier(), second.barrier())
        await first.close()
        await second.close()
        grown_twice.set()

    entered: list[int] = []

    async def newcomer(comm: AsyncCommunicator) -> None:
        entered.append(comm.rank)
        await works(comm)
        await comm.barrier()

    assert await with_newcomers(url, 2, member, 2, newcomer) == [None, None]
    assert entered == [2, 2]
    assert grown_twice.is_set()


async def test_nobody_takes_it_in(url: str) -> None:
    error = await outcome(_connect(url, timeout=0.5))
    assert isinstance(error, CollectiveTimeoutError), error
    assert "grow()" in str(error)
    assert "0.5 s" in str(error)


async def _connect(url: str, timeout: float) -> AsyncCommunicator:
    return await ruda_async.connect(url, join=True, timeout=timeout)


async def test_a_newcomer_that_never_meets_the_others(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "LINK_SECONDS", 0.5)

    async def member(comm: AsyncCommunicator) -> None:
        error = await outcome(comm.grow(1, timeout=40))
        assert isinstance(error, (CollectiveTimeoutError, PeerLostError)), error
        await works(comm)

    ticket = asyncio.ensure_future(admission.knock(resolve(url, join=True, timeout=40)))
    await run_ranks(2, member, url=url, limit=60)
    assert (await ticket).rank == 2


async def test_a_newcomer_that_dies_before_the_others_have_come(url: str) -> None:
    growing, died = asyncio.Event(), asyncio.Event()

    async def member(comm: AsyncCommunicator) -> None:
        growing.set()
        async with await comm.grow(2, timeout=40) as grown:
            assert grown.world_size == 4
            await works(grown)
            await grown.barrier()

    async def die() -> None:
        await growing.wait()
        config = resolve(url, join=True, timeout=40)
        link = await open_transport(admission._admission(config, 1, time.monotonic() + 40))
        link.abort("dies")
        died.set()

    async def join() -> None:
        await died.wait()
        async with ruda_async.connect(url, join=True, timeout=40) as comm:
            await works(comm)
            await comm.barrier()

    await asyncio.gather(run_ranks(2, member, url=url, limit=90, timeout=40), die(), join(), join())


@pytest.mark.parametrize("quitter", [0, 1])
async def test_a_member_that_is_cancelled(url: str, quitter: int) -> None:
    """The others do not wait for newcomers any longer."""

    async def body(comm: AsyncCommunicator) -> None:
        call = asyncio.ensure_future(comm.grow(1, timeout=300))
        if comm.rank == quitter:
            while comm.stats()["operations"].get("grow", {"count": 0})["count"] == 0:
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            assert isinstance(await outcome(call), CollectiveCancelledError)
        await works(comm)

    await run_ranks(3, body, url=url)


async def test_a_member_that_dies(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 2:
            call = asyncio.ensure_future(comm.grow(1, timeout=300))
            while comm.stats()["operations"].get("grow", {"count": 0})["count"] == 0:
                await asyncio.sleep(0)
            comm.abort("dies")
            await outcome(call)
            return
        error = await outcome(comm.grow(1, timeout=300))
        assert isinstance(error, (PeerLostError, CollectiveCancelledError)), error
        await works(await comm.shrink())

    await run_ranks(3, body, url=url)


async def test_bad_calls(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        error = await outcome(comm.grow(0))
        assert isinstance(error, TensorContractError)
        error = await outcome(comm.grow(1 + comm.rank, timeout=5))
        assert isinstance(error, CollectiveMismatchError)
        assert error.field == "n"
        await works(comm)

    await run_ranks(2, body, url=url)


async def test_an_address_that_is_not_there() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        error = await outcome(comm.grow(1, url="tcp://192.0.2.1:29500", timeout=5))
        assert isinstance(error, RudaError)
        assert error.rank in (None, 0)
        await works(comm)

    await run_ranks(2, body, url=fresh_url("tcp"), secret="s")


def test_the_blocking_twin() -> None:
    url = fresh_url("memory")
    found: list[float] = []

    def use(comm: ruda_async.Communicator) -> None:
        found.append(float(comm.all_reduce_sum(np.array([comm.rank + 1.0]))[0]))
        comm.barrier()

    def member(rank: int) -> None:
        with ruda_async.sync.connect(url, rank=rank, world_size=2, timeout=40) as comm:
            grown = comm.grow(1, timeout=40)
        with grown:  # its loop outlives the communicator that it came from
            use(grown)
        grown.close()

    def newcomer() -> None:
        with ruda_async.sync.connect(url, join=True, timeout=40) as comm:
            use(comm)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(2)]
    threads.append(threading.Thread(target=newcomer))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [6.0] * 3


# ---------------------------------------------------------------------- processes

PROGRAM = Path(__file__).parent / "grow_ranks.py"


def start(mode: str, url: str, *args: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), mode, url, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("scheme", "mode", "victim"),
    [("tcp", "async", 0), ("tcp", "sync", 2), ("shm", "async", 2), ("shm", "sync", 0)],
)
def test_a_killed_rank_is_replaced(scheme: str, mode: str, victim: int) -> None:
    url = fresh_url(scheme)
    ranks = [start(mode, url, rank, 4) for rank in range(4)]
    processes = list(ranks)
    try:
        for process in ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        ranks.pop(victim).send_signal(signal.SIGKILL)
        newcomer = start(mode, url, "join")
        processes.append(newcomer)
        found = []
        for process in [*ranks, newcomer]:
            output, _ = process.communicate(timeout=90)
            assert process.returncode == 0, output
            found.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [f["rank"] for f in found] == [0, 1, 2, 3]
    assert all(f["world_size"] == 4 and f["sum"] == 1 + 2 + 3 + 4 for f in found)
    assert all(f["state"] == "from rank 0" for f in found)
