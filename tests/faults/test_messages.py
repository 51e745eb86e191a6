"""Faults by messages: late, slow, out of order, stalled, killed."""

from __future__ import annotations

import asyncio
import signal
import time

import numpy as np
import pytest
from failure_support import rank_processes
from support import BETWEEN_PROCESSES, SCHEMES, fresh_url, outcome, run_ranks

from ruda_async import AsyncCommunicator, CollectiveTimeoutError, CommunicatorClosedError, PeerLostError


def faulty(scheme: str, query: str) -> str:
    return f"faults+{fresh_url(scheme)}?{query}"


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def add_up(comm: AsyncCommunicator) -> None:
    """Small and large sums, and an uneven exchange, against what they have to be."""
    for size in (1, 1000, 300_000):
        total = await comm.all_reduce_sum(np.arange(size, dtype=np.float64) + comm.rank)
        ranks = comm.world_size
        assert (total == np.arange(size) * ranks + ranks * (ranks - 1) / 2).all()
    counts = [(comm.rank + peer) % 3 for peer in range(comm.world_size)]
    rows = np.repeat(np.arange(comm.world_size), counts).astype(np.float32) + 100 * comm.rank
    exchange = await comm.all_to_all_v_float(rows, counts)
    assert list(exchange.receive_counts) == counts  # symmetric
    expected = np.repeat(100 * np.arange(comm.world_size) + comm.rank, counts)
    assert exchange.value.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "query",
    ["delay_ms=2", "jitter_ms=5", "jitter_ms=5&reorder=true", "bandwidth=100M", "delay_ms=1&bandwidth=500M",
     "jitter_ms=10&only_rank=2", "duplicate=true"],
)  # fmt: skip
async def test_collectives_are_right_whenever_messages_come(scheme: str, query: str) -> None:
    await run_ranks(4, add_up, url=faulty(scheme, query), limit=50, timeout=40)


async def test_a_delay_is_at_least_that_long_and_one_way(scheme: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        started = time.monotonic()
        if comm.rank == 0:
            await comm.send(np.ones(1), 1)
            await comm.recv(1)
        else:
            await comm.recv(0)
            await comm.send(np.ones(1), 0)
        assert time.monotonic() - started >= 0.079  # there late, back at once

    await run_ranks(2, body, url=faulty(scheme, "delay_ms=80&only_rank=0"))


async def test_a_slow_line_takes_its_time(scheme: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            started = time.monotonic()
            await asyncio.gather(*(comm.send(np.ones(25_000), 1) for _ in range(2)))
            assert time.monotonic() - started >= 0.19
        else:
            for _ in range(2):
                await comm.recv(0)

    await run_ranks(2, body, url=faulty(scheme, "bandwidth=2000kB"))


async def test_tags_overtake_each_other_and_keep_their_own_order(scheme: str) -> None:
    tags, turns = 12, 4

    async def body(comm: AsyncCommunicator) -> None:
        arrived: list[tuple[int, int]] = []

        async def receive(tag: int) -> None:
            for turn in range(turns):
                value = await comm.recv(0, tag=tag)
                assert value.tolist() == [tag, turn]
                arrived.append((tag, turn))

        if comm.rank == 0:
            sends = [
                comm.send(np.array([tag, turn]), 1, tag=tag) for turn in range(turns) for tag in range(tags)
            ]
            await asyncio.gather(*sends)
        else:
            await asyncio.gather(*map(receive, range(tags)))
            assert arrived != sorted(arrived, key=lambda one: one[::-1])
        await comm.barrier()

    await run_ranks(2, body, url=faulty(scheme, "jitter_ms=40&reorder=true&seed=3"))


async def test_a_stalled_rank_is_a_deadline_and_the_others_say_so(scheme: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        error = None
        while error is None:
            error = await outcome(comm.all_reduce_sum(np.ones(10), timeout=0.5))
            error = error if isinstance(error, Exception) else None
        assert isinstance(error, CollectiveTimeoutError)

    await run_ranks(3, body, url=faulty(scheme, "stall_after=20&only_rank=1&linger=0.2" if scheme != "memory"
                                        else "stall_after=20&only_rank=1"))  # fmt: skip


async def test_a_delayed_send_can_be_taken_back() -> None:
    """Cancelled while it is held, it never happens; the next message of the tag is the next one sent."""

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            first = asyncio.ensure_future(comm.send(np.array([1]), 1, tag=5))
            await asyncio.sleep(0)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
        await comm.channel("after").barrier()

    await run_ranks(2, body, url=faulty("memory", "delay_ms=100&only_rank=0"))


async def test_close_delivers_what_was_accepted() -> None:
    async def body(comm: AsyncCommunicator) -> float:
        if comm.rank == 0:
            sending = comm._node.transport.send(1, 1 << 50, (memoryview(b"late"),))
            await comm.close()
            return float(await outcome(sending) is None)
        buffer = bytearray(4)
        await comm._node.transport.recv_into(0, 1 << 50, (memoryview(buffer),))
        assert buffer == b"late"
        return 1.0

    assert await run_ranks(2, body, url=faulty("memory", "delay_ms=150&only_rank=0")) == [1, 1]


async def test_a_rank_that_is_a_task_dies_by_dropping_its_links() -> None:
    async def body(comm: AsyncCommunicator) -> str:
        error = None
        while error is None:
            error = await outcome(comm.all_reduce_sum(np.ones(10)))
            error = error if isinstance(error, Exception) else None
        if comm.rank == 1:
            assert isinstance(error, CommunicatorClosedError | PeerLostError)
            return "dead"
        assert isinstance(error, PeerLostError)
        assert error.rank == 1
        smaller = await comm.shrink()
        assert smaller.world_size == 2
        return str((await smaller.all_reduce_sum(np.ones(1)))[0])

    assert await run_ranks(3, body, url=faulty("memory", "kill_after=9&only_rank=1")) == [
        "2.0",
        "dead",
        "2.0",
    ]


@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_a_rank_that_is_a_process_is_killed(scheme: str) -> None:
    with rank_processes(faulty(scheme, "kill_after=60&only_rank=2"), 4) as ranks:
        for number in (0, 1, 3):
            assert ranks[number].words()[:2] == ["lost", "2"]
            assert ranks[number].words()[:1] == ["shrunk"]
        assert ranks[2].wait() == -signal.SIGKILL
