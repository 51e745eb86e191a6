"""A rank that sums in a loop until a peer is lost, and then goes on without it; one job after the other.

Run by `failure_support`. Each job is a line on stdin, and ``end`` is the line after it; what happens is
printed, a line a thing, and ``idle`` before each job and after the last. The process ends when stdin does.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time
import traceback
from typing import Any

import numpy as np

import ruda_async
from ruda_async import PeerLostError

LIMITS = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)}


def say(*words: object) -> None:
    print(*(str(word).replace("\n", " ") for word in words), flush=True)


async def job(url: str, rank: int, world: int, options: dict[str, Any]) -> None:
    before, inside, size = options.pop("before", ""), options.pop("inside", ""), options.pop("size", 200_000)
    exec(before)
    try:
        comm = await ruda_async.connect(url, rank=rank, world_size=world, **{"timeout": 30} | options)
    except ruda_async.RudaError as error:
        say("refused", type(error).__name__, error)
        return
    try:
        await survive(comm, rank, world, size, inside)
    finally:
        comm.abort("the test is over")


async def survive(comm: ruda_async.AsyncCommunicator, rank: int, world: int, size: int, inside: str) -> None:
    try:
        await comm.barrier()
    except ruda_async.RudaError as error:
        say("refused", type(error).__name__, error)
        return
    say("ready", os.getpid())
    exec(inside)
    try:
        while True:
            total = await comm.all_reduce_sum(np.full(size, float(rank + 1)))
            assert total[0] == total[-1] == world * (world + 1) / 2
            await asyncio.sleep(0.001)
    except PeerLostError as error:
        say("lost", error.rank, time.time())
    except ruda_async.RudaError as error:
        say("failed", type(error).__name__, error)
        return
    smaller = await comm.shrink()
    try:
        total = await smaller.all_reduce_sum(np.ones(1))
        say("shrunk", smaller.rank, smaller.world_size, total[0])
        await comm.close()
        say("closed")
    finally:
        smaller.abort("the test is over")


async def guarded(line: bytes) -> None:
    try:
        await job(*eval(line))
    except Exception:
        traceback.print_exc()
        say("broken")


async def main() -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    say("idle")
    while line := await lines.readline():
        running = asyncio.ensure_future(guarded(line))
        await lines.readline()
        running.cancel()
        await asyncio.wait((running,))
        for kind, limits in LIMITS.items():
            resource.setrlimit(kind, limits)
        say("idle")


if __name__ == "__main__":
    asyncio.run(main())
