"""Channels, subgroups and many calls in flight."""

from __future__ import annotations

import asyncio
import os
import random
import time

import numpy as np
import pytest
from support import run_ranks

from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    CollectiveMismatchError,
    CommunicatorClosedError,
    ConfigError,
)


async def test_channels_entered_in_different_orders(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        names = [f"request-{i}" for i in range(200)]
        random.Random(comm.rank).shuffle(names)

        async def request(name: str) -> None:
            number = int(name.split("-")[1])
            async with comm.channel(name) as channel:
                total = await channel.all_reduce_sum(np.array([number * 1000.0 + comm.rank]))
                assert total[0] == 3 * 1000.0 * number + 3

        await asyncio.gather(*map(request, names))
        assert comm.stats()["channels"] == 1

    await run_ranks(3, body, url=url)


async def test_calls_of_one_channel_match_by_order(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        results = await asyncio.gather(
            *(comm.all_reduce_sum(np.full(1 + 977 * (i % 3), float(i))) for i in range(50))
        )
        for i, result in enumerate(results):
            assert result.shape == (1 + 977 * (i % 3),)
            assert (result == 3.0 * i).all()

    await run_ranks(3, body, url=url)


async def test_channel_is_made_without_communication() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        before = comm.stats()["peers"]
        comm.channel("a").channel("b")
        assert comm.channel("a").channel("b").name == "a/b"
        assert comm.stats()["peers"] == before

    await run_ranks(2, body)


async def test_closed_channel_refuses_and_can_be_opened_again(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        channel = comm.channel("x")
        await channel.barrier()
        await channel.close()
        with pytest.raises(CommunicatorClosedError, match="'x'"):
            await channel.barrier()
        await comm.channel("x").barrier()
        await comm.barrier()

    await run_ranks(2, body, url=url)


async def test_channel_names_are_checked() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for bad in ("", 7, None):
            with pytest.raises(ConfigError):
                comm.channel(bad)  # type: ignore[arg-type]

    await run_ranks(1, body)


async def test_split_orders_by_key(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        group = await comm.split(comm.rank % 2, key=-comm.rank)
        assert group is not None
        members = [r for r in reversed(range(5)) if r % 2 == comm.rank % 2]
        assert group.world_size == len(members)
        assert members[group.rank] == comm.rank
        gathered = await group.all_gather(np.array([comm.rank]))
        assert gathered.tolist() == members

    await run_ranks(5, body, url=url)


async def test_split_without_a_color(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        group = await comm.split(None if comm.rank == 1 else 7)
        assert (group is None) == (comm.rank == 1)
        if group is not None:
            assert (await group.all_gather(np.array([comm.rank]))).tolist() == [0, 2]
        again = await comm.split(0)
        assert again is not None
        assert again.world_size == 3
        await again.barrier()

    await run_ranks(3, body, url=url)


async def test_grid_of_groups(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        row = await comm.split(comm.rank // 2)
        column = await comm.split(comm.rank % 2)
        assert row is not None
        assert column is not None
        rows, columns = await asyncio.gather(
            row.all_reduce_sum(np.array([float(comm.rank)])),
            column.all_reduce_sum(np.array([float(comm.rank)])),
        )
        assert rows[0] == [1, 1, 5, 5][comm.rank]
        assert columns[0] == [2, 4, 2, 4][comm.rank]

    await run_ranks(4, body, url=url)


async def test_many_calls_do_not_starve_the_loop(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        turns = 0

        async def ticker() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        ticking = asyncio.ensure_future(ticker())
        for _ in range(640):
            await comm.all_reduce_sum(np.ones(1))
        ticking.cancel()
        assert turns >= 15

    await run_ranks(1, body, url=url)


async def test_reopened_while_another_rank_is_still_in_the_former_life(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        gate = comm.channel("gate")
        for turn in range(3):
            async with comm.channel("again") as channel:
                total = await channel.all_reduce_sum(np.array([float(turn)]))
                assert total[0] == 2 * turn
                if comm.rank:  # the other rank is two calls ahead by now
                    for _ in range(20):
                        await asyncio.sleep(0)
        await gate.barrier()

    await run_ranks(2, body, url=url)


async def test_closed_here_while_large_messages_are_under_way(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for turn in range(30):
            channel = comm.channel(f"turn {turn}")
            task = asyncio.ensure_future(channel.all_reduce_sum(np.ones(60_000)))
            for _ in range(turn % 6):
                await asyncio.sleep(0)
            if comm.rank == 0 and turn % 6:
                await channel.close()
            await asyncio.gather(task, return_exceptions=True)
            await channel.close()
            await comm.barrier()

    await run_ranks(2, body, url=url)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [2, 4], ids=["thousand-of-two", "hundreds-of-four"])
async def test_many_channels_in_flight_entered_in_another_order_on_each_rank(url: str, ranks: int) -> None:
    """As in a server: an uneven exchange, a sum and the way back, all begun before any can end."""
    count = 4000 // ranks**2  # as many messages, whatever the number of ranks

    async def body(comm: AsyncCommunicator) -> None:
        order = list(range(count))
        random.Random(f"{comm.rank} of {ranks}").shuffle(order)
        begun = 0
        all_begun = asyncio.Event()

        async def request(number: int) -> None:
            nonlocal begun
            async with comm.channel(f"request-{number}") as channel:
                begun += 1
                if begun == count:
                    all_begun.set()
                if comm.rank == number % ranks:  # the others wait for this rank
                    await all_begun.wait()
                counts = [(number + comm.rank + peer) % 3 for peer in range(ranks)]
                values = [number * 100.0 + comm.rank * 10 + peer for peer in range(ranks)]
                rows = np.repeat(np.array(values), counts)[:, None]
                there = await channel.all_to_all_v_float(rows, counts)
                expected = [
                    number * 100.0 + peer * 10 + comm.rank
                    for peer in range(ranks)
                    for _ in range((number + comm.rank + peer) % 3)
                ]
                assert there.value[:, 0].tolist() == expected
                total = await channel.all_reduce_sum(np.array([float(number)]))
                assert total.tolist() == [ranks * float(number)]
                back = await channel.all_to_all_v_float(there.value, there.receive_counts)
                np.testing.assert_array_equal(back.value, rows)

        await asyncio.gather(*map(request, order))
        stats = comm.stats()
        assert (stats["channels"], stats["in_flight"], stats["failed"]) == (1, 0, 0)

    await run_ranks(ranks, body, url=url, limit=110, timeout=100)


async def test_subgroup_is_made_without_communication(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        order = (3, 0, 2)
        if comm.rank == 1:
            with pytest.raises(ConfigError, match="only its members"):
                comm.subgroup(order, "some")
            return
        some = comm.subgroup(order, "some")
        assert (some.rank, some.world_size) == (order.index(comm.rank), 3)
        assert (await some.all_gather(np.array([comm.rank]))).tolist() == list(order)
        other = comm.subgroup(sorted(order), "some")  # other ranks or another order: another channel
        first, second = await asyncio.gather(
            some.all_gather(np.array([comm.rank])), other.all_gather(np.array([comm.rank]))
        )
        assert (first.tolist(), second.tolist()) == ([3, 0, 2], [0, 2, 3])
        pair = some.subgroup((0, 1), "pair") if comm.rank in (0, 3) else None  # numbers of the parent
        if pair is not None:
            assert (await pair.all_gather(np.array([comm.rank]))).tolist() == [3, 0]

    await run_ranks(4, body, url=url)


async def test_subgroups_are_checked() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for ranks in ((0, 0, 1), (0, 2), (-1, 0), (0, True)):
            with pytest.raises(ConfigError):
                comm.subgroup(ranks, "x")
        with pytest.raises(ConfigError):
            comm.subgroup((0, 1), "")

    await run_ranks(2, body)


SOAK_SECONDS = float(os.environ.get("RUDA_SOAK_SECONDS", "120"))


@pytest.mark.long
@pytest.mark.timeout(SOAK_SECONDS + 300)
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the process's memory from /proc")
async def test_soak_of_short_channels(url: str) -> None:
    """Hundreds in flight, always new names, some cancelled: right results, and memory stays."""

    def memory() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def body(comm: AsyncCommunicator) -> tuple[int, int]:
        made = 0

        async def request(number: int) -> None:
            async with comm.channel(f"request-{number}") as channel:
                if number % 50 == 7 and comm.rank == 1:
                    calling = asyncio.ensure_future(channel.barrier())
                    await asyncio.sleep(0)
                    calling.cancel()
                    await asyncio.wait([calling])
                    return
                try:
                    total = await channel.all_reduce_sum(np.full(64, float(number + comm.rank)))
                except (CollectiveCancelledError, CollectiveMismatchError):
                    assert number % 50 == 7
                    return
                assert (total == 3.0 * number + 3).all()
                assert number % 50 != 7

        async def turn() -> None:
            nonlocal made
            numbers = list(range(made, made + 300))
            random.Random(comm.rank + made).shuffle(numbers)
            await asyncio.gather(*map(request, numbers))
            made += 300

        while made < 36_000:  # so many closed channels are remembered
            await turn()
        before = memory()
        ends = time.monotonic() + SOAK_SECONDS
        while await comm.all_reduce(np.array([int(time.monotonic() < ends)]), "min"):
            await turn()
        assert comm.stats()["channels"] == 1
        return before, memory()

    for before, after in await run_ranks(3, body, url=url, limit=SOAK_SECONDS + 280, timeout=60):
        assert after < before * 1.1 + 16e6, (before, after)
