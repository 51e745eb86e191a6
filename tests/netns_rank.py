"""One rank of the tests with several hosts: ``netns_rank.py work|wait url rank world_size options``.

``work`` makes all collectives that know hosts and prints what came of them as one line of JSON; ``wait``
all-reduces until a peer is lost, says when, and goes on with the ranks that are left.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import time
from typing import Any

import numpy as np

import ruda_async
from ruda_async import AsyncCommunicator, PeerLostError


def inputs(rank: int, rows: int, dtype: str) -> np.ndarray:
    """Numbers whose sum depends on the order."""
    rng = np.random.default_rng(rank)
    return (rng.standard_normal((rows, 4)) * np.exp2(rng.uniform(-4, 4, (rows, 4)))).astype(dtype)


async def work(comm: AsyncCommunicator) -> dict[str, str]:
    """Digests of the results of a few calls."""
    found: dict[str, np.ndarray] = {}
    for dtype in ("float32", "float16", "int32"):
        for rows in (1, 5000, 100_000):
            value = inputs(comm.rank, rows, dtype)
            found[f"sum {dtype} {rows}"] = await comm.all_reduce_sum(value)
            found[f"gather {dtype} {rows}"] = await comm.all_gather(value)
    counts = [(comm.rank * 7 + 3 * peer) % 5 * 1000 for peer in range(comm.world_size)]
    rows_out = inputs(comm.rank, sum(counts), "float64")
    exchange = await comm.all_to_all_v(rows_out, counts)
    found["exchange"] = exchange.value
    assert exchange.receive_counts == tuple(
        (peer * 7 + 3 * comm.rank) % 5 * 1000 for peer in range(comm.world_size)
    )
    half = await comm.split(comm.rank // 2)
    assert half is not None
    found["half"] = await half.all_reduce_sum(inputs(comm.rank, 9, "float32"))
    return {name: hashlib.sha256(value.tobytes()).hexdigest()[:16] for name, value in found.items()}


async def report(comm: AsyncCommunicator) -> dict[str, Any]:
    """All that the test wants to know of one rank."""
    transport = comm.describe()["transport"]
    digests = await work(comm)
    before = comm.stats()["peers"]
    await comm.all_reduce_sum(inputs(comm.rank, 100_000, "float32"))
    after = comm.stats()["peers"]
    sent = {peer: after[peer]["bytes_sent"] - before[peer]["bytes_sent"] for peer in after}
    await comm.barrier()
    return {
        "scheme": transport["scheme"],
        "links": transport.get("links"),
        "hosts": transport.get("hosts"),
        "unused": transport.get("unused"),
        "digests": digests,
        "sent": sent,
    }


async def wait(comm: AsyncCommunicator) -> None:
    """All-reduce until somebody is lost."""
    await comm.barrier()
    print("ready", flush=True)
    last = time.monotonic()
    try:
        while True:
            await comm.all_reduce_sum(np.ones(1000, np.float32))
            last = time.monotonic()
            await asyncio.sleep(0.01)
    except PeerLostError as error:
        print("lost", error.rank, last, time.monotonic(), flush=True)
    smaller = await comm.shrink()
    total = await smaller.all_reduce_sum(np.ones(1))
    print("left", smaller.rank, smaller.world_size, int(total[0]), flush=True)


async def main() -> None:
    task, url, rank, world_size, options = sys.argv[1:]
    connecting = ruda_async.connect(
        url or None,
        rank=int(rank) if rank else None,
        world_size=int(world_size) if world_size else None,
        timeout=40,
        **json.loads(options),
    )
    async with connecting as comm:
        if task == "work":
            print(json.dumps(await report(comm)), flush=True)
        else:
            await wait(comm)


if __name__ == "__main__":
    asyncio.run(main())
