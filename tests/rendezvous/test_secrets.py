"""Only those who know the secret are let in."""

from __future__ import annotations

import time

from rendezvous_support import HOST, assert_met, results, start
from support import free_port

from ruda_async.errors import AuthenticationError, CollectiveTimeoutError
from ruda_async.transport.job import Secret


async def test_another_secret_is_refused_at_once_and_mentioned_when_time_is_up() -> None:
    address = (HOST, free_port())
    server = start(0, 3, address, timeout=1.0, secret=Secret(b"right"))
    friend = start(1, 3, address, timeout=1.0, secret=Secret(b"right"))
    began = time.monotonic()
    for wrong in (b"wrong", b""):
        (error,) = await results(start(2, 3, address, secret=Secret(wrong)))
        assert type(error) is AuthenticationError
        assert "RUDA_SECRET" in str(error)
    assert time.monotonic() - began < 5
    for late in await results(server, friend):
        assert type(late) is CollectiveTimeoutError
        assert late.missing == (2,)
        assert "did not prove this job's secret" in str(late)
        assert "right" not in str(late)


async def test_one_secret_lets_all_in() -> None:
    address = (HOST, free_port())
    tasks = [start(rank, 3, address, secret=Secret(b"right")) for rank in range(3)]
    assert_met(await results(*tasks), 3)
