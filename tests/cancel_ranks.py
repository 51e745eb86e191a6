"""A rank of a job whose large calls are cancelled, or run out of time, in their midst.

Run by ``failures/test_cancels``: ``cancel_ranks.py URL RANK WORLD SECONDS SEED``. All ranks draw the same
calls, one of them gives each up, and the call after it on the same channel must be right everywhere, as
must those of a channel that has nothing to do with it. The last line printed says how calls ended.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

import ruda_async
from ruda_async import AsyncCommunicator, CollectiveCancelledError, CollectiveTimeoutError

SIZES = (4_000_000, 500_000, 62_500)
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather_v", "reduce")


@dataclass
class Call:
    """One call that every rank makes, with the same numbers in it."""

    number: int
    operation: str
    size: int
    root: int
    shared: bool

    def input(self, comm: AsyncCommunicator) -> np.ndarray:
        size = self.size // (comm.world_size if "gather" in self.operation else 1)
        value = comm.empty(size, np.float32) if self.shared else np.empty(size, np.float32)
        value[...] = self.number % 1000 + comm.rank
        return value

    def start(self, channel: AsyncCommunicator, timeout: float | None = None) -> Awaitable[object]:
        value = self.input(channel)
        if self.operation == "broadcast":
            return channel.broadcast(value, self.root, timeout=timeout)
        if self.operation == "reduce":
            return channel.reduce(value, self.root, timeout=timeout)
        if self.operation == "gather_v":
            return channel.all_gather_v(value, timeout=timeout)
        method = getattr(channel, self.operation)
        started: Awaitable[object] = method(value, timeout=timeout)
        return started

    def check(self, result: object, comm: AsyncCommunicator) -> None:
        world, low = comm.world_size, self.number % 1000
        total = low * world + world * (world - 1) / 2
        if result is None:
            assert (self.operation, comm.rank == self.root) == ("reduce", False), self
            return
        value = np.asarray(getattr(result, "value", result))
        if self.operation in ("all_reduce", "reduce_scatter", "reduce"):
            assert (value == total).all(), (self, value)
        elif self.operation == "broadcast":
            assert (value == low + self.root).all(), (self, value)
        else:
            assert (value.reshape(world, -1) == np.arange(low, low + world)[:, None]).all(), (self, value)


async def give_up(call: Call, channel: AsyncCommunicator, draw: random.Random) -> object:
    """Start the call and end it in its midst, in one of the ways in which calls are ended."""
    after = draw.random() * 0.02 * call.size / SIZES[0] * 8
    way = draw.choice(("cancel", "timeout", "wait_for"))
    if way == "timeout":
        return await call.start(channel, timeout=max(after, 1e-4))
    task = asyncio.ensure_future(call.start(channel))
    await asyncio.sleep(0)  # a task that was cancelled before its first step has made no call
    if way == "wait_for":
        return await asyncio.wait_for(task, max(after, 1e-6))
    await asyncio.sleep(after)
    task.cancel()
    return await task


async def bystander(channel: AsyncCommunicator, ended: asyncio.Event) -> int:
    """Calls that nobody gives up; how many."""
    count, last = 0, False
    while not last:
        total = await channel.all_reduce(np.full(50_000, float(count + channel.rank)))
        world = channel.world_size
        assert (total == count * world + world * (world - 1) / 2).all()
        count += 1
        last = await channel.broadcast_object(ended.is_set(), 0)
    return count


async def main(url: str, rank: int, world: int, seconds: float, seed: int) -> None:
    ends = Counter[str]()
    async with ruda_async.connect(url, rank=rank, world_size=world, timeout=30) as comm:
        control = comm.channel("control")
        ended = asyncio.Event()
        other = asyncio.ensure_future(bystander(comm.channel("bystander"), ended))
        until, number = time.monotonic() + seconds, 0
        own = random.Random(rank * 7 + seed)
        while await control.broadcast_object(time.monotonic() < until, 0):
            number += 1
            draw = random.Random(number + seed * 1_000_003)
            size = draw.choice(SIZES) // world * world
            call = Call(number, draw.choice(OPERATIONS), size, draw.randrange(world), draw.random() < 0.5)
            culprit = draw.randrange(world)
            channel = comm.channel(f"calls-{number % 3}")
            end = "right"
            try:
                going = give_up(call, channel, own) if rank == culprit else call.start(channel)
                call.check(await going, comm)
            except (TimeoutError, asyncio.CancelledError, CollectiveCancelledError) as error:
                end = type(error).__name__
            except CollectiveTimeoutError as error:
                end = type(error).__name__
            ends[end] += 1
            call.check(await call.start(channel), comm)
        ended.set()
        ends["bystander"] = await other
    print(dict(ends), flush=True)


if __name__ == "__main__":
    address, *numbers = sys.argv[1:]
    with suppress(KeyboardInterrupt):
        asyncio.run(main(address, int(numbers[0]), int(numbers[1]), float(numbers[2]), int(numbers[3])))
