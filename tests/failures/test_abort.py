"""Ranks that drop everything at once, or leave before they could say why they gave a call up."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from support import outcome, run_ranks

from ruda_async import AsyncCommunicator, CommunicatorClosedError, PeerLostError
from ruda_async.transport.base import TakenBack


async def test_who_aborts_is_lost_to_all_and_has_cancelled_nothing(url: str) -> None:
    async def body(comm: AsyncCommunicator) -> BaseException | None:
        await comm.barrier()
        call = asyncio.ensure_future(comm.all_reduce(np.zeros(300_000)))
        await asyncio.sleep(0)
        if comm.rank == 0:
            comm.abort("had enough")
        return await outcome(call)

    aborted, *others = await run_ranks(3, body, url=url)
    assert isinstance(aborted, CommunicatorClosedError)
    assert "had enough" in str(aborted)
    assert [(type(error), error.rank) for error in others] == [(PeerLostError, 0)] * 2


@pytest.mark.parametrize("stands_still", [False, True])
async def test_nobody_waits_for_the_reason_of_a_rank_that_has_left(
    url: str, stands_still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its notice had to wait for a peer that took nothing, and closing is bounded in time."""
    gone = asyncio.Event()

    async def body(comm: AsyncCommunicator) -> BaseException | None:
        await comm.barrier()
        if comm.rank == 0:
            monkeypatch.setattr(comm.node, "announce", lambda *_: None)
            call = asyncio.ensure_future(comm.scatter(np.zeros(2_000_000), 0))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait((call,))
            await comm.close()
            gone.set()
            return None
        node: Any = comm.node
        recv_into = node.transport.recv_into

        def taken_back(peer: int, tag: int, buffers: Any, head: bytes = b"") -> Any:
            if len(head) < 2:  # a notice
                return recv_into(peer, tag, buffers, head)
            return never(peer, tag)

        async def never(peer: int, tag: int) -> None:
            if stands_still:
                await gone.wait()
                while not node.left:
                    await asyncio.sleep(0)
            raise TakenBack(peer, tag)

        monkeypatch.setattr(node.transport, "recv_into", taken_back)
        return await outcome(comm.scatter(None, 0, like=np.zeros(0)))

    _, *errors = await run_ranks(2, body, url=url, limit=8, timeout=30)
    assert [(type(error), error.rank) for error in errors] == [(PeerLostError, 0)]
    assert "closed its communicator" in str(errors[0])
