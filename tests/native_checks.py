"""What every provider is put through."""

from __future__ import annotations

from typing import Any

import numpy as np

from ruda_async import AsyncCommunicator


def same(result: Any, expected: Any) -> None:
    assert result.dtype == expected.dtype, (result.dtype, expected.dtype)
    assert np.array_equal(result, expected), (result, expected)


async def all_operations(comm: AsyncCommunicator, dtype: str, n: int) -> None:
    """Every collective on values whose sums are exact in any order."""
    rank, size = comm.rank, comm.world_size
    inputs = [
        ((np.arange(size * n * 2) * (r + 3)) % 61).astype(dtype).reshape(size * n, 2) for r in range(size)
    ]
    x = inputs[rank]
    kept = x.copy()
    total = sum(i.astype(np.int64) for i in inputs).astype(dtype)
    shard = slice(rank * n, (rank + 1) * n)
    same(await comm.all_reduce(x), total)
    into = x.copy()
    assert await comm.all_reduce(into, out=into) is into
    same(into, total)
    result = await comm.reduce(x, size - 1)
    if rank == size - 1:
        same(result, total)
    else:
        assert result is None
    same(await comm.reduce_scatter(x), total[shard])
    same(await comm.reduce_scatter(x, out=np.empty((n, 2), dtype)), total[shard])
    same(await comm.all_gather(x), np.concatenate(inputs))
    into = np.zeros((size * size * n, 2), dtype)
    own = into[rank * size * n : (rank + 1) * size * n]
    own[:] = x
    await comm.all_gather(own, out=into)
    same(into, np.concatenate(inputs))
    exchange = await comm.all_gather_v(x[:rank])
    same(exchange.value, np.concatenate([i[:r] for r, i in enumerate(inputs)]))
    assert exchange.receive_counts == tuple(range(size))
    result = await comm.gather(x, 1)
    if rank == 1:
        same(result, np.concatenate(inputs))
    for root in range(size):
        same(await comm.broadcast(x, root), inputs[root])
        into = x.copy()
        await comm.broadcast(into, root, out=into)
        same(into, inputs[root])
    same(await comm.scatter(x if rank == 1 else None, 1), inputs[1][shard])
    same(await comm.all_to_all(x), np.concatenate([i[shard] for i in inputs]))
    counts = [(rank + peer) % 3 for peer in range(size)]
    exchange = await comm.all_to_all_v(x[: sum(counts)], counts)
    blocks = []
    for peer in range(size):
        theirs = [(peer + p) % 3 for p in range(size)]
        at = sum(theirs[:rank])
        blocks.append(inputs[peer][at : at + theirs[rank]])
    same(exchange.value, np.concatenate(blocks))
    assert exchange.receive_counts == tuple(map(len, blocks))
    await comm.barrier()
    same(x, kept)
