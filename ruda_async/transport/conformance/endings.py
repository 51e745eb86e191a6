"""What a transport promises of its end and its peers', and of many ranks at once."""

from __future__ import annotations

import asyncio

from ...errors import CommunicatorClosedError, PeerLostError
from ..base import Transport
from .scenario import meet, pattern, room, scenario

__all__: list[str] = []


@scenario(2)
async def goodbye(t: Transport) -> None:
    """What was delivered before a peer closed is readable, in order; only then is the peer lost."""
    if t.rank == 0:
        for i in range(10):
            await t.send(1, 95, (pattern(i, 1000),))
        await t.close()
    else:
        try:
            await t.recv_into(0, 96, (room(1),))
        except PeerLostError as error:
            assert error.rank == 0
            assert error.orderly
        else:
            raise AssertionError("a message came that was never sent")
        for i in range(10):
            buffer = room(1000)
            await t.recv_into(0, 95, (buffer,))
            assert buffer == pattern(i, 1000)
        for call in (
            lambda: t.recv_into(0, 95, (room(1),)),
            lambda: t.probe(0, 95),
            lambda: t.send(0, 95, (room(1),)),
        ):
            try:
                await call()
            except PeerLostError as error:
                assert error.rank == 0
            else:
                raise AssertionError("a peer that left was reached")


@scenario(3)
async def aborted_peer(t: Transport) -> None:
    """An aborting rank is lost to those who wait for it; the others still reach each other."""
    await meet(t)
    if t.rank == 2:
        t.abort("to see what the others say")
        t.abort("twice is harmless")
        return
    try:
        await t.recv_into(2, 99, (room(1),))
    except PeerLostError as error:
        assert error.rank == 2
        assert not error.orderly
    else:
        raise AssertionError("a message came from an aborted rank")
    peer = 1 - t.rank
    await t.send(peer, 98, (pattern(t.rank, 50),))
    buffer = room(50)
    await t.recv_into(peer, 98, (buffer,))
    assert buffer == pattern(peer, 50)


@scenario(2)
async def closed_here(t: Transport) -> None:
    """After `close`, twice, calls and what was pending raise `CommunicatorClosedError`."""
    peer = 1 - t.rank
    pending = t.recv_into(peer, 97, (room(1),))
    await meet(t)
    await asyncio.gather(t.close(), t.close())
    await t.close()
    for call in (
        lambda: pending,
        lambda: t.recv_into(peer, 97, (room(1),)),
        lambda: t.probe(peer, 97),
        lambda: t.send(peer, 97, (room(1),)),
    ):
        try:
            await call()
        except (CommunicatorClosedError, PeerLostError):
            pass
        else:
            raise AssertionError("a closed transport went on")


@scenario(5)
async def everyone_to_everyone(t: Transport) -> None:
    """Five ranks, all pairs at once, many rounds."""
    others = [p for p in range(t.world_size) if p != t.rank]
    for turn in range(20):
        nbytes = (turn * 7919) % 200_000
        buffers = {p: room(nbytes) for p in others}
        receives = [t.recv_into(p, turn, (buffers[p],)) for p in others]
        sends = [t.send(p, turn, (pattern(t.rank * 100 + p, nbytes),)) for p in others]
        for waiting in (*receives, *sends):
            await waiting
        for p in others:
            assert buffers[p] == pattern(p * 100 + t.rank, nbytes)
