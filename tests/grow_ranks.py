"""A rank that loses a peer and takes in a replacement; or that replacement. See `test_grow`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np

import ruda_async
from ruda_async import PeerLostError


def report(comm: Any, total: Any, state: Any) -> None:
    found = {"rank": comm.rank, "world_size": comm.world_size, "sum": float(total[0]), "state": state}
    print(json.dumps(found), flush=True)


async def member(url: str, rank: int, world_size: int) -> None:
    async with ruda_async.connect(url, rank=rank, world_size=world_size, timeout=60) as comm:
        await comm.barrier()
        print("ready", flush=True)
        try:
            while True:
                await comm.barrier()
        except PeerLostError:
            shrunk = await comm.shrink()
        async with await shrunk.grow(1) as grown:
            await use(grown)


async def newcomer(url: str) -> None:
    async with ruda_async.connect(url, join=True, timeout=60) as comm:
        await use(comm)


async def use(comm: ruda_async.AsyncCommunicator) -> None:
    state = await comm.broadcast_object("from rank 0" if comm.rank == 0 else None, 0)
    report(comm, await comm.all_reduce_sum(np.array([comm.rank + 1.0])), state)
    await comm.barrier()


def member_sync(url: str, rank: int, world_size: int) -> None:
    with ruda_async.sync.connect(url, rank=rank, world_size=world_size, timeout=60) as comm:
        comm.barrier()
        print("ready", flush=True)
        try:
            while True:
                comm.barrier()
        except PeerLostError:
            shrunk = comm.shrink()
        with shrunk.grow(1) as grown:
            use_sync(grown)


def newcomer_sync(url: str) -> None:
    with ruda_async.sync.connect(url, join=True, timeout=60) as comm:
        use_sync(comm)


def use_sync(comm: ruda_async.Communicator) -> None:
    state = comm.broadcast_object("from rank 0" if comm.rank == 0 else None, 0)
    report(comm, comm.all_reduce_sum(np.array([comm.rank + 1.0])), state)
    comm.barrier()


if __name__ == "__main__":
    mode, url, *rest = sys.argv[1:]
    if rest == ["join"]:
        asyncio.run(newcomer(url)) if mode == "async" else newcomer_sync(url)
    elif mode == "async":
        asyncio.run(member(url, int(rest[0]), int(rest[1])))
    else:
        member_sync(url, int(rest[0]), int(rest[1]))
