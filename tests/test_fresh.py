"""The pages of large results are found by another thread than the event loop's."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from support import SCHEMES, fresh_url, run_ranks

from ruda_async import AsyncCommunicator, fresh
from ruda_async.tensors import pool

#: Elements of float32.
COUNT = 5_300_000


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The thread that touched each piece, and how long it was; nothing is left of earlier tests."""
    monkeypatch.setattr(pool, "_pool", pool.Pool())
    calls: list[tuple[int, int]] = []
    touch = fresh.touch

    def record(block: Any) -> None:
        calls.append((threading.get_ident(), len(block)))
        touch(block)

    monkeypatch.setattr(fresh, "touch", record)
    return calls


CALLS = {
    "all_reduce": lambda comm: comm.all_reduce(np.ones(COUNT, np.float32)),
    "all_gather_v": lambda comm: comm.all_gather_v(np.ones(COUNT // 2, np.float32)),
    "send_recv": lambda comm: comm.send(np.ones(COUNT, np.float32), 1) if comm.rank == 0 else comm.recv(0),
}


@pytest.mark.parametrize("scheme", [scheme for scheme in ("tcp", "shm") if scheme in SCHEMES])
@pytest.mark.parametrize("name", CALLS)
async def test_large_results_are_touched_once_by_a_thread(
    name: str, scheme: str, touched: list[tuple[int, int]]
) -> None:
    results: list[Any] = []

    async def body(comm: AsyncCommunicator) -> None:
        results.append(await CALLS[name](comm))

    await run_ranks(2, body, url=fresh_url(scheme))
    assert threading.get_ident() not in {thread for thread, _ in touched}
    assert sum(length for _, length in touched) >= sum(result is not None for result in results) * COUNT * 4
    assert max(length for _, length in touched) <= fresh._PIECE


async def test_memory_that_comes_back_is_not_touched_again(touched: list[tuple[int, int]]) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.all_reduce(np.ones(COUNT, np.float32))
        await comm.barrier()
        touched.clear()
        await comm.all_reduce(np.ones(COUNT, np.float32))

    await run_ranks(2, body, url=fresh_url("tcp"))
    assert touched == []


async def test_small_results_are_not(touched: list[tuple[int, int]]) -> None:
    async def body(comm: AsyncCommunicator) -> None:
        await comm.all_reduce(np.ones(100_000, np.float32))

    await run_ranks(2, body, url=fresh_url("tcp"))
    assert touched == []
