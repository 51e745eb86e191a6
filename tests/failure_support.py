"""Ranks as processes that sum in a loop until a peer is lost, and then go on without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

RANK = """
import asyncio, os, resource, sys, time
import numpy as np
import ruda_async
from ruda_async import PeerLostError

async def main():
    url, rank, world, options = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), eval(sys.argv[4])
    before, inside, size = options.pop("before", ""), options.pop("inside", ""), options.pop("size", 200_000)
    exec(before)
    try:
        comm = await ruda_async.connect(url, rank=rank, world_size=world, **{"timeout": 30} | options)
        await comm.barrier()
    except ruda_async.RudaError as error:
        print("refused", type(error).__name__, str(error).replace(chr(10), " "), flush=True)
        return
    print("ready", os.getpid(), flush=True)
    exec(inside)
    try:
        while True:
            total = await comm.all_reduce_sum(np.full(size, float(rank + 1)))
            assert total[0] == total[-1] == world * (world + 1) / 2
            await asyncio.sleep(0.001)
    except PeerLostError as error:
        print("lost", error.rank, time.time(), flush=True)
    except ruda_async.RudaError as error:
        print("failed", type(error).__name__, str(error).replace(chr(10), " "), flush=True)
        return
    began = time.monotonic()
    smaller = await comm.shrink()
    total = await smaller.all_reduce_sum(np.ones(1))
    print("shrunk", smaller.rank, smaller.world_size, total[0], time.monotonic() - began, flush=True)
    await comm.close()

asyncio.run(main())
"""


def start_rank(url: str, rank: int, world: int, options: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK, url, str(rank), str(world), repr(options)],
        stdout=subprocess.PIPE,
        text=True,
    )


@contextmanager
def rank_processes(
    url: str, world: int, options: Sequence[dict[str, Any]] | dict[str, Any] = (), *, ready: bool = True
) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks, with options for all or for each; with `ready`, wait until all are linked.

    Options are `connect`'s, and ``before`` and ``inside``: code that runs before it connects and after, and
    ``size``, the elements that it sums.
    """
    each = [options] * world if isinstance(options, dict) else [*options, *({} for _ in range(world))][:world]
    ranks = [start_rank(url, rank, world, each[rank]) for rank in range(world)]
    try:
        for rank in ranks if ready else ():
            assert words(rank)[:1] == ["ready"]
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            if rank.stdout is not None:
                rank.stdout.close()


def words(rank: subprocess.Popen[str]) -> list[str]:
    """The next line that a rank prints; nothing where it has ended."""
    assert rank.stdout is not None
    return rank.stdout.readline().split()
