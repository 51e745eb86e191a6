"""Random faults against an oracle: no wrong answer, no hang, no leak.

RUDA_CHAOS_SECONDS and RUDA_SOAK_SECONDS say for how long.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from serving_support import Clients, Oracle, Server, served

from ruda_async.transport.registry import plugins

SECONDS = float(os.environ.get("RUDA_CHAOS_SECONDS", "600"))
SOAK_SECONDS = float(os.environ.get("RUDA_SOAK_SECONDS", SECONDS / 4))
RANKS = 4

pytestmark = [pytest.mark.long, pytest.mark.timeout(max(SECONDS, SOAK_SECONDS) + 600)]


class Chaos:
    """Faults, one after the other; after each the server has to become whole again."""

    def __init__(self, server: Server, oracle: Oracle, seed: int) -> None:
        self.done: dict[str, int] = {}
        self._server = server
        self._oracle = oracle
        self._random = random.Random(seed)

    async def strike(self) -> None:
        fault = self._random.choice([self.kill, self.kill_two, self.stop, self.pause, self.leave])
        self.done[fault.__name__] = self.done.get(fault.__name__, 0) + 1
        await fault()
        await self._server.until(
            lambda s: s["ready"] and s["live"] == RANKS == len(s["ranks"]) and not s["absent"], limit=240
        )

    def _workers(self) -> list[Any]:
        """Worker processes that live."""
        return [process for process in self._server.processes[1:] if process.returncode is None]

    async def _kill(self, count: int) -> None:
        for process in self._random.sample(self._workers(), count):
            process.kill()
            await process.wait()
        for _ in range(count):
            await self._server.start(None)

    async def kill(self) -> None:
        """A worker dies, and a new one comes."""
        await self._kill(1)

    async def kill_two(self) -> None:
        """Two at once."""
        await self._kill(2)

    async def stop(self) -> None:
        """A worker stands still until it is dropped, and then goes on."""
        process = self._random.choice(self._workers())
        process.send_signal(signal.SIGSTOP)
        try:
            await self._server.until(lambda s: s["ready"] and s["live"] < RANKS)
        finally:
            process.send_signal(signal.SIGCONT)

    async def pause(self) -> None:
        """A worker stands still for so short that nobody should be lost; requests wait."""
        process = self._random.choice(self._workers())
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(0.05, 0.5))
        process.send_signal(signal.SIGCONT)

    async def leave(self) -> None:
        """Clients go away in the middle of their requests."""

        async def impatient(session: aiohttp.ClientSession) -> None:
            rows = np.arange(self._random.randrange(1, 256))
            try:
                async with asyncio.timeout(self._random.uniform(0.0, 0.05)):
                    await Clients(self._server, self._oracle).ask(session, rows)
            except TimeoutError:
                pass

        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(impatient(session) for _ in range(40)))


def leaks(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """What the front holds more of; new workers have no past to compare with."""
    old, new = before["ranks"][0], after["ranks"][0]
    allowed = {"memory": old["memory"] * 0.15 + 32e6, "descriptors": 4, "tasks": 2, "channels": 2}
    return {key: (old[key], new[key]) for key, more in allowed.items() if new[key] > old[key] + more}


@asynccontextmanager
async def robust(scheme: str, model: Path, parameters: str) -> AsyncIterator[Server]:
    options = ("--batch-timeout", "20", "--request-timeout", "60", "--rejoin-timeout", "60")
    async with served(scheme, model, RANKS, *options, parameters=parameters) as server:
        yield server


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_random_faults(scheme: str, model: Path, oracle: Oracle) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    async with robust(scheme, model, "&heartbeat=3") as server:
        chaos = Chaos(server, oracle, seed)
        clients = Clients(server, oracle, seed)
        ends = time.monotonic() + SECONDS / 2
        baseline = None
        async with clients.busy(16, limit=90):
            while baseline is None or time.monotonic() < ends:
                await clients.more(50, limit=120)
                await chaos.strike()
                if baseline is None or sum(chaos.done.values()) == 4:  # what is set up once has been
                    baseline = await quiet(server, busy=True)
        after = await quiet(server)
        assert not leaks(baseline, after), (chaos.done, leaks(baseline, after))
        print(f"{chaos.done}, {clients.answered} answers, refused: {clients.refused}")
        assert set(clients.refused) <= {"rank_lost", "overloaded", "batch_timeout"}
        codes = await server.stop()
        assert codes[0] == 0


async def quiet(server: Server, busy: bool = False) -> dict[str, Any]:
    """The numbers, with the least over some seconds of what goes up and down.

    Ranks tell theirs twice a second.
    """
    found = [await server.until(lambda s: busy or s["in_flight"] == 0)]
    for _ in range(12):
        await asyncio.sleep(0.25)
        found.append(await server.stats())
    last = found[-1]
    for rank, numbers in enumerate(last["ranks"]):
        for key in ("memory", "descriptors", "tasks", "channels"):
            numbers[key] = min(s["ranks"][rank][key] for s in found if len(s["ranks"]) > rank)
    return last


@pytest.mark.skipif("faults" not in plugins(), reason="faults+…:// is not installed")
@pytest.mark.parametrize(
    "faults",
    [
        "&delay_ms=2&jitter_ms=10&reorder=true",
        "&kill_after=4000&only_rank=2",
        "&silence_after=3000000&only_rank=1",
    ],
    ids=["late", "dies", "silent"],
)
async def test_bad_links(model: Path, oracle: Oracle, faults: str) -> None:
    async with robust("faults+tcp", model, f"&heartbeat=3&checksum=true{faults}") as server:
        clients = Clients(server, oracle)
        async with clients.busy(16, limit=90):
            ends = time.monotonic() + min(SECONDS / 6, 60)
            while time.monotonic() < ends:
                await clients.more(50, limit=120)
        assert set(clients.refused) <= {"rank_lost", "overloaded", "batch_timeout"}


async def test_soak(model: Path, oracle: Oracle) -> None:
    """Load without faults: nothing is refused, and nothing grows."""
    async with robust("shm", model, "") as server:
        clients = Clients(server, oracle)
        async with clients.busy(32):
            await clients.more(2000, limit=300)
            before = await quiet(server, busy=True)
            begins = told = time.monotonic()
            print(figures(before, 0, clients), flush=True)
            while (now := time.monotonic()) < begins + SOAK_SECONDS:
                if now > told + 60:
                    told = now
                    print(figures(await server.stats(), now - begins, clients), flush=True)
                await clients.more(500, limit=300)
        after = await quiet(server)
        print(figures(after, time.monotonic() - begins, clients), flush=True)
        assert clients.refused == {}
        assert after["losses"] == 0
        assert not leaks(before, after)
        for old, new in zip(before["ranks"], after["ranks"], strict=True):
            assert new["memory"] < old["memory"] * 1.15 + 32e6, (old, new)
            assert new["descriptors"] <= old["descriptors"] + 4


def figures(stats: dict[str, Any], seconds: float, clients: Clients) -> str:
    """What each rank holds, in one line."""
    ranks = "; ".join(
        f"{r['memory'] / 1e6:.1f} MB, {r['descriptors']} descriptors, {r['tasks']} tasks, "
        f"{r['channels']} channels"
        for r in stats["ranks"]
    )
    return f"{seconds:.0f} s, {clients.answered} answers: {ranks}"
