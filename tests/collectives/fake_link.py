"""A group of ranks as tasks of one loop, joined by queues: just enough to run one algorithm."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ruda_async.transport.base import Capabilities, Envelope


@dataclass
class FakeSettings:
    algorithm: str | None = None
    order: str = "exact"
    max_bytes: int | None = None
    device_memory: bool = False


@dataclass
class FakeGroup:
    size: int
    capabilities: Capabilities = field(default_factory=Capabilities)
    settings: FakeSettings = field(default_factory=FakeSettings)
    queues: Any = None
    largest: int = 0
    messages: int = 0
    payload_bytes: int = 0

    def __post_init__(self) -> None:
        self.queues = defaultdict(asyncio.Queue)

    def link(self, rank: int) -> FakeLink:
        return FakeLink(self, rank)


class FakeLink:
    """Copies on send, so that a buffer changed too late shows as a wrong result."""

    def __init__(self, group: FakeGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = group.size
        self.capabilities = group.capabilities
        self.settings = group.settings
        self.providers: tuple[Any, ...] = ()
        self._tails: dict[tuple[int, int], asyncio.Task[None]] = {}

    def send(self, peer: int, *buffers: memoryview, lane: int = 0) -> Awaitable[None]:
        assert 0 <= peer < self.size
        assert peer != self.rank
        assert 0 <= lane < 16
        payload = b"".join(buffers)
        group = self.group
        group.largest = max(group.largest, len(payload))
        group.messages += 1
        group.payload_bytes += len(payload)
        group.queues[self.rank, peer, lane].put_nowait(payload)
        return asyncio.sleep(0)

    def recv_into(self, peer: int, *buffers: memoryview, lane: int = 0) -> Awaitable[None]:
        before = self._tails.get((peer, lane))

        async def receive() -> None:
            if before is not None:
                await before
            payload = await self.group.queues[peer, self.rank, lane].get()
            assert len(payload) == sum(len(b) for b in buffers), "length differs"
            at = 0
            for buffer in buffers:
                buffer[:] = payload[at : at + len(buffer)]
                at += len(buffer)

        task = asyncio.ensure_future(receive())
        self._tails[peer, lane] = task
        return task

    async def probe(self, peer: int, lane: int = 0) -> Envelope:
        queue = self.group.queues[peer, self.rank, lane]
        payload = await queue.get()
        queue._queue.appendleft(payload)
        return Envelope(b"", len(payload))

    #: There is no memory that all see; `test_shared` runs those algorithms over transports that have it.
    heap = None

    async def allocate(self, adapter: Any, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return adapter.allocate(like, shape, dtype)

    async def turn(self) -> None:
        await asyncio.sleep(0)


async def run_group(
    size: int, body: Callable[[FakeLink], Awaitable[Any]], group: FakeGroup | None = None
) -> Sequence[Any]:
    """Run `body` on every rank of a fresh group; the results in rank order."""
    group = group or FakeGroup(size)
    return await asyncio.wait_for(asyncio.gather(*(body(group.link(r)) for r in range(size))), 20)
