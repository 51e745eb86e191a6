"""Faults by messages: around a whole transport.

A message waits on its way out: its `send` is finished when the transport inside has taken it. It waits in a
copy, since a sender that is cancelled may change its memory before the transport inside hears of it. Without
a fault that applies, calls go straight through.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ruda_async.transport import (
    Buffer,
    CommunicatorClosedError,
    Envelope,
    Ready,
    Transport,
    fail_future,
    no_peer,
)

if TYPE_CHECKING:
    from . import FaultParameters

__all__ = ["FaultyTransport"]

#: Seconds that `close` gives messages that are still held back, beyond their delay, and at most for that.
_PATIENCE = 2.0


class _Held:
    """A message that has not left yet."""

    __slots__ = ("at", "buffers", "future", "head", "peer", "tag")

    def __init__(
        self,
        peer: int,
        tag: int,
        buffers: Sequence[Buffer],
        head: bytes,
        at: float,
        future: asyncio.Future[None],
    ) -> None:
        self.peer = peer
        self.tag = tag
        self.buffers = buffers
        self.head = head
        self.at = at
        self.future = future


class FaultyTransport:
    """See `ruda_async.transport.Transport`.

    Args:
        inner: the transport that carries the messages.
        faults: what goes wrong on this rank.
        declared: what was asked for, on whatever rank.
        scheme: what `describe` says.
        own_process: whether this rank is a process, which `kill_after` kills; else its links are dropped.
    """

    def __init__(
        self,
        inner: Transport,
        faults: FaultParameters,
        declared: FaultParameters,
        *,
        scheme: str,
        own_process: bool,
    ) -> None:
        self._inner = inner
        self._faults = faults
        self._scheme = scheme
        self._own_process = own_process
        self._loop = asyncio.get_running_loop()
        self._random = random.Random(f"{faults.seed}/{inner.rank}/messages")
        self._delays = bool(faults.delay_ms or faults.jitter_ms or faults.bandwidth)
        self._count = 0
        #: By peer: when its slow line has carried what was sent so far.
        self._free_at: dict[int, float] = {}
        #: Messages on their way, in the order in which they must leave: by peer, or by peer and tag.
        self._lanes: dict[tuple[int, int], deque[_Held]] = {}
        self._stalled: list[_Held] = []
        self._timers: dict[tuple[int, int], asyncio.TimerHandle] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._closed: CommunicatorClosedError | None = None
        self._closing: asyncio.Task[None] | None = None
        self.rank = inner.rank
        self.world_size = inner.world_size
        own = inner.capabilities
        self.capabilities = replace(
            own,
            ordered=own.ordered and not declared.reorder,
            latency=own.latency + (declared.delay_ms + declared.jitter_ms / 2) / 1000,
            bandwidth=min(own.bandwidth, declared.bandwidth or own.bandwidth),
        )
        # Nothing of the way in is changed.
        self.recv_into = inner.recv_into
        self.probe: Callable[[int, int], Awaitable[Envelope]] = inner.probe

    @property
    def is_stale(self) -> Callable[[int], bool]:
        """See `Transport.is_stale`."""
        return self._inner.is_stale

    @is_stale.setter
    def is_stale(self, value: Callable[[int], bool]) -> None:
        self._inner.is_stale = value

    # ------------------------------------------------------------------ messages

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        """See `Transport.send`."""
        if self._closed is not None:
            raise self._closed
        if peer == self.rank or not 0 <= peer < self.world_size:
            raise no_peer(peer, self.rank, self.world_size)
        faults = self._faults
        count = self._count
        self._count = count + 1
        if faults.kill_after is not None and count >= faults.kill_after:
            self._die()
        stalls = faults.stall_after is not None and count >= faults.stall_after
        if not stalls and not self._delays:
            return self._inner.send(peer, tag, buffers, head)
        copies = [memoryview(bytes(b)) if isinstance(b, memoryview) else b for b in buffers]
        held = _Held(peer, tag, copies, head, self._when(peer, buffers), self._loop.create_future())
        if stalls:
            self._stalled = [one for one in self._stalled if not one.future.done()]
            self._stalled.append(held)
        else:
            self._hold(held)
        return held.future

    def _when(self, peer: int, buffers: Sequence[Buffer]) -> float:
        """When a message may leave."""
        faults, at = self._faults, self._loop.time()
        if faults.bandwidth:
            at = max(at, self._free_at.get(peer, 0.0)) + sum(b.nbytes for b in buffers) / faults.bandwidth
            self._free_at[peer] = at
        return at + (faults.delay_ms + faults.jitter_ms * self._random.random()) / 1000

    def _hold(self, held: _Held) -> None:
        key = (held.peer, held.tag if self._faults.reorder else -1)
        lane = self._lanes.get(key)
        if lane is None:
            self._lanes[key] = deque((held,))
            self._empty.clear()
            self._timers[key] = self._loop.call_at(held.at, self._release, key)
        else:
            lane.append(held)  # a message never leaves before the one ahead of it

    def _release(self, key: tuple[int, int]) -> None:
        """Let go what has waited long enough, in order."""
        lane = self._lanes[key]
        now = self._loop.time() + 1e-6
        while lane and (lane[0].at <= now or lane[0].future.done()):
            self._leave(lane.popleft())
        if lane:
            self._timers[key] = self._loop.call_at(lane[0].at, self._release, key)
            return
        del self._lanes[key], self._timers[key]
        if not self._lanes:
            self._empty.set()

    def _leave(self, held: _Held) -> None:
        """Hand a message to the transport inside, unless it was taken back."""
        future = held.future
        if future.done():
            return
        try:
            sending = self._inner.send(held.peer, held.tag, held.buffers, held.head)
        except Exception as error:
            fail_future(future, error)
            return
        if type(sending) is Ready:
            future.set_result(None)
            return
        inner = asyncio.ensure_future(sending)
        future.add_done_callback(lambda _: inner.cancel())
        inner.add_done_callback(lambda done: _pass_on(done, future))

    def fail(self, tag: int, error: BaseException) -> Iterable[asyncio.Future[None]] | None:
        """See `Transport.fail`."""
        for held in self._held():
            if held.tag == tag:
                fail_future(held.future, error)
        return self._inner.fail(tag, error)

    def _held(self) -> list[_Held]:
        return [held for lane in self._lanes.values() for held in lane] + self._stalled

    # ------------------------------------------------------------------ life

    def _die(self) -> None:
        """The end of this rank, as by ``kill -9``."""
        if self._own_process:
            os.kill(os.getpid(), signal.SIGKILL)
        self.abort("kill_after")
        raise self._shut("died by kill_after")

    def _shut(self, how: str) -> CommunicatorClosedError:
        if self._closed is None:
            self._closed = CommunicatorClosedError(f"rank {self.rank} {how}")
        return self._closed

    def describe(self) -> dict[str, object]:
        """See `Transport.describe`."""
        return {**self._inner.describe(), "scheme": self._scheme, "faults": repr(self._faults)}

    def stats(self) -> dict[int, dict[str, int]]:
        """See `Transport.stats`: what has left."""
        return self._inner.stats()

    async def close(self) -> None:
        """See `Transport.close`; what is held back leaves first."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        error = self._shut("closed this communicator")
        longest = (self._faults.delay_ms + self._faults.jitter_ms) / 1000
        try:
            async with asyncio.timeout(min(longest, _PATIENCE) + _PATIENCE):
                await self._empty.wait()
        except TimeoutError:
            pass
        await self._inner.close()
        self._drop(error)

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        error = self._shut(f"aborted: {reason}")
        self._inner.abort(reason)
        self._drop(error)

    def _drop(self, error: BaseException) -> None:
        for timer in self._timers.values():
            timer.cancel()
        held = self._held()
        self._timers.clear()
        self._lanes.clear()
        self._stalled.clear()
        self._empty.set()
        for one in held:
            fail_future(one.future, error)


def _pass_on(inner: asyncio.Future[None], outer: asyncio.Future[None]) -> None:
    """The send inside is over; so is the one outside."""
    if inner.cancelled():
        outer.cancel()
        return
    error = inner.exception()
    if error is not None:
        fail_future(outer, error)
    elif not outer.done():
        outer.set_result(None)
