"""The halves of a link without UCX: what is sent, what is not, and when the caller learns of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ruda_async.transport import PeerLostError, Terms, wire

ruda_ucx = pytest.importorskip("ruda_ucx")
from ruda_ucx import memory, outgoing  # noqa: E402


class FakeEngine:
    """Keeps what is handed to it; the test ends the parts."""

    def __init__(self) -> None:
        self.frames: list[wire.Frame] = []
        self.parts: list[tuple[bytes, Callable[[int], None]]] = []

    def look(self, future: asyncio.Future[None]) -> None:
        pass

    def tag(self, value: int) -> int:
        return value

    def send(self, peer: int, endpoint: Any, data: Any, tag: Any, done: Any = None) -> None:
        if done is None:
            self.frames.append(wire.decode_prefix(data))
        else:
            self.parts.append((bytes(data), done))

    def kinds(self) -> list[int]:
        return [frame.kind for frame in self.frames]


def half(engine: FakeEngine, eager: int = 10, early: int = 10_000) -> outgoing.Outgoing:
    def broken(status: int) -> None:
        raise AssertionError(f"status {status}")

    return outgoing.Outgoing(1, engine, None, 0, Terms(eager, early), memory.NO_DEVICE, broken)  # type: ignore[arg-type]


async def awaited(waiting: Any) -> Any:
    return await waiting


async def offered(half: outgoing.Outgoing, payload: bytes) -> asyncio.Task[None]:
    task = asyncio.ensure_future(awaited(half.send(7, (memoryview(payload),), b"h")))
    await asyncio.sleep(0)
    return task


async def test_a_confirmed_message_is_sent_though_the_peer_leaves_at_once() -> None:
    """The receiver's word that it has the message comes before UCX's, and then the peer leaves."""
    for leave in ("refuse", "end"):
        engine = FakeEngine()
        sender = half(engine)
        task = await offered(sender, b"x" * 100)
        sender.on_pull(1, 5, outgoing.PULL.pack(0, 100))
        sender.on_release(1)
        assert not task.done()  # UCX still reads it
        getattr(sender, leave)(PeerLostError("gone", rank=1))
        if leave == "refuse":
            engine.parts[0][1](0)
        await task
        with pytest.raises(PeerLostError):
            sender.send(7, (memoryview(b"y"),), b"")


async def test_an_unconfirmed_message_is_not_sent_when_the_peer_leaves() -> None:
    engine = FakeEngine()
    sender = half(engine)
    task = await offered(sender, b"x" * 100)
    sender.end(PeerLostError("gone", rank=1))
    with pytest.raises(PeerLostError):
        await task


async def test_parts_are_the_bytes_that_were_asked_for_from_wherever_they_lie() -> None:
    engine = FakeEngine()
    sender = half(engine)
    data = bytes(range(100))
    sender.send(7, (memoryview(data[:30]), memoryview(b""), memoryview(data[30:])), b"")
    for start, size in ((0, 30), (10, 50), (30, 70), (99, 1)):
        sender.on_pull(1, 5, outgoing.PULL.pack(start, size))
        assert engine.parts[-1][0] == data[start : start + size]
    for start, size in ((0, 0), (0, 101), (100, 1), (1 << 63, 1)):
        with pytest.raises(outgoing.ProtocolError):
            sender.on_pull(1, 5, outgoing.PULL.pack(start, size))


async def test_a_cancelled_send_ends_when_its_parts_have() -> None:
    engine = FakeEngine()
    sender = half(engine)
    task = await offered(sender, b"x" * 100)
    sender.on_pull(1, 5, outgoing.PULL.pack(0, 50))
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    task.cancel()  # impatience changes nothing
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    sender.on_pull(1, 6, outgoing.PULL.pack(50, 50))
    assert len(engine.parts) == 1  # no further part is sent
    engine.parts[0][1](0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.kinds() == [wire.OFFER, wire.DROP]


async def test_early_messages_beyond_the_budget_are_offered() -> None:
    engine = FakeEngine()
    sender = half(engine, eager=100, early=1000)
    for _ in range(5):
        sender.send(7, (memoryview(bytes(100)),), b"")
    assert engine.kinds() == [wire.MESSAGE] * 4 + [wire.OFFER]
    sender.on_credit(228)
    sender.send(7, (memoryview(bytes(100)),), b"")
    assert engine.kinds()[-1] == wire.MESSAGE
