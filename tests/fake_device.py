"""A device that is played: memory that the host cannot reach, and streams that lag behind.

Nothing that is queued on a stream is done before somebody waits for it, so whoever does not wait sees poison.
Work that touches memory which a message is being sent from or received into, and a message whose memory
queued work still touches, are errors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Self

import numpy as np

from ruda_async.tensors import Reducer, Target, TensorSpec, as_view, dtype_of
from ruda_async.tensors.adapter import check_out
from ruda_async.tensors.device import say_staged

Span = tuple[int, int]

POISON = 0xA5


def meet(one: Span, other: Span) -> bool:
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
            assert not any(meet(span, one) for one in self.receiving), "used while a message comes in"
        for span in writes:
            assert not any(meet(span, one) for one in self.sending), "written while a message leaves"

    def check_streams(self, span: Span, *, writes: bool) -> None:
        """See that no stream still works with memory that the host or a message is about to use."""
        for stream in self.streams.values():
            for _, read, written in stream.waiting:
                assert not any(meet(span, one) for one in written), "used before its fence"
                assert not writes or not any(meet(span, one) for one in read), "written before its fence"

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
        assert not meet(_span(to), _span(data))
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
