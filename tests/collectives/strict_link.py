"""A group of ranks over links that use all the freedom a transport has.

Nothing is copied early: a send is finished only some turns after its receive was posted, and the bytes are
read from the sender's buffer, and written to the receiver's, at that very time. An algorithm that
changes a buffer too soon, reads one too soon, or waits in a circle, fails here.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ruda_async.collectives.operation import Settings
from ruda_async.transport.base import Capabilities, Envelope


class Broken(Exception):
    """What a link raises once its group was told to break."""


class StrictGroup:
    """The links of `size` ranks, and counters over all of them."""

    def __init__(
        self,
        size: int,
        settings: Settings | None = None,
        capabilities: Capabilities | None = None,
        seed: int = 0,
        break_after: int | None = None,
    ) -> None:
        self.size = size
        self.settings = settings or Settings()
        self.capabilities = capabilities or Capabilities()
        self.random = random.Random(seed)
        self.break_after = break_after
        self.broken = False
        self.messages = 0
        self.payload_bytes = 0
        self.largest = 0
        #: By ``(source, destination)``.
        self.sent_messages: Counter[tuple[int, int]] = Counter()
        self.sent_bytes: Counter[tuple[int, int]] = Counter()
        self.turns = 0
        self.pending: set[asyncio.Future[None]] = set()
        self.sends: dict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
        self.receives: dict[tuple[int, int, int], deque[Any]] = defaultdict(deque)
        self.busy: set[tuple[int, int, int]] = set()

    def match(self, stream: tuple[int, int, int]) -> None:
        """Start the oldest transfer of `stream` if both sides are there; one at a time, to keep order."""
        if stream in self.busy or not self.sends[stream] or not self.receives[stream]:
            return
        self.busy.add(stream)
        self._later(self.random.randrange(4), stream)

    def _later(self, turns: int, stream: tuple[int, int, int]) -> None:
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._later, turns - 1, stream)
        else:
            loop.call_soon(self._transfer, stream)

    def _transfer(self, stream: tuple[int, int, int]) -> None:
        outgoing, sent = self.sends[stream].popleft()
        incoming, received = self.receives[stream].popleft()
        payload = b"".join(outgoing)
        room = sum(len(buffer) for buffer in incoming)
        if sent.done() or received.done():
            return  # the group is broken
        if len(payload) != room:
            error = AssertionError(f"{stream}: a message of {len(payload)} bytes met a receive of {room}")
            sent.set_exception(error)
            received.set_exception(error)
            return
        at = 0
        for buffer in incoming:
            buffer[:] = payload[at : at + len(buffer)]
            at += len(buffer)
        sent.set_result(None)
        received.set_result(None)
        self.busy.discard(stream)
        self.match(stream)

    def future(self) -> asyncio.Future[None]:
        if self.broken:
            raise Broken
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pending.add(future)
        future.add_done_callback(self.pending.discard)
        return future

    def count(self, nbytes: int) -> None:
        self.messages += 1
        self.payload_bytes += nbytes
        self.largest = max(self.largest, nbytes)
        if self.break_after is not None and self.messages > self.break_after:
            self.broken = True
            for future in self.pending:
                if not future.done():
                    future.set_exception(Broken())
                    future.exception()  # seen: not every one is waited for


class StrictLink:
    """See `ruda_async.collectives.operation.Link`."""

    def __init__(self, group: StrictGroup, rank: int) -> None:
        self.group = group
        self.rank = rank
        self.size = group.size
        self.capabilities = group.capabilities
        self.settings: Any = group.settings
        self.providers: tuple[Any, ...] = ()

    def send(self, peer: int, *buffers: memoryview, lane: int = 0) -> Awaitable[None]:
        assert 0 <= peer < self.size
        assert peer != self.rank
        assert 0 <= lane < 16
        nbytes = sum(len(buffer) for buffer in buffers)
        self.group.count(nbytes)
        self.group.sent_messages[self.rank, peer] += 1
        self.group.sent_bytes[self.rank, peer] += nbytes
        sent = self.group.future()
        stream = self.rank, peer, lane
        self.group.sends[stream].append((buffers, sent))
        self.group.match(stream)
        return sent

    def recv_into(self, peer: int, *buffers: memoryview, lane: int = 0) -> Awaitable[None]:
        assert 0 <= peer < self.size
        assert peer != self.rank
        received = self.group.future()
        stream = peer, self.rank, lane
        self.group.receives[stream].append((buffers, received))
        self.group.match(stream)
        return received

    async def probe(self, peer: int, lane: int = 0) -> Envelope:
        raise NotImplementedError("reductions know what they receive")

    #: There is no memory that all see; `test_shared` runs those algorithms over transports that have it.
    heap = None

    async def allocate(self, adapter: Any, like: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return adapter.allocate(like, shape, dtype)

    async def turn(self) -> None:
        self.group.turns += 1
        await asyncio.sleep(0)


async def run_strict(group: StrictGroup, body: Callable[[StrictLink], Awaitable[Any]]) -> Sequence[Any]:
    """Run `body` on every rank; the results in rank order. Everything started has to be over then."""
    ranks = [StrictLink(group, rank) for rank in range(group.size)]
    results = await asyncio.wait_for(asyncio.gather(*(body(link) for link in ranks)), 20)
    assert not group.pending, "a rank returned before its transfers were over"
    assert not any(group.sends.values())
    assert not any(group.receives.values())
    return results
