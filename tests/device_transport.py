"""A transport that takes memory of a played device, and looks whether it may be used yet."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fake_device import Device, FakeMemory, meet

from ruda_async.transport import Buffer, Job, Transport, fail_future
from ruda_async.transport.registry import get_plugin


class DeviceTransport:
    """Another transport's messages, from and to memory of `Device` too."""

    def __init__(self, inner: Transport, device: Device, hosts: tuple[int, ...] | None) -> None:
        self._inner = inner
        self._device = device
        self._last: dict[Any, asyncio.Future[None]] = {}
        self._under_way: defaultdict[int, dict[Any, Any]] = defaultdict(dict)
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.capabilities = replace(
            inner.capabilities, device_memory=True, segment_bytes=1024, hosts=hosts, shared_memory=False
        )
        self.probe, self.stats, self.close, self.abort = inner.probe, inner.stats, inner.close, inner.abort

    @property
    def is_stale(self) -> Callable[[int], bool]:
        return self._inner.is_stale

    @is_stale.setter
    def is_stale(self, asked: Callable[[int], bool]) -> None:
        self._inner.is_stale = asked

    def describe(self) -> dict[str, object]:
        return {"scheme": "device"}

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        return self._start("send", peer, tag, buffers, self._send(peer, tag, buffers, head))

    def recv_into(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        return self._start("receive", peer, tag, buffers, self._receive(peer, tag, buffers, head))

    def fail(self, tag: int, error: BaseException) -> None:
        self._inner.fail(tag, error)
        for task, (outcome, _) in tuple(self._under_way[tag].items()):
            fail_future(outcome, error)
            task.cancel()

    # ------------------------------------------------------------------ messages

    def _start(
        self, kind: str, peer: int, tag: int, buffers: Sequence[Buffer], work: Coroutine[Any, Any, None]
    ) -> Awaitable[None]:
        """Messages of one (peer, tag) go one by one, each when the device is done with its memory."""
        spans = [b.span for b in buffers if isinstance(b, FakeMemory) and b.nbytes]
        fences = [b.stream.mark() for b in buffers if isinstance(b, FakeMemory)]
        before = self._last.get((kind, peer, tag))
        held = self._device.sending if kind == "send" else self._device.receiving
        for span in spans:
            # Two messages may read one memory at once; one that is written is nobody else's.
            assert not any(meet(span, one) for one in self._device.receiving)
            assert kind == "send" or not any(meet(span, one) for one in self._device.sending)
        held.extend(spans)
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            if before is not None:
                await asyncio.wait((before,))
            streams = {b.stream for b in buffers if isinstance(b, FakeMemory)}
            while not all(fence() for fence in fences):
                for stream in streams:
                    if stream.waiting:
                        stream.step()
                await asyncio.sleep(0)
            for span in spans:
                self._device.check_streams(span, writes=kind == "receive")
            await work

        task = asyncio.ensure_future(run())
        self._last[kind, peer, tag] = outcome
        # The buffers stay alive as long as their addresses are looked at.
        self._under_way[tag][task] = outcome, buffers

        def over(_: Any) -> None:
            work.close()
            for span in spans:
                held.remove(span)
            del self._under_way[tag][task]
            if outcome.done():
                return
            if task.cancelled():
                outcome.cancel()
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)

        task.add_done_callback(over)
        outcome.add_done_callback(lambda _: task.cancel())
        return outcome

    async def _send(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes) -> None:
        await self._inner.send(peer, tag, [_host_copy(buffer) for buffer in buffers], head)

    async def _receive(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes) -> None:
        rooms = [np.empty(buffer.nbytes, np.uint8) for buffer in buffers]
        await self._inner.recv_into(peer, tag, [room.data for room in rooms], head)
        for buffer, room in zip(buffers, rooms, strict=True):
            data = buffer.data if isinstance(buffer, FakeMemory) else np.frombuffer(buffer, np.uint8)
            data[:] = room


def _host_copy(buffer: Any) -> memoryview:
    data = buffer.data if isinstance(buffer, FakeMemory) else np.frombuffer(buffer, np.uint8)
    return data.copy().data


class DevicePlugin:
    """``device://``: `memory://` for ranks with a `Device`."""

    scheme = "device"
    summary = "a device that is played"
    rank_per = "task"
    example = "device://example"
    preference = -100
    parameters = get_plugin("memory").parameters

    def __init__(self, device: Device, hosts: tuple[int, ...] | None = None) -> None:
        self.device = device
        self.hosts = hosts
        self.providers: tuple[Any, ...] = ()

    def unavailable(self) -> str | None:
        return None

    async def connect(self, job: Job) -> Transport:
        made: Any = DeviceTransport(await get_plugin("memory").connect(job), self.device, self.hosts)
        if self.providers:
            made.providers = self.providers
        return made
