from __future__ import annotations

import asyncio
from math import ceil, log2

import pytest
from movement_model import Link, group_of, run, run_links
from strict_link import Broken

from ruda_async.collectives.barrier import Barrier, dissemination


@pytest.mark.parametrize("size", range(1, 18))
async def test_nobody_leaves_before_the_last_has_come(size: int) -> None:
    for last in {0, size // 2, size - 1}:
        group = group_of(size, seed=size)
        gate = asyncio.Event()
        left: list[int] = []

        async def body(link: Link) -> None:
            if link.rank == last:  # noqa: B023
                await gate.wait()  # noqa: B023
            await dissemination(link)
            left.append(link.rank)  # noqa: B023

        running = asyncio.ensure_future(run_links(group, body))
        for _ in range(200):  # turns of the loop: far more than the others could need
            await asyncio.sleep(0)
        assert not left
        gate.set()
        await running
        assert len(left) == size
        assert group.messages == size * ceil(log2(size)) if size > 1 else not group.messages
        assert group.payload_bytes == 0


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_request(size: int) -> None:
    assert run(group_of(size), lambda rank: Barrier()) == [None] * size


async def test_a_broken_link() -> None:
    group = group_of(5, break_after=7)
    outcomes = await asyncio.gather(
        *(dissemination(Link(group, rank)) for rank in range(5)), return_exceptions=True
    )
    assert Broken in {type(outcome) for outcome in outcomes}
    assert asyncio.all_tasks() == {asyncio.current_task()}
