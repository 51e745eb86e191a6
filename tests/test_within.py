"""Deadlines without a task of their own."""

from __future__ import annotations

import asyncio
import time

import pytest

from ruda_async.transport.base import Ready
from ruda_async.within import Within


def soon() -> float:
    return time.monotonic() + 0.02


async def test_what_is_ready_costs_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", None)
    assert await Within(Ready(7), 0.0) == 7


async def test_a_result_in_time() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_result, 3)
    assert await Within(future, time.monotonic() + 60) == 3


async def test_the_end_of_time_withdraws_what_is_waited_for() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with pytest.raises(TimeoutError):
        await Within(future, soon())
    assert future.cancelled()


async def test_an_error_is_passed_on() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_exception, LookupError("gone"))
    with pytest.raises(LookupError, match="gone"):
        await Within(future, time.monotonic() + 60)


@pytest.mark.parametrize("at_once_with_the_deadline", [False, True])
async def test_a_cancelled_task_stays_one(at_once_with_the_deadline: bool) -> None:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[int] = loop.create_future()
    deadline = soon() if at_once_with_the_deadline else time.monotonic() + 60

    async def wait() -> int:
        return await Within(future, deadline)

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    # Held up until time is up, the loop finds both in one turn.
    if at_once_with_the_deadline:
        time.sleep(0.03)
    loop.call_later(0, task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert future.cancelled()


async def test_what_only_gives_the_loop_turns_ends_too() -> None:
    turns = 0

    async def busy() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with pytest.raises(TimeoutError):
        await Within(busy(), soon())
    assert turns > 1
