"""Collectives through memory that all ranks see, against numpy, and what is left of them after a failure."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SCHEMES, fresh_url, outcome, run_ranks

from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    CollectiveTimeoutError,
    ProtocolError,
    TensorContractError,
)
from ruda_async.call import Operation
from ruda_async.collectives import feeds, shared, shared_copy
from ruda_async.transport import RegionDestroyed

SHARING = [scheme for scheme in SCHEMES if scheme in ("memory", "shm")]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few elements, so that small tensors make long feeds."""
    monkeypatch.setattr(shared, "_BLOCK", 64)
    monkeypatch.setattr(shared_copy, "_BLOCK", 64)
    monkeypatch.setattr(shared_copy, "_LEAST_BLOCK", 64)
    monkeypatch.setattr(shared_copy, "_INLINE", 40)


def inputs(seed: int, ranks: int, count: int, dtype: str) -> list[Any]:
    random = np.random.default_rng(seed)
    return [random.integers(-90, 90, count).astype(dtype) for _ in range(ranks)]


def rank_values(comm: AsyncCommunicator, values: Any, place: str) -> Any:
    """The rank's input: its own array, or a copy in memory that all see."""
    if place == "ordinary":
        return values.copy()
    heap = comm._node.heap
    assert heap is not None
    held = heap.take(max(values.nbytes, 1))[: values.nbytes].view(values.dtype)
    held[:] = values
    return held


@pytest.mark.parametrize("scheme", SHARING)
@settings(max_examples=12, deadline=None)
@given(
    ranks=st.integers(2, 5),
    count=st.integers(0, 200),
    dtype=st.sampled_from(["float32", "float16", "int64", "uint8"]),
    places=st.lists(st.sampled_from(["ordinary", "shared"]), min_size=5, max_size=5),
    out=st.sampled_from(["fresh", "given", "input"]),
    seed=st.integers(0, 99),
)
def test_against_numpy(
    scheme: str, ranks: int, count: int, dtype: str, places: list[str], out: str, seed: int
) -> None:
    values = inputs(seed, ranks, count * ranks, dtype)
    total = np.sum(values, axis=0, dtype=dtype)
    counts = np.random.default_rng(seed).multinomial(count * ranks, [1 / ranks] * ranks)

    async def body(comm: AsyncCommunicator) -> None:
        rank = comm.rank
        mine = rank_values(comm, values[rank], places[rank])
        shard = slice(rank * count, (rank + 1) * count)
        target = {"fresh": None, "given": np.empty_like(mine), "input": mine}[out]
        result = await comm.all_reduce_sum(mine, out=target)
        assert (result == total).all()
        mine[:] = values[rank]
        assert ((await comm.reduce_scatter_sum(mine)) == total[shard]).all()
        reduced = await comm.reduce(mine, 1)
        assert reduced is None if rank != 1 else (reduced == total).all()
        assert ((await comm.all_gather(mine)) == np.concatenate(values)).all()
        assert ((await comm.broadcast(mine, ranks - 1)) == values[-1]).all()
        assert ((await comm.all_to_all(mine)) == np.concatenate([v[shard] for v in values])).all()
        exchanged = await comm.all_to_all_v(mine, np.roll(counts, rank))
        sent = [np.split(v, np.cumsum(np.roll(counts, r))[:-1])[rank] for r, v in enumerate(values)]
        assert list(exchanged.receive_counts) == [len(part) for part in sent]
        assert (exchanged.value == np.concatenate(sent)).all()
        mine_only = mine[: counts[rank]]
        gathered = await comm.all_gather_v(mine_only)
        assert (gathered.value == np.concatenate([v[: counts[r]] for r, v in enumerate(values)])).all()
        assert (mine == values[rank]).all()

    asyncio.run(run_ranks(ranks, body, url=fresh_url(scheme), algorithm="shared"))


@pytest.mark.parametrize("scheme", SHARING)
async def test_results_are_the_callers_alone(scheme: str) -> None:
    """A rank that is done may change its tensors at once, though slower ranks had them in view."""

    async def body(comm: AsyncCommunicator) -> None:
        for turn in range(50):
            mine = np.full(5000, comm.rank + turn, np.int64)
            result = await comm.all_reduce_sum(mine)
            expected = sum(range(comm.world_size)) + turn * comm.world_size
            result_now = result.copy()
            result[:] = -1
            mine[:] = -1
            assert (result_now == expected).all()
            if comm.rank == turn % comm.world_size:
                await asyncio.sleep(0)

    await run_ranks(3, body, url=fresh_url(scheme), algorithm="shared")


@pytest.mark.parametrize("scheme", SHARING)
async def test_same_bits_as_by_messages(scheme: str) -> None:
    random = np.random.default_rng(5)
    values = [(random.standard_normal(3001) * 10.0 ** random.integers(-4, 4, 3001)) for _ in range(5)]

    def body_for(dtype: str) -> Any:
        async def body(comm: AsyncCommunicator) -> bytes:
            return (await comm.all_reduce_sum(values[comm.rank].astype(dtype))).tobytes()

        return body

    for dtype in ("float32", "float16", "float64"):
        by_memory = await run_ranks(5, body_for(dtype), url=fresh_url(scheme), algorithm="shared")
        by_message = await run_ranks(5, body_for(dtype), url=fresh_url("memory"), algorithm="pairwise")
        assert len({*by_memory, *by_message}) == 1


@pytest.mark.parametrize("scheme", SHARING)
async def test_many_at_once_in_different_orders(scheme: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        names = [f"request {i}" for i in range(20)]
        order = names if comm.rank % 2 else names[::-1]

        async def one(name: str) -> None:
            value = int(name.split()[1])
            result = await comm.channel(name).all_reduce_sum(np.full(1000, value))
            assert (result == value * comm.world_size).all()

        await asyncio.gather(*(one(name) for name in order))

    await run_ranks(3, body, url=fresh_url(scheme), algorithm="shared")


@pytest.mark.parametrize("scheme", SHARING)
async def test_a_late_rank_a_bad_input_and_a_cancelled_task(scheme: str) -> None:
    """The others fail with the right error, and the next call has fresh memory."""

    async def body(comm: AsyncCommunicator) -> None:
        big = np.ones(4000)
        last = comm.world_size - 1
        if comm.rank == last:
            with pytest.raises(TensorContractError):
                await comm.all_reduce_sum(np.ones(3, bool))
        else:
            assert isinstance(await outcome(comm.all_reduce_sum(big)), TensorContractError)
        assert (await comm.all_reduce_sum(big))[0] == comm.world_size

        if comm.rank == 0:
            call = asyncio.ensure_future(comm.all_reduce_sum(big))
            await asyncio.sleep(0)
            await comm.channel("go").barrier()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        elif comm.rank == last:
            await comm.channel("go").barrier()
            assert isinstance(await outcome(comm.all_reduce_sum(big)), CollectiveCancelledError)
        else:
            call = asyncio.ensure_future(comm.all_reduce_sum(big))
            await comm.channel("go").barrier()
            assert isinstance(await outcome(call), CollectiveCancelledError)
        assert (await comm.all_reduce_sum(big))[-1] == comm.world_size

        if comm.rank == 0:
            assert isinstance(await outcome(comm.all_reduce_sum(big, timeout=0.2)), CollectiveTimeoutError)
        elif comm.rank != last:
            assert isinstance(await outcome(comm.all_reduce_sum(big)), CollectiveTimeoutError)
        if comm.rank == last:
            await comm.channel("timed out").barrier()
            assert isinstance(await outcome(comm.all_reduce_sum(big)), CollectiveTimeoutError)
        else:
            await comm.channel("timed out").barrier()
        assert (await comm.all_reduce_sum(big))[7] == comm.world_size

    await run_ranks(3, body, url=fresh_url(scheme), algorithm="shared")


@pytest.mark.parametrize("scheme", SHARING)
async def test_memory_is_used_again(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    async def body(comm: AsyncCommunicator) -> None:
        heap = comm._node.heap
        assert heap is not None
        for _ in range(5):
            await comm.all_reduce_sum(np.ones(200_000))
        gc.collect()
        kept = list(heap._pool._kept)
        for _ in range(40):
            await comm.all_reduce_sum(np.ones(200_000))
        assert heap._pool._kept == kept

    await run_ranks(2, body, url=fresh_url(scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_empty(scheme: str) -> None:
    """A tensor from `empty` is an ordinary one in every respect, wherever it lies."""
    torch = pytest.importorskip("torch")

    async def body(comm: AsyncCommunicator) -> Any:
        ours = comm.empty((300, 1000), np.float32)
        theirs = comm.empty(300_000, torch.bfloat16)
        assert ours.shape == (300, 1000)
        assert ours.dtype == np.float32
        assert theirs.dtype == torch.bfloat16
        assert comm.empty(0, np.int8).size == 0
        ours[:] = comm.rank + 1
        theirs.fill_(comm.rank + 1)
        await comm.all_reduce_sum(ours, out=ours)
        await comm.all_reduce_sum(theirs, out=theirs)
        assert (ours == 3).all()
        assert bool((theirs == 3).all())
        with pytest.raises(TensorContractError, match="neither a numpy nor a torch dtype"):
            comm.empty(3, "no such thing")
        with pytest.raises(TensorContractError, match="whole numbers"):
            comm.empty((3, -1), np.float32)
        with pytest.raises(TensorContractError, match="not supported"):
            comm.empty(3, np.complex64)
        return ours

    kept = await run_ranks(2, body, url=fresh_url(scheme))
    assert (kept[0] == 3).all()  # it outlives its communicator


@pytest.mark.parametrize("scheme", SHARING)
async def test_what_is_there_already_is_offered_as_ready(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader finds it with the offer: nothing is told but that it was taken."""
    signals: list[int] = []
    signal = Operation.signal
    monkeypatch.setattr(Operation, "signal", lambda self, peer: (signals.append(peer), signal(self, peer)))

    async def body(comm: AsyncCommunicator) -> None:
        rows = comm.empty((512, 1024), np.float32)
        rows[:] = np.arange(512)[:, None] + 1000 * comm.rank
        result = await comm.all_to_all_v(rows, [256, 256])
        mine = np.arange(256) + 256 * comm.rank
        assert (result.value[:, 0] == np.concatenate([mine, 1000 + mine])).all()

    await run_ranks(2, body, url=fresh_url(scheme), algorithm="shared")
    assert sorted(signals) == [0, 1]


@pytest.mark.parametrize("field", ["board", "at", "source", "start"])
async def test_an_offer_of_memory_that_is_not_there(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer says of its memory is checked before any of it is looked at."""
    settle = feeds.Feed.settle

    def lie(self: feeds.Feed, *args: Any) -> list[feeds.Offer]:
        return [offer._replace(**{field: 1 << 40}) for offer in settle(self, *args)]

    monkeypatch.setattr(feeds.Feed, "settle", lie)

    async def body(comm: AsyncCommunicator) -> Any:
        return await outcome(comm.all_reduce_sum(np.ones(100)))

    outcomes = await run_ranks(2, body, algorithm="shared")
    assert any(isinstance(error, ProtocolError) for error in outcomes)
    assert all("offers memory that it does not have" in str(error) for error in outcomes)


@pytest.mark.parametrize("scheme", SHARING)
async def test_memory_that_is_gone_is_told_from_memory_that_never_was(scheme: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        regions = comm.node.heap.regions  # type: ignore[union-attr]
        number, view = regions.create(4096)
        view[:3] = b"abc"
        await comm.barrier()
        peer = 1 - comm.rank
        assert bytes(regions.open(peer, number)[:3]) == b"abc"
        await comm.barrier()
        regions.destroy(number)
        await comm.barrier()
        with pytest.raises(RegionDestroyed):
            regions.open(peer, number)
        with pytest.raises(LookupError):
            regions.open(peer, number + 1)
        await comm.barrier()

    await run_ranks(2, body, url=fresh_url(scheme))


async def test_who_comes_late_for_the_memory_of_a_failed_call_hears_why_it_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 stood still while rank 0 gave up and let its memory go: no fault of rank 0's."""

    async def body(comm: AsyncCommunicator) -> Any:
        if comm.rank == 1:
            regions = comm.node.heap.regions  # type: ignore[union-attr]

            def gone(peer: int, number: int) -> memoryview:
                raise RegionDestroyed(peer, number)

            with monkeypatch.context() as patch:
                patch.setattr(regions, "open", gone)
                found = await outcome(comm.all_reduce_sum(np.ones(100)))
        else:
            found = await outcome(comm.all_reduce_sum(np.ones(100), timeout=0.3))
        same = await comm.all_reduce_sum(np.ones(3))  # the communicator works on
        assert (same == 2).all()
        return found

    ours, theirs = await run_ranks(2, body, algorithm="shared")
    assert isinstance(ours, CollectiveTimeoutError)
    assert isinstance(theirs, CollectiveTimeoutError)
    assert theirs.rank == 0
    assert "rank 0 gave up" in str(theirs)
    assert "raise timeout=" in str(theirs)
