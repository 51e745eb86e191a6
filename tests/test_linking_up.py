"""The deadline holds for every step of connecting, also those after all ranks have met."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import pytest
from support import SCHEMES, free_port, fresh_url, outcome

import ruda_async
from ruda_async import CollectiveTimeoutError, PeerLostError, RudaError
from ruda_async.node import Node


async def connect(url: str, rank: int, timeout: float) -> Any:
    return await ruda_async.connect(url, rank=rank, world_size=2, timeout=timeout)


async def test_rank_0_that_falls_silent_after_the_links(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Node._tell

    def tell(self: Node, members: Any, notice: bytes) -> None:
        if self.transport.rank:
            honest(self, members, notice)

    monkeypatch.setattr(Node, "_tell", tell)
    started = monotonic()
    first, error = await asyncio.gather(connect(url, 0, 20), outcome(connect(url, 1, 0.4)))
    assert monotonic() - started < 5
    assert isinstance(error, CollectiveTimeoutError), error
    assert error.missing == (0,)
    assert "rank 0 linked up and then said nothing" in str(error)
    await first.close()


@pytest.mark.skipif("shm" not in SCHEMES, reason="no shared memory transport here")
async def test_a_rank_that_hangs_before_it_shares_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named; once it goes on, it hears that the other has gone."""
    from ruda_shm import pairs

    honest = pairs._give
    goes_on = asyncio.Event()

    async def give(*arguments: Any) -> Any:
        await goes_on.wait()
        return await honest(*arguments)

    monkeypatch.setattr(pairs, "_give", give)
    url = fresh_url("shm")
    started = monotonic()
    hanging = asyncio.ensure_future(connect(url, 1, 20))
    error = await outcome(connect(url, 0, 0.4))
    assert monotonic() - started < 5
    assert isinstance(error, CollectiveTimeoutError), error
    assert error.missing == (1,), error
    assert "rank 1" in str(error)
    assert "timeout=0.4 s" in str(error)
    goes_on.set()
    late = await outcome(hanging)
    assert isinstance(late, PeerLostError), late
    assert monotonic() - started < 8


async def names_rank(late: int, url: str, goes_on: asyncio.Event) -> None:
    """The other rank runs out of time and says whom it waited for; the late one ends too."""
    started = monotonic()
    hanging = asyncio.ensure_future(connect(url, late, 20))
    error = await outcome(connect(url, 1 - late, 1))
    assert monotonic() - started < 8
    assert isinstance(error, CollectiveTimeoutError), error
    assert error.missing == (late,), error
    assert f"rank {late} linked up and" in str(error)
    assert "timeout=1 s" in str(error)
    goes_on.set()
    assert isinstance(await outcome(hanging), RudaError)
    assert monotonic() - started < 16


async def test_a_rank_that_does_not_tell_of_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    from ruda_auto.router import AutoTransport

    honest = AutoTransport.agree
    goes_on = asyncio.Event()

    async def agree(self: Any, job: Any) -> None:
        if job.rank == 1:
            await goes_on.wait()
        await honest(self, job)

    monkeypatch.setattr(AutoTransport, "agree", agree)
    await names_rank(1, fresh_url("auto"), goes_on)


async def test_a_rank_0_that_makes_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from ruda_torch import transport

    honest = transport._store
    goes_on = asyncio.Event()

    async def store(linked: Any, job: Any) -> Any:
        if job.rank == 0:
            await goes_on.wait()
        return await honest(linked, job)

    monkeypatch.setattr(transport, "_store", store)
    await names_rank(0, f"torch+gloo://127.0.0.1:{free_port()}/linking", goes_on)


@pytest.mark.skipif("shm" not in SCHEMES, reason="no shared memory transport here")
async def test_a_rank_whose_memory_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no lack of memory."""
    from ruda_shm import pairs

    honest = pairs._ready

    async def ready(job: Any, sock: Any, rank: int, *call: Any, reading: bool = False) -> Any:
        if not reading:
            raise CollectiveTimeoutError("not taken", missing=(rank,))
        return await honest(job, sock, rank, *call, reading=True)

    monkeypatch.setattr(pairs, "_ready", ready)
    url = fresh_url("shm")
    first, second = await asyncio.gather(outcome(connect(url, 0, 5)), outcome(connect(url, 1, 5)))
    assert isinstance(first, PeerLostError), first
    assert isinstance(second, CollectiveTimeoutError), second
    assert second.missing == (0,)
