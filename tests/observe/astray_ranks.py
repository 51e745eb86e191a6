"""A rank of four of which one goes astray. See `test_traces`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import numpy as np

import ruda_async
from ruda_async import RudaError


async def main(case: str, rank: int, astray: int) -> None:
    async with ruda_async.connect(timeout=60) as comm:
        x = np.full(100, float(rank))
        for _ in range(20):
            await comm.all_reduce_sum(x)
        batch = comm.channel("batch-7")
        await batch.all_gather_float(x)
        if rank == astray and case == "stopped":
            print("ready", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            if rank == astray and case == "elsewhere":
                await comm.channel("other").broadcast(x, rank, timeout=60)
            elif case == "circle":
                first, second = ("a", "b") if rank % 2 else ("b", "a")
                await comm.channel(first).all_reduce_sum(x, timeout=1)
                await comm.channel(second).all_reduce_sum(x, timeout=1)
            elif case == "signal":
                print("ready", flush=True)
                await comm.barrier(timeout=60) if rank != astray else await comm.recv((astray + 1) % 4)
            else:
                await batch.all_reduce_sum(x, timeout=1)
        except RudaError as error:
            print(type(error).__name__, flush=True)
        # Leave together: a closing rank would be one more thing to explain.
        print("over", flush=True)
        await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(os.environ["RUDA_RANK"]), int(sys.argv[2])))
