"""A rank that stood still for longer than its peers wait: what it says once it goes on."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from support import BETWEEN_PROCESSES, fresh_url, running_programs

RANK = """
import asyncio, os, signal, sys
import numpy as np
import ruda_async

async def main():
    url, rank, doing = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    x = np.ones(1 << 20, np.float32)
    async with ruda_async.connect(url, rank=rank, world_size=3, timeout=60, heartbeat=0.4) as comm:
        await comm.all_reduce(x)
        if rank == 2:
            stop = lambda: os.kill(os.getpid(), signal.SIGSTOP)
            asyncio.get_running_loop().call_later(0.02 if doing == "busy" else 0, stop)
        try:
            while True:
                await (comm.all_reduce(x) if doing == "busy" else comm.recv(2 if rank < 2 else 0))
        except ruda_async.PeerLostError as error:
            print(error, flush=True)
        small = await comm.shrink()
        await small.all_reduce(x)
        if rank < 2 and doing == "busy":
            await asyncio.sleep(2.5)  # so long a failed call's shared memory stays
        print(small.world_size, flush=True)
    os._exit(0)

asyncio.run(main())
"""


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="waits for a stopped child")
@pytest.mark.parametrize("doing", ["idle", "busy"])
@pytest.mark.parametrize("scheme", [*BETWEEN_PROCESSES, "auto"])
def test_it_says_that_it_was_dropped(scheme: str, doing: str) -> None:
    url = fresh_url(scheme)
    with running_programs(RANK, url, range(3), doing) as ranks:
        os.waitid(os.P_PID, ranks[2].pid, os.WSTOPPED)
        for rank in ranks[:2]:
            error, world_size = rank.communicate(timeout=60)[0].splitlines()
            assert "rank 2 is lost: silent for 0.6 s" in error
            assert world_size == "2"
        ranks[2].send_signal(signal.SIGCONT)
        error, world_size = ranks[2].communicate(timeout=60)[0].splitlines()
        assert "after this rank stood still for" in error
        assert "silent for 0.6 s (heartbeat=0.4), so they have likely gone on without this one" in error
        assert world_size == "1"
