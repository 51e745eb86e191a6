"""Growing while other channels are busy, and growths that one rank leaves while others go on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import traffic_ranks
from support import BETWEEN_PROCESSES, fresh_url, outcome, run_ranks

import ruda_async
from ruda_async import (
    AsyncCommunicator,
    CollectiveCancelledError,
    CollectiveTimeoutError,
    admission,
    growth,
)

PROGRAM = str(Path(traffic_ranks.__file__))
WORLD, ROUNDS = 3, 3


async def works(comm: AsyncCommunicator) -> None:
    """A sum is right."""
    total = await comm.all_reduce_sum(np.array([comm.rank + 1.0]), timeout=20)
    assert total.tolist() == [sum(range(1, comm.world_size + 1))]


@pytest.mark.timeout(150)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("scheme", BETWEEN_PROCESSES)
def test_calls_go_on_while_the_job_grows_and_ranks_are_killed(scheme: str, seed: int) -> None:
    """All calls are right, also while a growth fails; a lost rank ends all, and the next growth works."""
    url = fresh_url(scheme)
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, url, rank, str(WORLD), str(ROUNDS), str(seed)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (*map(str, range(WORLD)), *["join"] * ROUNDS)
    ]
    try:
        said = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), said
    survivors = [int(out) for out, _ in said if out]
    assert len(survivors) == WORLD + 1, said  # each round but the last has one rank die
    assert all(survivors)


@pytest.mark.timeout(150)
async def test_calls_of_tasks_go_on_while_their_job_grows() -> None:
    url = fresh_url("memory")

    async def life(rank: int | None) -> int:
        return await traffic_ranks.run(url, rank, WORLD, ROUNDS, 2, lambda comm: comm.abort("dies"))

    async with asyncio.timeout(120):
        calls = await asyncio.gather(*map(life, [*range(WORLD), *[None] * ROUNDS]))
    assert len(calls) == WORLD + ROUNDS
    assert sum(calls) > 100


@pytest.mark.timeout(60)
@pytest.mark.parametrize("way", ["cancelled", "late"])
@pytest.mark.parametrize("quitter", [0, 1])
async def test_a_member_that_gives_up_where_others_have_agreed(
    url: str, quitter: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first call of the growth has ended well on the others, which cannot hear there that it failed."""
    agreed = [asyncio.Event() for _ in range(3)]
    honest = growth.Grow.run

    async def run(self: growth.Grow, operation: Any) -> Any:
        result = await honest(self, operation)
        agreed[operation.rank].set()
        if operation.rank == quitter:
            await operation._watched(asyncio.get_running_loop().create_future())
        return result

    monkeypatch.setattr(growth.Grow, "run", run)

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank != quitter:
            error = await outcome(comm.grow(1, timeout=300))
            expected = CollectiveCancelledError if way == "cancelled" else CollectiveTimeoutError
            assert isinstance(error, expected), error
            assert error.rank == quitter
        elif way == "late":
            assert isinstance(await outcome(comm.grow(1, timeout=0.3)), CollectiveTimeoutError)
        else:
            growing = asyncio.ensure_future(comm.grow(1, timeout=300))
            for other in agreed:
                await other.wait()
            for _ in range(20):  # the others' calls have ended
                await asyncio.sleep(0)
            growing.cancel()
            await asyncio.wait((growing,))
            assert growing.cancelled()
        await works(comm)

    await run_ranks(3, body, url=url)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("quitter", [0, 1])
async def test_a_member_that_gives_up_while_ranks_link_up(
    url: str, quitter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told so, and need not wait until it could have said how it fared."""
    monkeypatch.setattr(admission, "LINK_SECONDS", 2.0)
    honest = growth._meet
    linking = asyncio.Event()

    async def meet(kind: Any, grown: Any, *rest: Any) -> AsyncCommunicator:
        if grown.rank == quitter:
            linking.set()
            await asyncio.Event().wait()
        return await honest(kind, grown, *rest)

    monkeypatch.setattr(growth, "_meet", meet)

    async def body(comm: AsyncCommunicator) -> None:
        growing = asyncio.ensure_future(comm.grow(1, timeout=30))
        if comm.rank == quitter:
            await linking.wait()
            growing.cancel()
            await asyncio.wait((growing,))
            assert growing.cancelled()
        else:
            error = await outcome(growing)
            assert isinstance(error, CollectiveCancelledError), error
            assert error.rank == quitter
        await works(comm)

    joining = asyncio.ensure_future(ruda_async.connect(url, join=True, timeout=30).__aenter__())
    await run_ranks(3, body, url=url)
    joining.cancel()
    await asyncio.gather(joining, return_exceptions=True)
