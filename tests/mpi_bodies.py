"""What ranks do under mpiexec: ``mpiexec -n 4 python mpi_bodies.py NAME…``. Run by `test_mpi`.

Each rank prints ``NAME: passed`` when it is through; the first one that fails ends the program.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from native_checks import all_operations, same

import ruda_async
from ruda_async import (
    CollectiveCancelledError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    TensorContractError,
)

BODIES: dict[str, Callable[[], Awaitable[None]]] = {}
URL = "mpi://tests"


def body(function: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
    BODIES[function.__name__] = function
    return function


def connect(**options: Any) -> Any:
    return ruda_async.connect(URL, **{"timeout": 60, **options})


async def outcome(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except Exception as error:
        return error


@body
async def natively() -> None:
    """Forced by name, whatever the size, and by size; integers also in the documented order."""
    async with connect(algorithm="mpi", order="any") as comm:
        for dtype in ("float32", "float64", "int64", "int32", "int8", "uint16"):
            await all_operations(comm, dtype, 16 if dtype != "float32" else 5000)
        assert "mpi, asked for by" in comm.explain("all_reduce", 8)
        assert "barrier already" in comm.explain("barrier", 0)
        mean = await comm.all_reduce(np.full(9, comm.rank, np.float32), "mean")
        same(mean, np.full(9, 1.5, np.float32))
        same(await comm.all_reduce(np.full(3, comm.rank + 1), "prod"), np.full(3, 24))
        same(await comm.all_reduce(np.full(3, 1 << comm.rank), "bor"), np.full(3, 15))
    async with connect(algorithm="mpi") as comm:
        same(await comm.all_reduce(np.arange(5) + comm.rank), np.arange(5) * 4 + 6)
        assert 'takes order="any"' in comm.explain("all_reduce", 1 << 20)
    async with connect(native_bytes=1000, order="any") as comm:
        assert ": mpi, many bytes" in comm.explain("all_reduce", 1000)
        assert ": mpi" not in comm.explain("all_reduce", 999)


@body
async def parameters_that_differ() -> None:
    """Every rank is told, and the job's name is free for the next."""
    rank = ruda_async.config.resolve(URL).rank
    for name, odd, usual in (("chunk_bytes", 4096, 131072), ("native_bytes", 5, 262144)):
        error = await outcome(connect(**({name: odd} if rank == 3 else {})))
        assert isinstance(error, ConfigError), error
        assert f"rank 3 has {name}={odd} and rank" in str(error)
        assert f"has {name}={usual}" in str(error)
        assert error.rank == 3
        async with connect() as comm:
            await comm.barrier()


@body
async def by_our_own_algorithms() -> None:
    """Over the links alone; the documented order holds, NaN is kept, halves round once."""
    async with connect(algorithm="pairwise") as comm:
        for dtype in ("float32", "int64"):
            await all_operations(comm, dtype, 5000)
    async with connect(algorithm="mpi", order="any") as comm:
        rank = comm.rank
        high = await comm.all_reduce(np.array([np.nan if rank == 1 else 1.0, rank], np.float32), "max")
        assert np.isnan(high[0])
        assert high[1] == 3
        half = np.array([2048.0 if rank == 0 else 0.5], np.float16)
        same(await comm.all_reduce(half), np.array([2050], np.float16))
    async with connect() as comm:
        x = np.array([[1e8], [1], [-1e8], [1]], np.float32)[comm.rank]
        same(await comm.all_reduce(x), np.array([(x0 := np.float32(1e8)) - x0], np.float32))


@body
async def many_channels_at_once() -> None:
    """Channels in another order on each rank, subgroups beside them, calls of one channel in turn."""
    async with connect(algorithm="mpi", order="any") as comm:
        names = [f"request {i}" for i in range(6)]
        order = names[comm.rank :] + names[: comm.rank]

        async def serve(name: str) -> None:
            channel = comm.channel(name)
            number = int(name.split()[1])
            for turn in range(5):
                calls = [channel.all_reduce(np.full(100, number * 10 + turn + k)) for k in range(3)]
                for k, result in enumerate(await asyncio.gather(*calls)):
                    same(result, np.full(100, 4 * (number * 10 + turn + k)))
            await channel.close()

        await asyncio.gather(*map(serve, order))
        group = await comm.split(comm.rank % 2, key=-comm.rank)
        assert group is not None
        gathered = await group.all_gather(np.array([comm.rank]))
        assert gathered.tolist() == ([2, 0], [3, 1])[comm.rank % 2]
        for _ in range(3):
            channel = comm.channel("again")
            same(await channel.all_reduce(np.ones(4)), np.full(4, 4.0))
            await channel.close()


@body
async def failures() -> None:
    """Bad input, mismatches, cancelled and late calls fail everywhere; the next call is right."""
    async with connect(algorithm="mpi", order="any") as comm:
        rank = comm.rank

        async def works(number: int) -> None:
            same(await comm.all_reduce(np.full(100, number + rank)), np.full(100, 4 * number + 6))

        await works(1)
        bad = np.ones(3, np.complex64) if rank == 1 else np.ones(3)
        error = await outcome(comm.all_reduce(bad))
        assert isinstance(error, TensorContractError), error
        assert error.rank == 1
        await works(2)
        error = await outcome(comm.all_gather(np.ones(3 + rank // 3)))
        assert isinstance(error, CollectiveMismatchError), error
        await works(3)
        # Rank 2 is late: the others are in the agreement when their time is up.
        other = comm.channel("other")
        if rank == 2:
            await other.barrier()
        error = await outcome(comm.broadcast(np.ones(1000), 0, timeout=0.5 if rank != 2 else 30))
        assert isinstance(error, CollectiveTimeoutError), error
        if rank != 2:
            await other.barrier()
        await works(4)
        for turn in range(10):
            call = asyncio.ensure_future(comm.all_reduce(np.full(50_000, 7.0)))
            for _ in range(1 + turn * 3):
                await asyncio.sleep(0)
            if rank == turn % 4:
                call.cancel()
            try:
                same(await call, np.full(50_000, 28.0))
            except (asyncio.CancelledError, CollectiveCancelledError):
                pass
            await works(5 + turn)


@body
async def connecting_again() -> None:
    """Ten communicators after one another, and one of some ranks only."""
    for turn in range(10):
        async with connect() as comm:
            same(await comm.all_reduce(np.array([turn])), np.array([4 * turn]))
    if await asyncio.to_thread(lambda: ruda_async.config.resolve(URL).rank) < 2:
        async with connect(world_size=2) as comm:
            same(await comm.all_reduce(np.array([comm.rank])), np.array([1]))


@body
async def who_does_not_come() -> None:
    """Rank 3 stays away, then comes; ranks that MPI has numbered otherwise are refused."""
    from mpi4py import MPI

    place = ruda_async.config.resolve(URL)
    with pytest.raises(ConfigError, match=f"MPI has placed this process as rank {place.rank} of 4"):
        await connect(rank=(place.rank + 1) % 4)
    if place.rank != 3:
        with pytest.raises(CollectiveTimeoutError) as caught:
            await connect(timeout=1)
        assert caught.value.missing == (3,)
    MPI.COMM_WORLD.Barrier()
    async with connect() as comm:
        same(await comm.all_reduce(np.array([1])), np.array([4]))


@body
async def waiting_is_cheap() -> None:
    """A rank that waits looks ever more seldom."""
    from ruda_mpi.pump import Pump

    looks = 0
    look = Pump._look

    def counted(self: Pump) -> None:
        nonlocal looks
        looks += 1
        look(self)

    async with connect() as comm:
        await comm.barrier()
        Pump._look = counted  # type: ignore[method-assign]
        if comm.rank == 0:
            await asyncio.sleep(2)
        await comm.barrier()
        Pump._look = look  # type: ignore[method-assign]
        if comm.rank:
            assert looks < 20_000, looks  # a rank that never slept would look some 100 000 times


@body
async def a_rank_dies() -> None:
    """Rank 2 is gone without a word; the others hear of it and go on without it, natively too."""
    comm = await connect(heartbeat=1, algorithm="mpi", order="any")
    same(await comm.all_reduce(np.ones(1000)), np.full(1000, 4.0))
    if comm.rank == 2:
        os._exit(0)
    error = await outcome(comm.all_reduce(np.ones(1000)))
    assert isinstance(error, PeerLostError), error
    assert error.rank == 2
    small = await comm.shrink()
    assert small.world_size == 3
    same(await small.all_reduce(np.arange(1000.0)), np.arange(1000.0) * 3)
    await small.barrier()
    await comm.close()
    os._exit(0)  # MPI_Finalize would wait for the dead rank


@body
async def a_rank_ends_without_closing() -> None:
    """Rank 2's program is over, its communicator never closed; the others hear of it without a heartbeat."""
    comm = await connect(heartbeat=0)
    same(await comm.all_reduce(np.ones(1000)), np.full(1000, 4.0))
    if comm.rank == 2:
        return
    for call in (comm.all_reduce(np.ones(1000)), comm.recv(2)):
        error = await outcome(call)
        assert isinstance(error, PeerLostError), error
        assert error.rank == 2
        assert "ended without a goodbye" in str(error)
    small = await comm.shrink()
    same(await small.all_reduce(np.arange(9.0)), np.arange(9.0) * 3)
    await comm.close()


@body
async def no_newcomers() -> None:
    """MPI numbers the ranks: to grow is refused at once, on every rank and for who would join."""
    async with connect() as comm:
        for call in (comm.grow(1), connect(join=True)):
            error = await outcome(call)
            assert isinstance(error, ConfigError), error
            assert "mpi:// takes in no new ranks" in str(error)
        await comm.barrier()


@body
async def blocking_calls() -> None:
    """The synchronous facade: blocking and started calls, from several threads."""

    def rank_main() -> None:
        with ruda_async.sync.connect(URL, timeout=60, order="any", native_bytes=1000) as comm:
            rank = comm.rank
            for n in (1, 100_000):
                same(comm.all_reduce(np.full(n, rank)), np.full(n, 6))
            channels = [comm.channel(f"thread {i}") for i in range(3)]
            works = [channel.start.all_gather(np.full(500, rank)) for channel in channels]
            for work in works:
                same(work.wait(60), np.repeat(np.arange(4), 500))
            comm.send(np.arange(rank + 1), (rank + 1) % 4)
            same(comm.recv((rank - 1) % 4), np.arange((rank - 1) % 4 + 1))

    await asyncio.to_thread(rank_main)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        asyncio.run(BODIES[name]())
        print(f"{name}: passed", flush=True)
