"""One URL, job after job: nothing of a former one is in the way, or read by the next."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable

import numpy as np
import pytest
from support import outcome, run_programs, run_ranks

import ruda_async
from ruda_async import AsyncCommunicator, CollectiveTimeoutError, RudaError

JOBS = 10


async def leaves_messages(comm: AsyncCommunicator) -> None:
    """Some that nobody receives, and a channel with calls that were given up, remain at the end."""
    peer = 1 - comm.rank
    sends = [comm.send(np.full(5, 666), peer, tag=3), comm.send(np.full(900_000, 666), peer, tag=4)]
    sending = [asyncio.ensure_future(one) for one in sends]
    given_up = asyncio.ensure_future(comm.channel("given up").all_reduce(np.full(100_000, 666.0)))
    await asyncio.sleep(0)
    if comm.rank == 0:
        given_up.cancel()
    for task in (*sending, given_up):
        task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def test_what_nobody_received_is_not_in_the_next_job(url: str) -> None:
    async def checked(comm: AsyncCommunicator) -> None:
        peer = 1 - comm.rank
        for tag in (3, 4):
            error = await outcome(comm.recv(peer, tag=tag, timeout=0.02))
            assert isinstance(error, CollectiveTimeoutError), error
        total = await comm.channel("given up").all_reduce(np.full(100_000, 1.0))
        assert (total == 2).all()
        await comm.barrier()
        await leaves_messages(comm)

    for _ in range(3):
        await run_ranks(2, checked, url=url)


@pytest.mark.parametrize("end", ["close", "abort"])
async def test_ranks_that_need_not_leave_together(url: str, end: str) -> None:
    """A rank may be in the next job's meeting while another has yet to leave the last one."""

    async def life(rank: int) -> None:
        draw = random.Random(rank)
        for job in range(JOBS):
            comm = await ruda_async.connect(url, rank=rank, world_size=3, timeout=20)
            try:
                total = await comm.all_reduce_sum(np.array([100.0 * job + comm.rank]))
                assert total.tolist() == [300.0 * job + 3], job
                await comm.barrier()
                for _ in range(draw.randrange(30)):
                    await asyncio.sleep(0)
            except RudaError:
                if end == "close":
                    raise  # by `abort` the others may be cut off in the barrier
            finally:
                if end == "abort":
                    comm.abort("over")
                else:
                    await comm.close()

    async with asyncio.timeout(50):
        await asyncio.gather(*map(life, range(3)))


PROGRAM = """
import sys
import numpy as np
import ruda_async
url, rank = sys.argv[1], int(sys.argv[2])
for job in range(10):
    with ruda_async.sync.connect(url, rank=rank, world_size=2, timeout=30) as comm:
        assert comm.all_reduce_sum(np.array([10.0 * job + rank])).tolist() == [20.0 * job + 1]
        work = comm.start.send(np.full(4, job), 1 - rank, tag=5 + job)
print("done")
"""


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
async def test_processes_connect_again_at_once(scheme: str, new_url: Callable[[str], str]) -> None:
    said = await run_programs(PROGRAM, new_url(scheme), 2, 50)
    assert [(out, code) for out, _, code in said] == [("done\n", 0)] * 2, said


async def test_a_job_that_did_not_come_about_leaves_its_place(url: str) -> None:
    """Its rank 0 gave up waiting, or its other rank did."""
    for rank in (0, 1, 0, 1):
        with contextlib.suppress(RudaError):
            await ruda_async.connect(url, rank=rank, world_size=2, timeout=0.1)

        async def body(comm: AsyncCommunicator) -> list[float]:
            total: np.ndarray = await comm.all_reduce_sum(np.ones(2))
            return list(total.tolist())

        assert await run_ranks(2, body, url=url) == [[2.0, 2.0]] * 2
