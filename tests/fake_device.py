"""A device that is played: memory the host cannot reach, streams that lag behind, and a transport that looks.

Nothing that is queued on a stream is done before somebody waits for it, so whoever does not wait sees poison.
Work that touches memory which a message is being sent from or received into, and a message whose memory
queued work still touches, are errors.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Self

import numpy as np

from ruda_async.tensors import Reducer, Target, TensorSpec, as_view, dtype_of
from ruda_async.tensors.adapter import check_out
from ruda_async.tensors.device import say_staged
from ruda_async.transport import Buffer, Job, Transport, fail_future
from ruda_async.transport.registry import get_plugin

Span = tuple[int, int]

POISON = 0xA5


def _meet(one: Span, other: Span) -> bool:
    return max(one[0], other[0]) < min(one[1], other[1])


def _span(data: np.ndarray) -> Span:
    start = data.ctypes.data
    return start, start + data.nbytes


class Stream:
    """Work in the order in which it was queued."""

    def __init__(self, device: Device, handle: int) -> None:
        self.device = device
        self.handle = handle
        self.queued = self.done = 0
        self.waiting: deque[tuple[Callable[[], None], list[Span], list[Span]]] = deque()

    def put(
        self, work: Callable[[], None], reads: Sequence[np.ndarray], writes: Sequence[np.ndarray]
    ) -> None:
        spans = [_span(data) for data in reads], [_span(data) for data in writes]
        self.device.check_messages(*spans)
        self.waiting.append((work, *spans))
        self.queued += 1

    def step(self) -> None:
        work, _, _ = self.waiting.popleft()
        work()
        self.done += 1

    def mark(self) -> Callable[[], bool]:
        """Whether what is queued now is done."""
        goal = self.queued
        return lambda: self.done >= goal

    def synchronize(self) -> None:
        while self.waiting:
            self.step()


class Device:
    """All streams, and the messages that are under way."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self.current = self.stream()
        self.sending: list[Span] = []
        self.receiving: list[Span] = []
        self.staged = 0

    def stream(self) -> Stream:
        made = self.streams[len(self.streams) + 1] = Stream(self, len(self.streams) + 1)
        return made

    def check_messages(self, reads: list[Span], writes: list[Span]) -> None:
        for span in reads + writes:
            assert not any(_meet(span, one) for one in self.receiving), "used while a message comes in"
        for span in writes:
            assert not any(_meet(span, one) for one in self.sending), "written while a message leaves"

    def check_streams(self, span: Span, *, writes: bool) -> None:
        """See that no stream still works with memory that the host or a message is about to use."""
        for stream in self.streams.values():
            for _, read, written in stream.waiting:
                assert not any(_meet(span, one) for one in written), "used before its fence"
                assert not writes or not any(_meet(span, one) for one in read), "written before its fence"

    def tensor(self, values: Any) -> FakeTensor:
        """A tensor whose values the current stream has yet to write."""
        values = np.array(values)
        made = FakeTensor(self, values.dtype.name, values.shape)
        source = np.ascontiguousarray(values).reshape(-1).view(np.uint8).copy()
        self.current.put(lambda: made.data.__setitem__(slice(None), source), [], [made.data])
        return made


class FakeTensor:
    """Its bytes are the device's. `values` reads them as a program would, in order of the current stream."""

    def __init__(self, device: Device, dtype: str, shape: tuple[int, ...], data: Any = None) -> None:
        self.device = device
        self.dtype = dtype
        self.shape = shape
        nbytes = prod(shape) * dtype_of(dtype).itemsize
        self.data: np.ndarray = np.full(nbytes, POISON, np.uint8) if data is None else data
        self.axes = tuple(range(len(shape)))

    def moved(self, source: int, destination: int) -> FakeTensor:
        view = FakeTensor(self.device, self.dtype, self.shape, self.data)
        axes = list(self.axes)
        axes.insert(destination, axes.pop(source))
        view.axes = tuple(axes)
        view.base = self.shape if not hasattr(self, "base") else self.base
        view.shape = tuple(view.base[axis] for axis in axes)
        return view

    def laid_out(self) -> bool:
        return self.axes == tuple(range(len(self.shape)))

    def arranged(self) -> np.ndarray:
        """The array, its axes as they were moved; for work on the device alone."""
        base = getattr(self, "base", self.shape)
        return self.data.view(numpy_dtype(self.dtype)).reshape(base).transpose(self.axes)

    def values(self) -> np.ndarray:
        self.device.current.synchronize()
        self.device.check_streams(_span(self.data), writes=False)
        return self.arranged().copy()


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


# ---------------------------------------------------------------------- as the library sees it


class FakeMemory:
    """See `ruda_async.tensors.device.DeviceMemory`."""

    device_index = 0

    def __init__(self, data: np.ndarray, stream: Stream) -> None:
        self.data = data
        self.stream = stream
        self.nbytes = data.nbytes

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, part: slice, /) -> Self:
        assert part.step is None
        return type(self)(self.data[part], self.stream)

    def __setitem__(self, part: slice, source: Self, /) -> None:
        to, data = self.data[part], source.data
        assert len(to) == len(data)
        assert not _meet(_span(to), _span(data))
        self.stream.put(lambda: to.__setitem__(slice(None), data), [data], [to])

    @property
    def span(self) -> Span:
        return _span(self.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.data.ctypes.data, False), "stream": self.stream.handle}

    def scratch(self, nbytes: int) -> Self:
        return type(self)(np.full(nbytes, POISON, np.uint8), self.stream)

    def transposed(self, itemsize: int, shape: tuple[int, ...], axes: tuple[int, ...]) -> Self:
        to, data = self.scratch(self.nbytes), self.data
        carrier = np.dtype(f"u{itemsize}")

        def work() -> None:
            elements = data.view(carrier).reshape(shape).transpose(axes)
            to.data[:] = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)

        self.stream.put(work, [data], [to.data])
        return to

    def arithmetic(self, reducer: Reducer) -> Any:
        return FakeReducer(reducer)


class FakeReducer:
    """The host's arithmetic, when its turn on the stream has come."""

    def __init__(self, host: Reducer) -> None:
        self._host = host
        for name in ("dtype", "operator", "size", "itemsize", "partial_dtype", "partial_itemsize", "widens"):
            setattr(self, name, getattr(host, name))

    def _queue(self, method: Callable[..., None], out: FakeMemory, inputs: Sequence[FakeMemory]) -> None:
        arrays = [one.data for one in inputs]
        out.stream.put(lambda: method(out.data.data, *(array.data for array in arrays)), arrays, [out.data])

    def combine(self, out: FakeMemory, a: FakeMemory, b: FakeMemory) -> None:
        self._queue(self._host.combine, out, (a, b))

    def load(self, out_partial: FakeMemory, raw: FakeMemory) -> None:
        self._queue(self._host.load, out_partial, (raw,))

    def store(self, out_raw: FakeMemory, partial: FakeMemory) -> None:
        self._queue(self._host.store, out_raw, (partial,))

    def finish_inplace(self, raw: FakeMemory) -> None:
        self._queue(self._host.finish_inplace, raw, ())

    def reduce(self, out_raw: FakeMemory, raws: Sequence[FakeMemory]) -> None:
        self._queue(lambda out, *inputs: self._host.reduce(out, inputs), out_raw, raws)


class FakeAdapter:
    """Knows the kind; tensors are read and made by the adapter of a call."""

    kind = "fake"
    on_devices = True

    def accepts(self, value: object) -> bool:
        return type(value) is FakeTensor

    def for_call(self, value: FakeTensor, resident: bool) -> FakeAdapter:
        return (ResidentAdapter if resident else StagedAdapter)(value.device.current)

    def spec(self, value: FakeTensor) -> TensorSpec:
        return TensorSpec(value.dtype, value.shape)

    def movedim(self, value: FakeTensor, source: int, destination: int) -> FakeTensor:
        return value.moved(source, destination)

    def read(self, value: FakeTensor) -> memoryview:
        raise AssertionError("read outside of a call")

    def allocate(self, like: FakeTensor, shape: tuple[int, ...], dtype: str) -> Target[FakeTensor]:
        raise AssertionError("allocated outside of a call")

    def into(self, out: FakeTensor, spec: TensorSpec) -> Target[FakeTensor]:
        raise AssertionError("written outside of a call")


class StagedAdapter(FakeAdapter):
    """Through the host, and says so; on the stream that was current when the call was made."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def read(self, value: FakeTensor) -> memoryview:
        say_staged("fake")
        value.device.staged += 1
        self.stream.synchronize()
        value.device.check_streams(_span(value.data), writes=False)
        return np.ascontiguousarray(value.arranged()).reshape(-1).view(np.uint8).data

    def allocate(self, like: FakeTensor, shape: tuple[int, ...], dtype: str) -> Target[FakeTensor]:
        return self._staged(FakeTensor(like.device, dtype, shape))

    def into(self, out: FakeTensor, spec: TensorSpec) -> Target[FakeTensor]:
        check_out(ADAPTER, out, spec)
        return self._staged(out)

    def _staged(self, tensor: FakeTensor) -> Target[FakeTensor]:
        say_staged("fake")
        room = np.empty(tensor.data.nbytes, np.uint8)

        def finish() -> FakeTensor:
            tensor.device.staged += 1
            shaped = room.view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)
            to = tensor.arranged()
            self.stream.put(lambda: to.__setitem__(..., shaped), [], [tensor.data])
            return tensor

        return Target(room.data, finish)


class ResidentAdapter(FakeAdapter):
    """In device memory; all is queued on the stream that was current when the call was made."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def read(self, value: FakeTensor) -> memoryview:
        if value.laid_out():
            return as_view(FakeMemory(value.data, self.stream))
        memory = FakeMemory(np.full(value.data.nbytes, POISON, np.uint8), self.stream)
        source = value.arranged()

        def work() -> None:
            memory.data[:] = np.ascontiguousarray(source).reshape(-1).view(np.uint8)

        self.stream.put(work, [value.data], [memory.data])
        return as_view(memory)

    def allocate(self, like: FakeTensor, shape: tuple[int, ...], dtype: str) -> Target[FakeTensor]:
        made = FakeTensor(like.device, dtype, shape)
        return Target(as_view(FakeMemory(made.data, self.stream)), lambda: made)

    def into(self, out: FakeTensor, spec: TensorSpec) -> Target[FakeTensor]:
        check_out(ADAPTER, out, spec)
        if out.laid_out():
            return Target(as_view(FakeMemory(out.data, self.stream)), lambda: out)
        room = np.full(out.data.nbytes, POISON, np.uint8)

        def finish() -> FakeTensor:
            to, shaped = out.arranged(), room.view(numpy_dtype(out.dtype)).reshape(out.shape)
            self.stream.put(lambda: to.__setitem__(..., shaped), [room], [out.data])
            return out

        return Target(as_view(FakeMemory(room, self.stream)), finish)


ADAPTER = FakeAdapter()


# ---------------------------------------------------------------------- a transport that takes such memory


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
            assert not any(_meet(span, one) for one in self._device.receiving)
            assert kind == "send" or not any(_meet(span, one) for one in self._device.sending)
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
