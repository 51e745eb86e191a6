"""Sends and receives between two ranks."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest
from support import counting_turns, outcome, run_ranks

from ruda_async import (
    AsyncCommunicator,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    PeerLostError,
    TensorContractError,
)

torch = pytest.importorskip("torch")


async def test_shape_and_dtype_come_with_the_message(url: str) -> None:
    sent = [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.float64(2.5),
        np.zeros((0, 4), np.uint8),
        np.arange(300_000, dtype=np.float32)[::-3],
        np.array([True, False]),
    ]

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            for value in sent:
                await comm.send(value, 1)
        else:
            for value in sent:
                got = await comm.recv(0)
                assert got.dtype == value.dtype
                assert got.shape == value.shape
                np.testing.assert_array_equal(got, value)

    await run_ranks(2, body, url=url)


async def test_torch_and_out(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            await comm.send(torch.arange(5, dtype=torch.bfloat16), 1, tag=3)
            await comm.send(torch.ones(4), 1, tag=4)
        else:
            got = await comm.recv(0, tag=3, like=torch.empty(0))
            assert got.dtype == torch.bfloat16
            assert got.tolist() == [0, 1, 2, 3, 4]
            wrong = np.zeros(5, np.float32)
            with pytest.raises(TensorContractError, match="float32"):
                await comm.recv(0, tag=4, out=wrong)
            out = np.zeros(4, np.float32)  # the message was left for the next receive
            assert await comm.recv(0, tag=4, out=out) is out
            assert out.tolist() == [1, 1, 1, 1]

    await run_ranks(2, body, url=url)


async def test_twenty_tags_received_in_reverse(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        peer = 1 - comm.rank
        sends = [
            asyncio.ensure_future(comm.send(np.full(30_000, float(tag)), peer, tag=tag)) for tag in range(20)
        ]
        for tag in reversed(range(20)):
            assert (await comm.recv(peer, tag=tag) == tag).all()
        await asyncio.gather(*sends)

    await run_ranks(2, body, url=url)


async def test_large_messages_both_ways_at_once(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        peer = 1 - comm.rank
        mine = np.arange(16 << 20, dtype=np.float32) + comm.rank
        _, got = await asyncio.gather(comm.send(mine, peer), comm.recv(peer))
        assert got[0] == peer
        assert got[-1] == np.float32(len(mine) - 1) + np.float32(peer)

    await run_ranks(2, body, url=url)


@pytest.mark.parametrize("count", [4, 600_000])
async def test_expired_receive_loses_nothing(url: str, count: int) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(comm.recv(1), 0.05)
            with pytest.raises(CollectiveTimeoutError) as caught:
                await comm.recv(1, timeout=0.05)
            assert "see that rank 1 sends with this tag, or raise timeout=" in str(caught.value)
            assert caught.value.missing == (1,)
            await comm.barrier()
            for i in range(3):
                assert (await comm.recv(1) == i).all()
        else:
            await comm.barrier()
            for i in range(3):
                await comm.send(np.full(count, float(i)), 0)

    await run_ranks(2, body, url=url)


async def test_a_receive_from_any_rank_passes_nobody_over(url: str) -> None:
    """Of ranks whose messages are all there, each has its turn."""

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            await comm.barrier()
            sources = [(await comm.recv_any())[1] for _ in range(12)]
            assert sources == [1, 2, 3] * 4
        else:
            for i in range(4):
                await comm.send(np.full(2, float(i)), 0)
            await comm.barrier()

    await run_ranks(4, body, url=url)


@pytest.mark.parametrize("any_source", [False, True])
async def test_a_send_that_is_cancelled_in_any_moment_gives_way_to_the_next(
    url: str, any_source: bool
) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for turns in range(24):
            if comm.rank == 0:
                sending = asyncio.ensure_future(comm.send(np.full(600_000, 1.0), 1))
                for _ in range(turns):
                    await asyncio.sleep(0)
                sending.cancel()
                await asyncio.wait((sending,))
                await comm.send(np.full(7, 2.0), 1)
            else:
                got = np.zeros(0)
                while got.shape != (7,):
                    got, source = await comm.recv_any() if any_source else (await comm.recv(0), 0)
                    assert source == 0
                    assert (got == (2.0 if got.shape == (7,) else 1.0)).all()
            await comm.barrier()

    await run_ranks(2, body, url=url)


async def test_receives_of_one_tag_are_served_in_order(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            receives = [asyncio.ensure_future(comm.recv(1)) for _ in range(10)]
            await asyncio.sleep(0)
            receives[3].cancel()
            await comm.barrier()
            got = [
                int(r[0])
                for i, r in enumerate(await asyncio.gather(*receives, return_exceptions=True))
                if i != 3
            ]
            assert got == list(range(9))
            assert receives[3].cancelled()
        else:
            await comm.barrier()
            for i in range(9):
                await comm.send(np.array([i]), 0)

    await run_ranks(2, body, url=url)


@pytest.mark.parametrize("derive", ["channel", "bounded"])
async def test_communicators_of_one_channel_take_turns_too(derive: str) -> None:
    def again(comm: AsyncCommunicator) -> AsyncCommunicator:
        return comm.channel("one") if derive == "channel" else comm.bounded(1000)

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            receives = [asyncio.ensure_future(again(comm).recv(1)) for _ in range(3)]
            await comm.barrier()
            assert [int(value[0]) for value in await asyncio.gather(*receives)] == [0, 1, 2]
        else:
            await comm.barrier()
            for i in range(3):
                await again(comm).send(np.full(2, i), 0)

    await run_ranks(2, body)


@pytest.mark.parametrize("any_source", [False, True])
async def test_delivered_messages_outlive_their_sender(url: str, any_source: bool) -> None:
    """Receives that are called after it has closed read them, in order."""
    sizes = (4, 1000, 1, 0, 700)

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            for i, size in enumerate(sizes):
                await comm.send(np.full(size, i), 1)
            await comm.close()
        else:
            with pytest.raises(PeerLostError):
                await comm.recv(0, tag=9)
            for i, size in enumerate(sizes):
                got, _ = await comm.recv_any() if any_source else (await comm.recv(0), 0)
                assert got.tolist() == [i] * size
            with pytest.raises(PeerLostError) as caught:
                await (comm.recv_any() if any_source else comm.recv(0))
            assert caught.value.rank == 0
            assert caught.value.orderly

    await run_ranks(2, body, url=url)


async def test_bad_arguments() -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for call, text in (
            (comm.send(np.ones(1), 2), "ranks 0 to 1"),
            (comm.send(np.ones(1), comm.rank), "itself"),
            (comm.recv(-1), "ranks 0 to 1"),
            (comm.recv(1 - comm.rank, tag=-2), "tag"),
            (comm.send("no tensor", 1 - comm.rank), "str"),
        ):
            error = await outcome(call)
            assert isinstance(error, TensorContractError)
            assert text in str(error)

    await run_ranks(2, body)


async def test_receive_from_any(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            sources = []
            for _ in range(4):
                value, source = await comm.recv_any(tag=3)
                assert value.tolist() == [source] * 3
                sources.append(source)
            assert sorted(sources) == [1, 1, 2, 2]
            out = np.zeros(3, dtype=np.int64)
            same, source = await comm.recv_any(tag=4, out=out)
            assert same is out
            assert source == 2
        else:
            for _ in range(2):
                await comm.send(np.full(3, comm.rank), 0, tag=3)
            if comm.rank == 2:
                await comm.send(np.full(3, 7), 0, tag=4)
        await comm.barrier()

    await run_ranks(3, body, url=url)


async def test_receive_from_any_waits_its_turn_and_leaves_others_theirs(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank:
            await comm.barrier()
            await comm.send(np.array([10 * comm.rank]), 0)
            await comm.send(np.array([10 * comm.rank + 1]), 0)
            return
        from_one = asyncio.ensure_future(comm.recv(1))
        from_any = asyncio.ensure_future(comm.recv_any())
        with pytest.raises(CollectiveTimeoutError) as timeout:
            await comm.recv_any(tag=9, timeout=0.05)
        assert "see that any rank sends with this tag" in str(timeout.value)
        assert timeout.value.missing == (1, 2)
        await comm.barrier()
        assert (await from_one).tolist() == [10]  # it was called first
        value, source = await from_any
        assert value.tolist() == [{1: 11, 2: 20}[source]]
        rest = {1: [11], 2: [21]} if source == 2 else {2: [20, 21]}
        for rank, values in rest.items():
            assert [(await comm.recv(rank)).item() for _ in values] == values

    await run_ranks(3, body, url=url)


async def test_receive_from_any_goes_on_while_one_may_send(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            value, source = await comm.recv_any()
            assert (value.tolist(), source) == ([5], 2)
            with pytest.raises(PeerLostError):
                await comm.recv_any()
        elif comm.rank == 2:
            with pytest.raises(PeerLostError):
                await comm.recv(1)  # rank 1 is gone
            await comm.send(np.array([5]), 0)

    await run_ranks(3, body, url=url)


async def test_sends_that_need_not_wait_let_the_loop_turn(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        async with counting_turns() as turns:
            if comm.rank == 0:
                for number in range(320):
                    await comm.send(np.array([number]), 1)
                assert turns() > 5
            await comm.barrier()
            if comm.rank == 1:
                before = turns()
                for number in range(320):
                    assert await comm.recv(0) == [number]
                assert turns() - before > 5

    await run_ranks(2, body, url=url)


async def test_transfers_between_survivors_end_when_a_third_rank_is_lost(url: str) -> None:
    """As collectives do: else a survivor would wait for one that has gone on to shrink."""

    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        if comm.rank == 1:
            comm.abort("it is gone")
            return
        peer = 2 - comm.rank
        waiting = [comm.recv(peer), comm.recv(peer), comm.recv_any(tag=7)]
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        ends += await asyncio.gather(comm.recv(peer), return_exceptions=True)  # a later one too
        assert [(type(end), end.rank) for end in ends] == [(PeerLostError, 1)] * 4  # type: ignore[union-attr]
        smaller = await comm.shrink()
        await smaller.send(np.array([comm.rank]), 1 - smaller.rank)
        assert await smaller.recv(1 - smaller.rank) == [peer]

    await run_ranks(3, body, url=url, timeout=60)


@pytest.mark.parametrize("derived", [False, True])
async def test_close_ends_transfers_in_flight_and_says_that_it_did(url: str, derived: bool) -> None:
    """As it does collectives: it was not the peer who closed, and nothing is left to wait for."""

    async def body(comm: AsyncCommunicator) -> None:
        channel = comm.channel("side") if derived else comm
        await comm.barrier()
        if comm.rank == 0:
            calls = (
                channel.send(np.ones(1 << 22), 1),
                channel.recv(1),
                channel.recv(1),
                channel.recv_any(tag=7),
            )
            waiting = [asyncio.ensure_future(call) for call in calls]
            await asyncio.sleep(0)  # all have begun
            await channel.close()
            ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 10)
            assert {type(end) for end in ends} == {CommunicatorClosedError}
            assert {str(end).split()[-1] for end in ends} == {"0" if derived else "communicator"}
        if derived:
            await comm.barrier()  # the other channels go on
        elif comm.rank == 1:
            with pytest.raises(PeerLostError, match="rank 0 has closed its communicator; see why"):
                await comm.recv(0, tag=9)

    await run_ranks(2, body, url=url, timeout=20)


@pytest.mark.parametrize("one_tag", [False, True])
async def test_receives_that_time_out_leave_no_memory_behind(one_tag: bool) -> None:
    """A server may give each request a tag of its own, or poll one that another receive waits on."""

    def futures() -> int:
        gc.collect()
        return sum(isinstance(found, asyncio.Future) for found in gc.get_objects())

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            waiting = asyncio.ensure_future(comm.recv(1, tag=0))
            await asyncio.sleep(0)
            before = futures()
            for number in range(1, 2001):
                with pytest.raises(CollectiveTimeoutError):
                    await comm.recv(1, tag=0 if one_tag else number, timeout=1e-6)
            assert futures() - before < 200
            assert len(comm._p2p._tags) <= 1024
            waiting.cancel()
        await comm.barrier()

    await run_ranks(2, body, timeout=30)
