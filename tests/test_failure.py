"""What happens to all ranks when one of them cannot go on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from support import outcome, run_ranks

import ruda_async
from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    CommunicatorClosedError,
    PeerLostError,
    TensorContractError,
    notices,
)
from ruda_async.call import Operation
from ruda_async.collectives.request import fingerprint
from ruda_async.transport.conformance.scenario import awaited


async def still_works(comm: AsyncCommunicator) -> None:
    """The next call of the communicator gives the right value."""
    total = await comm.all_reduce_sum(np.array([comm.rank + 1.0]))
    assert total.tolist() == [sum(range(1, comm.world_size + 1))]


BAD_CALLS = {
    "float of an integer call": lambda c, bad: c.all_gather_int(
        np.ones(4, np.float32) if bad else np.ones(4, np.int64)
    ),
    "integer of a float call": lambda c, bad: c.all_gather_float(np.ones(4, np.int64 if bad else np.float32)),
    "sum of bool": lambda c, bad: c.all_reduce_sum(np.ones(4, bool if bad else np.float32)),
    "mean of integers": lambda c, bad: c.all_reduce(np.ones(4, np.int32 if bad else np.float32), "mean"),
    "unknown operator": lambda c, bad: c.all_reduce(np.ones(4), "summ" if bad else "sum"),
    "indivisible axis": lambda c, bad: c.reduce_scatter_sum(np.ones(7 if bad else 6)),
    "scalar to gather": lambda c, bad: c.all_gather_float(np.float32(1) if bad else np.ones(1, np.float32)),
    "counts that do not add up": lambda c, bad: c.all_to_all_v_float(
        np.ones((3, 2), np.float32), [1, 1, 2 if bad else 1]
    ),
    "too few counts": lambda c, bad: c.all_to_all_v_float(
        np.ones((3, 2), np.float32), [1, 2] if bad else [1, 1, 1]
    ),
    "negative count": lambda c, bad: c.all_to_all_v_float(
        np.ones((3, 2), np.float32), [-1, 2, 2] if bad else [1, 1, 1]
    ),
    "unknown root": lambda c, bad: c.broadcast(np.ones(4), 7 if bad else 0),
    "unknown root of reduce": lambda c, bad: c.reduce(np.ones(4), -1 if bad else 0),
    "unknown root of gather": lambda c, bad: c.gather(np.ones(4), 3 if bad else 2),
    "not a tensor": lambda c, bad: c.all_reduce_sum("text" if bad else np.ones(4)),
    "object of unknown type": lambda c, bad: c.broadcast_object(object() if bad else 1, 0),
    "object of unknown type gathered": lambda c, bad: c.all_gather_object({1, 2} if bad else [1, 2]),
    "color of a split": lambda c, bad: c.split("red" if bad else 0),
}


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("name", sorted(BAD_CALLS))
async def test_bad_input_on_one_rank(url: str, name: str, culprit: int) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        started = time.monotonic()
        error = await outcome(BAD_CALLS[name](comm, comm.rank == culprit))
        assert time.monotonic() - started < 2
        assert isinstance(error, TensorContractError), (name, error)
        assert error.rank == culprit
        assert f"rank {culprit}" in str(error)
        await still_works(comm)

    await run_ranks(3, body, url=url)


def pair(first: object, second: object) -> object:
    return lambda comm, odd: (second if odd else first)(comm)


MISMATCHES = {
    "shape": (
        pair(lambda c: c.all_reduce_sum(np.ones(10)), lambda c: c.all_reduce_sum(np.ones(12))),
        "shape",
    ),
    "trailing shape": (
        pair(lambda c: c.all_reduce_sum(np.ones((2, 3))), lambda c: c.all_reduce_sum(np.ones((3, 2)))),
        "shape",
    ),
    "large shape": (
        pair(lambda c: c.all_reduce_sum(np.ones(400_000)), lambda c: c.all_reduce_sum(np.ones(400_001))),
        "shape",
    ),
    "dtype": (
        pair(lambda c: c.all_reduce_sum(np.ones(10)), lambda c: c.all_reduce_sum(np.ones(10, np.float32))),
        "dtype",
    ),
    "operator": (
        pair(lambda c: c.all_reduce(np.ones(10)), lambda c: c.all_reduce(np.ones(10), "max")),
        "operator",
    ),
    "operation": (
        pair(lambda c: c.all_reduce_sum(np.ones(10)), lambda c: c.broadcast(np.ones(10), 0)),
        "operation",
    ),
    "barrier": (pair(lambda c: c.barrier(), lambda c: c.all_gather(np.ones(6))), "operation"),
    "root": (pair(lambda c: c.broadcast(np.ones(3), 0), lambda c: c.broadcast(np.ones(3), 1)), "root"),
    "exchange": (
        pair(
            lambda c: c.all_to_all_v(np.ones((c.world_size, 2)), [1] * c.world_size),
            lambda c: c.all_to_all_v(np.ones((c.world_size, 3)), [1] * c.world_size),
        ),
        "shape",
    ),
    "budget": (
        pair(
            lambda c: c.bounded(64).all_reduce_sum(np.ones(10)),
            lambda c: c.bounded(32).all_reduce_sum(np.ones(10)),
        ),
        "max_bytes",
    ),
}


@pytest.mark.parametrize("world_size", [2, 4, 5])
@pytest.mark.parametrize("name", sorted(MISMATCHES))
async def test_mismatch(url: str, name: str, world_size: int) -> None:
    call, field = MISMATCHES[name]

    async def body(comm: AsyncCommunicator) -> None:
        started = time.monotonic()
        error = await outcome(call(comm, comm.rank == world_size - 1))
        assert isinstance(error, CollectiveMismatchError), error
        assert time.monotonic() - started < 3
        assert error.field == field, error
        assert error.ours != error.theirs
        assert "rank" in str(error)
        assert field in str(error)
        await still_works(comm)

    await run_ranks(world_size, body, url=url)


async def test_cancelled_task(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        other = comm.channel("other")
        if comm.rank == 2:  # enters only after rank 1 has cancelled
            await other.barrier()
            await other.barrier()
            error = await outcome(comm.all_reduce_sum(np.ones(8)))
        else:
            task = asyncio.ensure_future(comm.all_reduce_sum(np.ones(8)))
            await other.barrier()
            if comm.rank == 1:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await other.barrier()
            error = None if comm.rank == 1 else await outcome(task)
        if comm.rank != 1:
            assert isinstance(error, CollectiveCancelledError)
            assert error.rank == 1
        await still_works(other)
        await still_works(comm)

    await run_ranks(3, body, url=url)


class Scripted:
    """A collective call of one's own steps."""

    operation = "scripted"

    def __init__(self, steps: Callable[[Operation], Awaitable[None]]) -> None:
        self.run = steps

    def prepare(self, *_: object) -> bytes:
        return fingerprint("scripted", "uint8", (1,))


@pytest.mark.parametrize("nbytes", [10, 1 << 20])
@pytest.mark.parametrize("first", [False, True])
async def test_a_message_in_the_place_of_one_that_was_taken_back_is_no_mismatch(
    url: str, nbytes: int, first: bool
) -> None:
    """Its sender has given up, and will say so."""

    async def body(comm: AsyncCommunicator) -> None:
        other = comm.channel("other")

        async def steps(call: Operation) -> None:
            large, small = memoryview(bytearray(1 << 20)), memoryview(bytearray(nbytes))
            if comm.rank == 1:
                if not first:
                    await call.send(0, small)
                sending = asyncio.ensure_future(awaited(call.send(0, large)))
                after = asyncio.ensure_future(awaited(call.send(0, small)))
                await asyncio.sleep(0)
                sending.cancel()
                await other.barrier()
                for _ in range(50):  # so that the other rank meets what is left
                    await asyncio.sleep(0)
                after.cancel()
                raise asyncio.CancelledError
            if not first:
                await call.recv_into(1, small)
            await other.barrier()
            await call.recv_into(1, large)
            await call.recv_into(1, small)

        settings = comm._settings  # type: ignore[attr-defined]
        call = comm._channel.run(Scripted(steps), 10, settings)  # type: ignore[attr-defined]
        if comm.rank == 1:
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            error = await outcome(call)
            assert isinstance(error, CollectiveCancelledError), error
            assert error.rank == 1
        await still_works(other)
        await still_works(comm)

    await run_ranks(2, body, url=url)


async def test_own_timeout_wins(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        gate = comm.channel("gate")
        if comm.rank == 0:
            started = time.monotonic()
            with pytest.raises(
                CollectiveTimeoutError, match=r"timeout=0\.2 s \(no word of it from rank 1\)"
            ) as caught:
                await comm.all_reduce_sum(np.ones(4), timeout=0.2)
            assert 0.15 < time.monotonic() - started < 2
            assert caught.value.missing == (1,)
            await gate.barrier(timeout=300)
        else:
            await gate.barrier()
            with pytest.raises(CollectiveTimeoutError) as caught:
                await comm.all_reduce_sum(np.ones(4))
            assert caught.value.rank == 0
        await still_works(comm)

    await run_ranks(2, body, url=url, timeout=300)


async def test_default_timeout_gives_way_to_a_longer_one(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        gate = comm.channel("gate")
        if comm.rank == 0:
            gathering = asyncio.ensure_future(comm.barrier(timeout=30))
            with pytest.raises(CollectiveTimeoutError):
                await gate.recv(1)  # the default of 0.5 s
            await gate.send(np.ones(1), 1)
            await gathering
        else:
            await gate.recv(0, timeout=30)
            await comm.barrier()

    await run_ranks(2, body, url=url, timeout=0.5)


async def test_late_rank_is_waited_for(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 1:
            await asyncio.sleep(0.3)  # late on purpose: later than the report of a waiting call
        await still_works(comm)

    await run_ranks(3, body, url=url)


async def leave_behind(comm: AsyncCommunicator, victim: int) -> None:
    """Rank `victim` aborts once no other rank is in a call any more."""
    await comm.barrier()
    if comm.rank != victim:
        await comm.send(np.ones(1), victim)
        return
    for rank in range(comm.world_size):
        if rank != victim:
            await comm.recv(rank)
    comm.abort("to be lost")


async def test_lost_peer_and_shrink(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await leave_behind(comm, 1)
        if comm.rank == 1:
            return
        started = time.monotonic()
        error = await outcome(comm.all_reduce_sum(np.ones(4)))
        assert isinstance(error, PeerLostError), error
        assert error.rank == 1
        assert time.monotonic() - started < 1
        assert isinstance(await outcome(comm.barrier()), PeerLostError)
        smaller = await comm.shrink()
        assert smaller.world_size == 3
        assert smaller.rank == [0, None, 1, 2][comm.rank]
        await still_works(smaller)

    await run_ranks(4, body, url=url)


async def test_lost_before_the_first_call_of_a_subgroup(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        half = await comm.split(comm.rank % 2)
        assert half is not None
        await leave_behind(comm, 3)
        if comm.rank == 3:
            return
        if comm.rank == 1:
            started = time.monotonic()
            error = await outcome(half.all_reduce_sum(np.ones(2)))
            assert isinstance(error, PeerLostError)
            assert time.monotonic() - started < 1
        else:
            await still_works(half)  # nobody of this half is lost

    await run_ranks(4, body, url=url)


async def test_close_with_a_call_in_flight(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            task = asyncio.ensure_future(comm.all_reduce_sum(np.ones(3)))
            await asyncio.sleep(0)
            await asyncio.gather(comm.close(), comm.close())
            with pytest.raises(CommunicatorClosedError):
                await task
            with pytest.raises(CommunicatorClosedError):
                await comm.barrier()
            await comm.close()
        else:
            with pytest.raises(PeerLostError):
                await comm.recv(0)  # until rank 0 has closed
            error = await outcome(comm.all_reduce_sum(np.ones(3)))
            assert isinstance(error, CollectiveCancelledError | PeerLostError)
            assert error.rank == 0

    await run_ranks(2, body, url=url)


async def test_shrink_goes_on_without_a_rank_that_closed(url: str) -> None:
    """Whether it had left before the others shrink, or leaves while they wait for it."""
    waits = asyncio.Event()

    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        if comm.rank == 1:
            await waits.wait()
            await comm.close()
            return
        if comm.rank == 0:
            shrinking = asyncio.ensure_future(comm.shrink(timeout=20))
            await asyncio.sleep(0)  # it has begun
            waits.set()
            smaller = await shrinking
        else:
            error = await outcome(comm.recv(1))
            assert isinstance(error, PeerLostError)
            assert error.orderly
            smaller = await comm.shrink(timeout=20)
        assert (smaller.rank, smaller.world_size) == (comm.rank // 2, 2)
        await still_works(smaller)

    started = time.monotonic()
    await run_ranks(3, body, url=url)
    assert time.monotonic() - started < 15


async def test_close_while_another_rank_hangs(url: str) -> None:
    release = asyncio.Event()

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            started = time.monotonic()
            with contextlib.suppress(CollectiveTimeoutError):
                await comm.barrier(timeout=0.05)
            await comm.close()
            assert time.monotonic() - started < 5
            release.set()
        else:
            await release.wait()

    await run_ranks(2, body, url=url)


async def test_close_keeps_the_original_exception(url: str) -> None:
    async def one(rank: int) -> None:
        async with ruda_async.connect(url, rank=rank, world_size=2, timeout=10) as comm:
            await comm.barrier()
            raise ZeroDivisionError(f"rank {rank}")

    errors = await asyncio.gather(one(0), one(1), return_exceptions=True)
    assert [type(e) for e in errors] == [ZeroDivisionError, ZeroDivisionError]


async def test_same_url_again_at_once(url: str) -> None:
    for turn in range(10):

        async def body(comm: AsyncCommunicator, turn: int = turn) -> float:
            return float((await comm.all_reduce_sum(np.array([float(turn + comm.rank)])))[0])

        assert await run_ranks(2, body, url=url) == [2 * turn + 1] * 2


async def test_nothing_stays_behind(url: str) -> None:
    before = len(asyncio.all_tasks())

    async def body(comm: AsyncCommunicator) -> None:
        await outcome(comm.all_reduce_sum(np.ones(3 + comm.rank)))
        await still_works(comm)

    await run_ranks(3, body, url=url)
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == before


async def test_failed_calls_do_not_fill_memory(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        for _ in range(30):
            error = await outcome(comm.all_reduce_sum(np.ones(5000 + comm.rank)))
            assert isinstance(error, CollectiveMismatchError)
        await comm.barrier()
        for counters in comm.stats()["peers"].values():
            assert counters["early_bytes"] == 0
        await comm.barrier()

    await run_ranks(2, body, url=url)


async def test_cancelled_while_its_payload_lies_in_the_socket(url: str) -> None:
    """The announced payload of a call that is cancelled just before it is read harms nobody else."""

    async def body(comm: AsyncCommunicator) -> None:
        big, other = comm.channel("big"), comm.channel("other")
        if comm.rank == 0:
            task = asyncio.ensure_future(big.broadcast(np.zeros(100_000), 1))
            await other.barrier()
            await asyncio.sleep(0)
            time.sleep(0.2)  # the payload arrives meanwhile, unread
            task.cancel()
            await other.barrier()
            await asyncio.gather(task, return_exceptions=True)  # it may have been over just before
        else:
            await other.barrier()
            await outcome(big.broadcast(np.ones(100_000), 1))
            await other.barrier()
        await still_works(big)
        await still_works(other)

    await asyncio.gather(*(asyncio.to_thread(asyncio.run, one_rank(url, rank, body)) for rank in range(2)))


async def one_rank(url: str, rank: int, body: Callable[[AsyncCommunicator], Awaitable[None]]) -> None:
    async with ruda_async.connect(url, rank=rank, world_size=2, timeout=10) as comm:
        await body(comm)


async def test_what_a_dropped_rank_says_of_others_is_not_believed(url: str) -> None:
    """It stood still, so the others gave it up; going on, it finds the others gone, and says so."""
    over = asyncio.Event()

    async def body(comm: AsyncCommunicator) -> None:
        await comm.barrier()
        if comm.rank == 2:
            await over.wait()
            return
        comm.node._on_lost(2, PeerLostError("silent", rank=2))
        comm.node._hear(2, bytearray(notices.encode("lost", 1 - comm.rank, "silent")))
        shrunk = await comm.shrink()
        assert shrunk.world_size == 2
        await still_works(shrunk)
        assert comm.stats()["lost"] == [2]
        over.set()

    await run_ranks(3, body, url=url)


@pytest.mark.parametrize("ends_by", ["deadline", "cancel"])
async def test_a_call_ends_when_its_memory_is_left_alone(
    ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A medium that cannot stop in the middle is waited for, whatever else comes meanwhile."""

    over = asyncio.Event()

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 1:
            await over.wait()
            return
        loop = asyncio.get_running_loop()
        busy: asyncio.Future[None] = loop.create_future()
        asked = asyncio.Event()
        honest = comm.node.transport.fail

        def fail(tag: int, error: BaseException) -> list[asyncio.Future[None]]:
            honest(tag, error)
            asked.set()
            return [busy]

        monkeypatch.setattr(comm.node.transport, "fail", fail)
        timeout = 0.05 if ends_by == "deadline" else 10
        task = asyncio.ensure_future(comm.all_gather(np.ones(100_000), timeout=timeout))
        await asyncio.sleep(0)
        if ends_by == "cancel":
            task.cancel()
        await asked.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        task.cancel()  # so does not change that
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        busy.set_result(None)
        await asyncio.wait((task,))
        assert task.cancelled()
        over.set()

    await run_ranks(2, body)


async def test_a_call_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is cancelled while it lets the loop turn has failed, and is not done as well."""

    async def body(comm: AsyncCommunicator) -> None:
        monkeypatch.setattr(comm.node, "is_due", lambda: True)
        task = asyncio.ensure_future(comm.all_reduce_sum(np.ones(3)))
        await asyncio.sleep(0)
        assert not task.done()
        task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled()
        stats = comm.stats()
        assert (stats["completed"], stats["failed"]) == (0, 1)

    await run_ranks(1, body)
