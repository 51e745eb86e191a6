"""Cancelling, and running out of descriptors, leave nothing behind."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from rendezvous_support import HOST, assert_met, nothing_left, results, start
from support import free_port


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 13, 30, 100])
async def test_cancelling_leaves_nothing_behind(turns: int) -> None:
    port = free_port()
    with nothing_left():
        tasks = [start(rank, 6, (HOST, port)) for rank in range(5)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        assert [type(result) for result in await results(*tasks)] == [asyncio.CancelledError] * 5
    with socket.create_server((HOST, port)):
        pass


async def test_running_out_of_descriptors_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = 3
    accept = socket.socket.accept

    def scarce(self: socket.socket) -> Any:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise OSError(24, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    address = (HOST, free_port())
    assert_met(await results(*(start(rank, 3, address) for rank in range(3))), 3)
    assert refusals == 0
