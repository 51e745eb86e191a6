"""Ranks that lose the same peer in different ways say the same of it."""

from __future__ import annotations

import os
import sys

import pytest
from support import BETWEEN_PROCESSES, fresh_url, running_programs

RANK = """
import asyncio, os, signal, sys
import numpy as np
import ruda_async

async def main():
    async with ruda_async.connect(sys.argv[1], rank=int(sys.argv[2]), world_size=3, timeout=60) as comm:
        await comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        await asyncio.to_thread(sys.stdin.readline)
        if comm.rank == 0:
            await comm.send(np.zeros(100), 2)
            print("sent", flush=True)
        try:
            await comm.recv(2)
        except ruda_async.PeerLostError as error:
            print(str(error).partition(": ")[2], flush=True)
        try:
            await comm.barrier()
        except ruda_async.PeerLostError as error:
            print(str(error).partition(": ")[2], flush=True)
        os._exit(0)

asyncio.run(main())
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="waits for a stopped child")
@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_a_dead_rank_is_reported_alike_whether_it_left_bytes_unread(scheme: str) -> None:
    url = fresh_url(scheme)
    with running_programs(RANK, url, range(3)) as ranks:
        os.waitid(os.P_PID, ranks[2].pid, os.WSTOPPED)
        ranks[0].stdin.write("\n")
        ranks[0].stdin.flush()
        assert ranks[0].stdout.readline() == "sent\n"  # to rank 2, which will never read it
        ranks[2].kill()
        said = [line for rank in ranks[:2] for line in rank.communicate("\n", 60)[0].splitlines()]
        reason = "rank 2 is lost: its connection ended without a goodbye; shrink() goes on without it"
        assert said == [reason] * 4  # of `recv` and of `barrier`, on both ranks


SPLIT = """
import asyncio, os, sys
import numpy as np
import ruda_async

async def main():
    async with ruda_async.connect(sys.argv[1], rank=int(sys.argv[2]), world_size=4, timeout=60) as comm:
        group = await comm.split(comm.rank % 2, -comm.rank)  # 3 1, as ranks 0 and 1
        await comm.barrier()
        if comm.rank == 3:
            os._exit(1)
        if comm.rank == 1:
            x = np.ones(3)
            for call in (group.barrier(), group.recv(0), group.all_reduce(x), group.send(x, 0)):
                try:
                    await call
                except ruda_async.PeerLostError as error:
                    print(error.rank, str(error).partition(": ")[2], flush=True)
        os._exit(0)

asyncio.run(main())
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_a_group_numbers_its_lost_rank_as_its_calls_do(scheme: str) -> None:
    """Rank 3 of the job is rank 0 of the group; there is no rank 3 of 2."""
    url = fresh_url(scheme)
    with running_programs(SPLIT, url, range(4)) as ranks:
        said = ranks[1].communicate(timeout=60)[0].splitlines()
        reason = "0 rank 0 (3 of the job) is lost: its connection ended without a goodbye; shrink() goes on "
        assert said == [reason + "without it"] * 4
