"""A rank whose channels are busy while its job grows, loses a rank, shrinks and grows again.

Run by ``test_grow_traffic``: ``traffic_ranks.py URL RANK WORLD ROUNDS SEED``, with ``join``
for a newcomer's rank.
Each round takes in one newcomer, and then one rank dies in the midst of its calls; nobody does in the last.
Prints how many calls were right, or ends with an error.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Awaitable, Callable

import numpy as np

import ruda_async
from ruda_async import AsyncCommunicator, CollectiveCancelledError, CollectiveTimeoutError, PeerLostError

SIZES = (1, 700, 9_000, 120_000)
CHANNELS = 3


class Traffic:
    """Collectives on several channels of one communicator, and a ring of sends and receives, until `stop`."""

    def __init__(self, comm: AsyncCommunicator) -> None:
        self.comm = comm
        self.calls = 0
        self._over = False
        self._more = asyncio.Event()
        loops: list[Awaitable[None]] = [self._collectives(f"busy {i}") for i in range(CHANNELS)]
        self.tasks = [asyncio.ensure_future(one) for one in (*loops, self._sends(), self._receives())]

    def _count(self) -> None:
        self.calls += 1
        self._more.set()

    async def _collectives(self, name: str) -> None:
        comm = self.comm.channel(name)
        ranks = np.arange(comm.world_size)
        number = 0
        while True:
            draw = random.Random(f"{name} {number}")
            size, operation = draw.choice(SIZES), draw.choice(("sum", "gather", "exchange", "broadcast"))
            mine = np.full(size, float(number % 100 + comm.rank))
            if operation == "sum":
                assert (await comm.all_reduce(mine) == (ranks + number % 100).sum()).all()
            elif operation == "gather":
                got = (await comm.all_gather(mine)).reshape(comm.world_size, size)
                assert (got == (ranks + number % 100)[:, None]).all()
            elif operation == "exchange":
                rows = [(number + comm.rank + peer) % 3 for peer in ranks]
                value, counts = await comm.all_to_all_v(np.full((sum(rows), 50), float(comm.rank)), rows)
                assert list(counts) == rows
                assert (value[:, 0] == np.repeat(ranks, counts)).all()
            else:
                root = draw.randrange(comm.world_size)
                assert (await comm.broadcast(mine, root) == number % 100 + root).all()
            number += 1
            self._count()
            if number % 4 == 0 and await comm.broadcast_object(self._over, 0):
                self._over = True
                self._more.set()
                await comm.close()
                return

    async def _sends(self) -> None:
        number = 0
        while not self._over:
            size = random.Random(f"send {number}").choice(SIZES)
            await self.comm.send(np.full(size, float(number)), (self.comm.rank + 1) % self.comm.world_size)
            number += 1
        await self.comm.send(np.zeros(0), (self.comm.rank + 1) % self.comm.world_size)

    async def _receives(self) -> None:
        number = 0
        while len(got := await self.comm.recv((self.comm.rank - 1) % self.comm.world_size)):
            assert len(got) == random.Random(f"send {number}").choice(SIZES)
            assert (got == number).all()
            number += 1
            self._count()

    async def some(self, more: int = 40) -> None:
        """Wait until so many more calls have been right, or all is over; raise what a call has raised."""
        goal = self.calls + more
        while self.calls < goal and not self._over:
            self._more.clear()
            waiting = asyncio.ensure_future(self._more.wait())
            await asyncio.wait((waiting, *self.tasks), return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            for task in self.tasks:
                if task.done() and task.exception():
                    task.result()

    async def stop(self) -> int:
        """End in step with the other ranks; how many calls were right."""
        self._over = True
        await asyncio.gather(*self.tasks)
        return self.calls

    async def lost(self, rank: int) -> int:
        """Until every call has ended because `rank` is lost."""
        for end in await asyncio.gather(*self.tasks, return_exceptions=True):
            assert isinstance(end, PeerLostError), end
            assert end.rank == rank, end
        return self.calls


async def failing_growths(comm: AsyncCommunicator, url: str, number: int) -> None:
    """One for which nobody comes, and one that a rank gives up."""
    try:
        await comm.grow(1, url=url, timeout=0.2)
    except CollectiveTimeoutError:
        pass
    else:
        raise AssertionError("nobody had come")
    growing = asyncio.ensure_future(comm.grow(1, url=url, timeout=20))
    if comm.rank == number % comm.world_size:
        for _ in range(random.Random(number).randrange(1, 60)):
            await asyncio.sleep(0)
        growing.cancel()
    (end,) = await asyncio.gather(growing, return_exceptions=True)
    if comm.rank == number % comm.world_size:
        assert isinstance(end, asyncio.CancelledError), end
    else:
        assert isinstance(end, CollectiveCancelledError), end
        assert end.rank == number % comm.world_size, end


async def run(
    url: str, rank: int | None, world: int, rounds: int, seed: int, die: Callable[[AsyncCommunicator], None]
) -> int:
    """A whole life; how many calls were right."""
    calls = begun = 0
    if rank is None:
        comm = await ruda_async.connect(url, join=True, timeout=90)
        begun = await comm.broadcast_object(None, 0)
        grown = comm
    else:
        comm = await ruda_async.connect(url, rank=rank, world_size=world, timeout=90)
    for number in range(begun, rounds):
        if rank is not None or number > begun:
            busy = Traffic(comm)
            await busy.some()
            await failing_growths(comm, f"{url}-elsewhere", number)
            grown = await comm.grow(1)
            await grown.broadcast_object(number, 0)
            beside = Traffic(grown)
            calls += await busy.stop()
            await comm.close()
        else:
            beside = Traffic(grown)
        if number == rounds - 1:
            await beside.some()
            calls += await beside.stop()
            await grown.close()
            return calls
        victim = random.Random(f"{seed} {number}").randrange(grown.world_size)
        if grown.rank == victim:
            await beside.some()  # the others go on meanwhile
            die(grown)
            await asyncio.gather(*beside.tasks, return_exceptions=True)
            return calls
        calls += await beside.lost(victim)
        comm = await grown.shrink()
    raise AssertionError("no round was the last")


if __name__ == "__main__":
    place, who, *numbers = sys.argv[1:]
    life = run(place, None if who == "join" else int(who), *map(int, numbers), lambda _: os._exit(0))
    print(asyncio.run(life), flush=True)
