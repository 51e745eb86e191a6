"""Ranks whose bounds on eager and early messages differ: each keeps to what the other can take."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from mesh_support import run_each
from support import fresh_url

from ruda_async import AsyncCommunicator

TERMS = [
    ({"eager_bytes": 0, "early_bytes": 4096}, {"eager_bytes": 1 << 20, "early_bytes": 64 << 20}),
    ({"eager_bytes": 1 << 20, "early_bytes": 4096}, {"eager_bytes": 100, "early_bytes": 1 << 20}),
    ({"eager_bytes": 64 << 20, "early_bytes": 128 << 20}, {"eager_bytes": 0, "early_bytes": 4096}),
]


@pytest.mark.parametrize("terms", TERMS, ids=["small and large", "more eager than early", "huge and none"])
@pytest.mark.parametrize("swapped", [False, True])
async def test_ranks_with_different_terms_work_together(
    terms: tuple[dict[str, int], dict[str, int]], swapped: bool
) -> None:
    sizes = (0, 1, 100, 1000, 40_000, 500_000)  # of float64; on both sides of every bound above

    async def body(comm: AsyncCommunicator) -> None:
        rank, peer = comm.rank, 1 - comm.rank
        for size in sizes:
            value = np.arange(2.0 * size) + rank
            total = 2 * np.arange(2.0 * size) + 1
            np.testing.assert_array_equal(await comm.all_reduce_sum(value), total)
            np.testing.assert_array_equal(
                await comm.reduce_scatter_sum(value), total[rank * size : (rank + 1) * size]
            )
            gathered = await comm.all_gather_float(value)
            np.testing.assert_array_equal(
                gathered[2 * size * peer :][: 2 * size], np.arange(2.0 * size) + peer
            )
            counts = [size, size] if rank else [2 * size, 0]
            moved = await comm.all_to_all_v_float(value, counts)
            assert list(moved.receive_counts) == ([0, size] if rank else [2 * size, size])

    results = await run_each(terms[::-1] if swapped else terms, body, fresh_url("tcp"))
    assert results == [None, None]


@pytest.mark.parametrize("terms", TERMS, ids=["small and large", "more eager than early", "huge and none"])
async def test_large_messages_pass_both_ways_at_once_under_different_terms(
    terms: tuple[dict[str, int], dict[str, int]],
) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        peer = 1 - comm.rank
        values = [np.full(size, comm.rank + 10.0 * tag) for tag, size in enumerate((1_000_000, 5, 2_000_000))]
        sends = [asyncio.create_task(comm.send(value, peer, tag=tag)) for tag, value in enumerate(values)]
        for tag in (2, 0, 1):  # not the order in which they were sent
            got = await comm.recv(peer, tag=tag)
            np.testing.assert_array_equal(got, np.full(len(values[tag]), peer + 10.0 * tag))
        await asyncio.gather(*sends)

    assert await run_each(terms, body, fresh_url("tcp")) == [None, None]
