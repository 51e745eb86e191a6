"""Parameters that have to be the same on all ranks, and are not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support import fresh_url, outcome

import ruda_async
from ruda_async import ConfigError, ProtocolError
from ruda_async.transport.alike import without_alike

pytestmark = pytest.mark.timeout(60)


async def connected(url: str, options: list[dict[str, Any]], timeout: float = 30) -> list[Any]:
    """What became of each rank's `connect`."""
    connecting = [
        outcome(ruda_async.connect(url, rank=rank, world_size=len(options), timeout=timeout, **given))
        for rank, given in enumerate(options)
    ]
    return await asyncio.gather(*connecting)


@pytest.mark.parametrize("scheme", ["tcp", "shm", "auto", "faults+tcp"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            [{}, {}, {"checksum": True}],
            "rank 2 has checksum=true and rank 0 has checksum=false; give all ranks the same",
        ),
        (
            [{"heartbeat": 2}, {}, {}],
            "rank 1 has heartbeat=10 and rank 0 has heartbeat=2; give all ranks the same",
        ),
    ],
)
async def test_all_ranks_are_told_who_differs(scheme: str, options: list[dict[str, Any]], text: str) -> None:
    wrapper, _, inner = scheme.rpartition("+")
    url = fresh_url(inner)
    errors = await connected(f"{wrapper}+{url}" if wrapper else url, options)
    assert [type(error).__mro__[1] for error in errors] == [ConfigError] * 3
    assert [str(error) for error in errors] == [text] * 3
    assert {error.rank for error in errors} == {int(text.split()[1])}


async def test_what_is_a_ranks_own_may_differ() -> None:
    found = await connected(
        fresh_url("tcp"), [{"eager_bytes": 1000, "linger": 1}, {"early_bytes": 8192, "segment_bytes": 4096}]
    )
    for comm in found:
        assert not isinstance(comm, BaseException), comm
    await asyncio.gather(*(comm.barrier() for comm in found))
    await asyncio.gather(*(comm.close() for comm in found))


async def test_a_newcomer_that_differs_is_turned_away_and_the_job_waits_for_another() -> None:
    url = fresh_url("tcp")
    members = await connected(url, [{}, {}])
    growing = [asyncio.ensure_future(comm.grow(1, timeout=40)) for comm in members]
    refused = await outcome(ruda_async.connect(url, join=True, timeout=40, checksum=True))
    assert isinstance(refused, ConfigError)
    assert "checksum=true" in str(refused)
    assert "checksum=false" in str(refused)
    joined = await ruda_async.connect(url, join=True, timeout=40)
    grown = [*(await asyncio.gather(*growing)), joined]
    await asyncio.gather(*(comm.barrier() for comm in grown))
    await asyncio.gather(*(comm.close() for comm in [*grown, *members]))


@pytest.mark.parametrize("payload", [b"", b"\1", b"\5\0abcd", b"\1\0\xff", b"\xff\xff"])
def test_a_payload_without_them_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="rank 3 did not tell its parameters") as caught:
        without_alike(payload, 3)
    assert caught.value.rank == 3
