"""A selection of collectives over ``ucx://``, small and large; ``tox -e ucx`` runs their whole suites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import fresh_url, run_ranks

from ruda_async import AsyncCommunicator, CollectiveMismatchError, TensorContractError

pytest.importorskip("ucxx", reason="pip install 'ruda-async[ucx]'")

CALLS: dict[str, Callable[[AsyncCommunicator, Any], Any]] = {
    "all_reduce_sum": lambda c, x: c.all_reduce_sum(x),
    "all_reduce_mean": lambda c, x: c.all_reduce(x, "mean"),
    "reduce": lambda c, x: c.reduce(x, 1, "max"),
    "reduce_scatter_sum": lambda c, x: c.reduce_scatter_sum(x),
    "all_gather": lambda c, x: c.all_gather(x),
    "broadcast": lambda c, x: c.broadcast(x, 2),
    "gather": lambda c, x: c.gather(x, 0),
    "all_to_all": lambda c, x: c.all_to_all(x),
    "bounded": lambda c, x: c.bounded(4096).all_reduce_sum(x),
}


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("rows", [1, 5_000])
@pytest.mark.parametrize("name", sorted(CALLS))
async def test_the_same_bits_as_in_memory(name: str, rows: int, world: int) -> None:
    async def body(comm: AsyncCommunicator) -> Any:
        value = (
            np.random.default_rng(comm.rank).standard_normal((rows * comm.world_size, 7)).astype(np.float32)
        )
        return await CALLS[name](comm, value)

    ours, theirs = [await run_ranks(world, body, url=fresh_url(scheme)) for scheme in ("ucx", "memory")]
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine is None) is (other is None)
        assert mine is None or np.array_equal(mine, other)


async def test_uneven_exchange_and_channels() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        rank, size = comm.rank, comm.world_size
        counts = [(rank + peer) % 3 * 4000 for peer in range(size)]
        for name in ("one", "two"):
            rows = np.repeat(np.arange(size, dtype=np.int64) + 100 * rank, counts)
            exchange = await comm.channel(name).all_to_all_v_int(rows, counts)
            expected = [(peer + rank) % 3 * 4000 for peer in range(size)]
            assert list(exchange.receive_counts) == expected
            assert np.array_equal(exchange.value, np.repeat(rank + 100 * np.arange(size), expected))

    await run_ranks(4, body, url=fresh_url("ucx"))


async def test_errors_are_errors_on_every_rank_and_the_communicator_goes_on() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        with pytest.raises(CollectiveMismatchError):
            await comm.all_reduce_sum(np.ones(10 if comm.rank else 200_000))
        with pytest.raises((TensorContractError, CollectiveMismatchError)):
            await comm.all_to_all_v_float(np.ones((4, 2)), [1, 1, 2] if comm.rank else [1, 1, 1])
        assert (await comm.all_reduce_sum(np.ones(300_000)))[7] == 3

    await run_ranks(3, body, url=fresh_url("ucx"))
