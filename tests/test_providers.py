"""Whole collectives that a transport runs natively: choice, results, agreement, failure, order of turns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_provider import TablePlugin
from support import outcome, run_ranks

from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    RudaError,
    TensorContractError,
)
from ruda_async.collectives.native import Native
from ruda_async.transport.registry import register_plugin, unregister_plugin


@pytest.fixture(params=[True, False], ids=["exact", "any order"])
def plugin(request: pytest.FixtureRequest) -> Iterator[TablePlugin]:
    table = TablePlugin(exact=request.param)
    register_plugin(table)
    yield table
    unregister_plugin(table.scheme)


@pytest.fixture
def exact() -> Iterator[TablePlugin]:
    table = TablePlugin()
    register_plugin(table)
    yield table
    unregister_plugin(table.scheme)


async def everything(comm: AsyncCommunicator) -> list[Any]:
    """One call of each collective; all results as lists."""
    rank, size = comm.rank, comm.world_size
    rng = np.random.default_rng(rank)
    x = rng.standard_normal((size * 3, 2)).astype(np.float32)
    whole = np.arange(size * 4).reshape(size * 2, 2)
    counts = [(rank + peer) % 3 for peer in range(size)]
    rows = rng.integers(0, 1000, (sum(counts), 2))
    exchange = await comm.all_to_all_v(rows, counts)
    gathered = await comm.all_gather_v(rows[: rank + 1])
    into = np.zeros((size * size * 3, 2), np.float32)
    into[rank * size * 3 : (rank + 1) * size * 3] = x
    same = x.copy()
    results: list[Any] = [
        await comm.all_reduce(x),
        await comm.all_reduce(x.astype(np.float16), "mean"),
        await comm.all_reduce(same, out=same),
        await comm.all_reduce(whole, "max"),
        await comm.reduce(x, 1),
        await comm.reduce_scatter(x),
        await comm.reduce_scatter_dim(x.T, 1),
        await comm.all_gather(x),
        await comm.all_gather(into[rank * size * 3 : (rank + 1) * size * 3], out=into),
        await comm.all_gather_dim(x, 1),
        gathered.value,
        gathered.receive_counts,
        await comm.gather(x, 1),
        await comm.broadcast(x, 1),
        await comm.scatter(whole if rank == 1 else None, 1),
        await comm.all_to_all(x),
        exchange.value,
        exchange.receive_counts,
        await comm.barrier(),
    ]
    return [None if result is None else np.asarray(result).tolist() for result in results]


OPERATIONS = {
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "all_gather",
    "all_gather_v",
    "gather",
    "broadcast",
    "scatter",
    "all_to_all",
    "all_to_all_v",
    "barrier",
}


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
async def test_results_are_those_of_the_tables(exact: TablePlugin, world_size: int) -> None:
    if world_size == 1:

        async def small(comm: AsyncCommunicator) -> Any:
            await comm.barrier()
            return (await comm.all_reduce(np.ones(2))).tolist()

        assert await run_ranks(1, small, url=exact.example) == [[1, 1]]
        assert not exact.providers[0].ran
        return
    native = await run_ranks(world_size, everything, url=exact.example)
    assert native == await run_ranks(world_size, everything)
    for provider in exact.providers.values():
        assert {call.operation for _, call in provider.ran} == OPERATIONS
        assert not provider.failed
        assert not provider.overlaps


async def test_an_order_of_its_own_is_for_those_who_allow_it(plugin: TablePlugin) -> None:
    async def body(comm: AsyncCommunicator) -> list[str]:
        x = np.ones(100, np.float32)
        await comm.all_reduce(x)
        await comm.all_reduce(x, order="any")
        await comm.all_reduce(np.ones(100, np.int64))
        return [comm.explain("all_reduce", 400), comm.explain("all_gather", 400)]

    explained = (await run_ranks(2, body, url=plugin.example))[0]
    runs = [call.dtype for _, call in plugin.providers[0].ran]
    assert runs == (["float32"] * 2 if plugin.exact else ["float32"]) + ["int64"]
    table = ["table, the table is near" in text for text in explained]
    assert table == [plugin.exact, True]


async def test_who_is_asked_for_by_name(exact: TablePlugin) -> None:
    async def body(comm: AsyncCommunicator) -> str:
        await comm.all_gather(np.ones(4, np.int8))
        return comm.explain("all_gather", 4)

    def native() -> list[str]:
        return [call.operation for _, call in exact.providers[0].ran]

    await run_ranks(2, body, url=exact.example)
    assert native() == []  # it would not take int8 unasked
    text = (await run_ranks(2, body, url=exact.example, algorithm="table"))[0]
    assert native() == ["all_gather"]
    assert "table, asked for by algorithm='table'" in text
    await run_ranks(2, body, url=exact.example, algorithm="direct")
    assert native() == []
    text = (await run_ranks(3, body, url=exact.example, algorithm="table"))[0]
    assert native() == []
    assert "direct, " in text
    assert "algorithm='table' is not taken: it takes no groups of three" in text
    with pytest.raises(ConfigError, match=r"'tabel' is not known; there are table, "):
        await run_ranks(2, body, url=exact.example, algorithm="tabel")


async def test_a_byte_budget_is_kept_by_the_tables(exact: TablePlugin) -> None:
    async def body(comm: AsyncCommunicator) -> str:
        bounded = comm.bounded(64)
        await bounded.all_reduce(np.ones(100))
        return bounded.explain("all_reduce", 800)

    text = (await run_ranks(2, body, url=exact.example))[0]
    assert "table" not in text
    assert not exact.providers[0].ran


async def test_subgroups_channels_and_what_a_provider_is_told(exact: TablePlugin) -> None:
    async def body(comm: AsyncCommunicator) -> float:
        group = await comm.split(comm.rank % 2, key=-comm.rank)
        assert group is not None
        channel = group.channel("request")
        total = float((await channel.all_reduce(np.array([float(comm.rank)])))[0])
        await channel.close()
        return total

    assert await run_ranks(4, body, url=exact.example) == [2, 4, 2, 4]
    for rank, provider in exact.providers.items():
        group, call = provider.ran[-1]
        assert group.members == ((2, 0), (3, 1))[rank % 2]
        assert group.members[group.rank] == rank
        assert (call.operation, call.operator, call.nbytes, call.size) == ("all_reduce", "sum", 8, 2)
        assert provider.forgotten.count(group.channel) == 1


async def test_bad_input_and_mismatches_are_found_before_it_runs(exact: TablePlugin) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        bad = np.ones(3, np.complex64) if comm.rank == 1 else np.ones(3)
        error = await outcome(comm.all_reduce(bad))
        assert isinstance(error, TensorContractError)
        assert error.rank == 1
        error = await outcome(comm.all_gather(np.ones(3 + comm.rank % 2)))
        assert isinstance(error, CollectiveMismatchError)
        counts = [2, 2] if comm.rank else [1, 1]
        error = await outcome(comm.all_to_all_v(np.ones((4, 1)), counts))
        assert isinstance(error, TensorContractError)
        assert float((await comm.all_reduce(np.ones(1)))[0]) == 2

    await run_ranks(2, body, url=exact.example)
    for provider in exact.providers.values():
        assert [group.sequence for group, _ in provider.ran] == [3]
        assert not provider.failed


async def start_and_hold(comm: AsyncCommunicator, plugin: TablePlugin, timeout: float) -> asyncio.Future[Any]:
    """An all-reduce that is in its provider's hands on both ranks and does not end."""
    await comm.channel("set-up").barrier()
    own = plugin.providers[comm.rank]
    own.go.clear()
    call = asyncio.ensure_future(comm.all_reduce(np.ones(2), timeout=timeout))
    while not all(any(g.sequence == 0 for g, _ in p.ran[1:]) for p in plugin.providers.values()):
        await asyncio.sleep(0)
    return call


async def go_on(comm: AsyncCommunicator, plugin: TablePlugin) -> None:
    """The channel works again, and meets nothing of the call that ended early."""
    own = plugin.providers[comm.rank]
    own.go.set()
    assert float((await comm.all_reduce(np.ones(1)))[0]) == 2
    assert own.ran[-1][0].epoch == 1
    assert [group.sequence for group, _ in own.failed] == [0]
    assert not own.running


async def test_a_cancelled_call_ends_on_all_ranks_and_leaves_nothing_behind(exact: TablePlugin) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        call = await start_and_hold(comm, exact, 20)
        if comm.rank == 0:
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            error = await outcome(call)
            assert isinstance(error, CollectiveCancelledError)
            assert error.rank == 0
        await go_on(comm, exact)

    await run_ranks(2, body, url=exact.example)


async def test_a_deadline_ends_a_native_call(exact: TablePlugin) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        call = await start_and_hold(comm, exact, 0.2 if comm.rank else 20)
        error = await outcome(call)
        assert isinstance(error, CollectiveTimeoutError)
        assert error.rank == 1
        await go_on(comm, exact)

    await run_ranks(2, body, url=exact.example)


async def test_a_provider_that_breaks_fails_the_call_everywhere(exact: TablePlugin) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        own = exact.providers[comm.rank]
        if comm.rank == 0:
            own.break_with = OSError("no memory on the device")
        error = await outcome(comm.all_reduce(np.ones(2), timeout=20))
        if comm.rank == 0:
            assert isinstance(error, OSError)
        else:
            assert isinstance(error, RudaError)
            assert "no memory on the device" in str(error)
        own.break_with = None
        await go_on(comm, exact)

    await run_ranks(2, body, url=exact.example)


async def test_one_rank_that_never_began_starts_the_new_epoch_too(exact: TablePlugin) -> None:
    """Rank 0 gives up while rank 1 has not come; then both make the next call."""

    async def body(comm: AsyncCommunicator) -> None:
        other = comm.channel("other")
        if comm.rank == 0:
            call = asyncio.ensure_future(comm.all_reduce(np.ones(2)))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await other.barrier()
        else:
            await other.barrier()
            error = await outcome(comm.all_reduce(np.ones(2)))
            assert isinstance(error, CollectiveCancelledError)
        assert float((await comm.all_reduce(np.ones(1)))[0]) == 2
        assert exact.providers[comm.rank].ran[-1][0].epoch == 1
        assert not exact.providers[comm.rank].failed

    await run_ranks(2, body, url=exact.example)


async def test_calls_of_a_channel_come_in_turn_and_channels_at_once(exact: TablePlugin) -> None:
    async def body(comm: AsyncCommunicator) -> list[float]:
        channels = [comm, comm.channel("a"), comm.channel("b")]
        calls = [
            channel.all_reduce(np.full(2, float(10 * turn + number)))
            for turn in range(20)
            for number, channel in enumerate(channels)
        ]
        return [float(result[0]) for result in await asyncio.gather(*calls)]

    results = await run_ranks(3 + 1, body, url=exact.example)
    assert results[0] == [4.0 * (10 * turn + number) for turn in range(20) for number in range(3)]
    for provider in exact.providers.values():
        assert not provider.overlaps
        for channel in {group.channel for group, _ in provider.ran}:
            sequences = [group.sequence for group, _ in provider.ran if group.channel == channel]
            assert sequences == list(range(20))


async def test_a_channel_opened_again_is_another_epoch(exact: TablePlugin) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for _ in range(3):
            channel = comm.channel("again")
            assert float((await channel.all_reduce(np.ones(1)))[0]) == 2
            await channel.close()
        epochs = [group.epoch for group, _ in exact.providers[comm.rank].ran]
        assert epochs == [0, 1, 2]

    await run_ranks(2, body, url=exact.example)


async def test_a_failure_that_comes_right_after_the_agreement_ends_the_call(
    exact: TablePlugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer's notice is there before the agreed call goes on: nothing may be begun any more."""

    async def agree(self: Native, link: Any, lane: int = 15) -> None:
        await original(self, link, lane)
        if link.rank == 1 and link.sequence == 0:
            link.fail(RudaError("told at the last moment"), here=False)

    original = Native._agree
    monkeypatch.setattr(Native, "_agree", agree)

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 1:
            with pytest.raises(RudaError, match="at the last moment"):
                await comm.all_reduce(np.ones(1))
            assert not exact.providers[1].ran
        else:
            call = asyncio.ensure_future(comm.all_reduce(np.ones(1)))
            while not exact.providers[0].running:
                await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert float((await comm.all_reduce(np.ones(1)))[0]) == 2

    await run_ranks(2, body, url=exact.example)
