"""What the transport does with device memory, on a device that is played by host memory.

UCX moves the bytes for real; the fake decides when the "device" is done with them.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import fresh_url, run_ranks
from ucx_support import run_transports

from ruda_async import AsyncCommunicator
from ruda_async.transport import Receive, Transport

ruda_ucx = pytest.importorskip("ruda_ucx")
torch = pytest.importorskip("torch", reason="pip install 'ruda-async[torch]'")
from ruda_ucx import inbound, memory  # noqa: E402
from torch_calls import CALLS, same, values  # noqa: E402

from ruda_async.tensors.torch_adapter import TorchAdapter  # noqa: E402
from ruda_async.tensors.torch_device import TorchResident  # noqa: E402


class FakeBuffer:
    """Memory that only an accelerator may touch: it has no buffer protocol."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.nbytes = array.nbytes
        self.__cuda_array_interface__ = {
            "shape": (array.nbytes,),
            "typestr": "|u1",
            "data": (array.ctypes.data, False),
            "strides": None,
            "version": 3,
        }


def host_view(buffer: Any) -> np.ndarray:
    address = buffer.__cuda_array_interface__["data"][0]
    return np.ctypeslib.as_array((ctypes.c_uint8 * buffer.nbytes).from_address(address))


class FakeAccelerator:
    """Counts what it is asked; `gate` says whether the device has done what was queued."""

    def __init__(self, native: bool) -> None:
        self.native = native
        self.gate: Callable[[], bool] = lambda: True
        self.reads = self.writes = self.fences = 0

    def fence(self, buffers: Sequence[Any]) -> Callable[[], bool]:
        self.fences += 1
        return lambda: self.gate()

    def room(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def read(self, buffer: Any, *, settled: bool = False) -> memoryview:
        assert settled is self.native
        self.reads += 1
        return memoryview(host_view(buffer).copy())

    def write(self, buffer: Any, data: memoryview) -> None:
        self.writes += 1
        host_view(buffer)[:] = np.frombuffer(data, np.uint8)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], FakeAccelerator]:
    def use(native: bool) -> FakeAccelerator:
        fake = FakeAccelerator(native)
        monkeypatch.setattr("ruda_ucx.joining.find_accelerator", lambda cuda_support: fake)
        return fake

    return use


def numbers(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def room(nbytes: int) -> np.ndarray:
    return np.full(nbytes, 0xAA, np.uint8)


@pytest.mark.parametrize("native", [True, False])
async def test_every_pair_of_memories(accelerator: Callable[[bool], FakeAccelerator], native: bool) -> None:
    fake = accelerator(native)

    async def body(t: Transport) -> None:
        assert t.capabilities.device_memory is native
        peer = 1 - t.rank
        for nbytes in (0, 1, 1000, 70_000, 9_000_001):
            for source in (FakeBuffer, memoryview):
                for target in (FakeBuffer, memoryview):
                    out = room(nbytes)
                    receive = t.recv_into(peer, 1, (target(out),), b"h")
                    sending = t.send(peer, 1, (source(numbers(nbytes, t.rank)),), b"h")
                    await receive
                    await sending
                    assert np.array_equal(out, numbers(nbytes, peer))

    await run_transports(body)
    if native:
        assert fake.reads == 0
        assert fake.fences
    else:
        assert fake.reads
        assert fake.writes


async def test_several_buffers_of_both_kinds(accelerator: Callable[[bool], FakeAccelerator]) -> None:
    accelerator(True)

    async def body(t: Transport) -> None:
        peer = 1 - t.rank
        data, out = numbers(3_000_000, t.rank), room(3_000_000)
        sending = t.send(
            peer,
            1,
            (FakeBuffer(data[:10]), memoryview(data[10:2_000_000]), FakeBuffer(data[2_000_000:])),
        )
        await t.recv_into(
            peer, 1, (memoryview(out[:5]), FakeBuffer(out[5:1_000_000]), memoryview(out[1_000_000:]))
        )
        await sending
        assert np.array_equal(out, numbers(3_000_000, peer))

    await run_transports(body)


async def test_early_messages_land_on_the_device(accelerator: Callable[[bool], FakeAccelerator]) -> None:
    fake = accelerator(True)

    async def body(t: Transport) -> None:
        peer = 1 - t.rank
        await t.send(peer, 1, (memoryview(numbers(500, t.rank)),))
        await t.probe(peer, 1)
        out = room(500)
        await t.recv_into(peer, 1, (FakeBuffer(out),))
        assert np.array_equal(out, numbers(500, peer))

    await run_transports(body)
    assert fake.writes == 2


@pytest.mark.parametrize("nbytes", [1000, 9_000_000])
async def test_a_payload_is_read_when_the_device_has_written_it(
    accelerator: Callable[[bool], FakeAccelerator], nbytes: int
) -> None:
    fake = accelerator(True)
    written = False
    fake.gate = lambda: written

    async def body(t: Transport) -> None:
        nonlocal written
        if t.rank == 0:
            data = room(nbytes)
            sending = asyncio.ensure_future(awaited(t.send(1, 1, (FakeBuffer(data),))))
            await t.recv_into(1, 2, (memoryview(bytearray(0)),))  # by now the receiver has asked for it
            for _ in range(50):
                await asyncio.sleep(0)
            assert not sending.done()
            data[:] = numbers(nbytes, 5)
            written = True
            await sending
        else:
            out = room(nbytes)
            receive = t.recv_into(0, 1, (memoryview(out),))
            await t.send(0, 2, (memoryview(bytearray(0)),))
            await receive
            assert np.array_equal(out, numbers(nbytes, 5))

    await run_transports(body)


async def awaited(waiting: Any) -> Any:
    return await waiting


async def test_memory_is_written_when_the_device_has_let_go_of_it(
    accelerator: Callable[[bool], FakeAccelerator],
) -> None:
    nbytes = 2_000_000
    fake = accelerator(True)
    free = False
    fake.gate = lambda: free

    async def body(t: Transport) -> None:
        nonlocal free
        if t.rank == 0:
            await t.send(1, 1, (memoryview(numbers(nbytes, 0)),))
        else:
            out = room(nbytes)
            receive = asyncio.ensure_future(awaited(t.recv_into(0, 1, (FakeBuffer(out),))))
            while not fake.fences:
                await asyncio.sleep(0)
            for _ in range(50):
                await asyncio.sleep(0)
            assert not receive.done()
            assert (out == 0xAA).all()
            free = True
            await receive
            assert np.array_equal(out, numbers(nbytes, 0))

    await run_transports(body)


async def test_a_receive_cancelled_before_its_fence_leaves_the_message(
    accelerator: Callable[[bool], FakeAccelerator],
) -> None:
    nbytes = 2_000_000
    fake = accelerator(True)
    free = False
    fake.gate = lambda: free

    async def body(t: Transport) -> None:
        nonlocal free
        if t.rank == 0:
            await t.send(1, 1, (memoryview(numbers(nbytes, 0)),))
            return
        out = room(nbytes)
        receive = asyncio.ensure_future(awaited(t.recv_into(0, 1, (FakeBuffer(out),))))
        await asyncio.sleep(0)  # a task that never ran has nothing to cancel
        while not fake.fences:
            await asyncio.sleep(0)
        receive.cancel()
        await asyncio.wait((receive,))
        assert receive.cancelled()
        free = True
        second = room(nbytes)
        await t.recv_into(0, 1, (memoryview(second),))
        assert np.array_equal(second, numbers(nbytes, 0))
        assert (out == 0xAA).all()

    await run_transports(body)


# ---------------------------------------------------------------------- without any transport


def test_windows_are_parts_of_their_buffer() -> None:
    data = numbers(100, 1)
    window = memory.piece(memory.piece(FakeBuffer(data), 10, 90), 5, 25)
    assert window.nbytes == 20
    assert np.array_equal(host_view(window), data[15:35])


@pytest.mark.parametrize("cuts", [(5 << 30,), (3, 7 << 30, 1, 1), (100_000,) * 50, (1 << 20, 5, 5, 1 << 20)])
@pytest.mark.parametrize("many", [False, True])
async def test_parts_cover_a_payload_of_any_size_once(cuts: tuple[int, ...], many: bool) -> None:
    class Nowhere:
        """An address range that nobody touches."""

        def __init__(self, address: int, nbytes: int) -> None:
            self.nbytes = nbytes
            self.__cuda_array_interface__ = {"data": (address, False)}

    buffers, address = [], 1 << 40
    for size in cuts:
        buffers.append(Nowhere(address, size))
        address += size
    home = SimpleNamespace(chunk_bytes=4 << 20)
    message = inbound.Inbound(home, 1, 1, b"", sum(cuts), many)  # type: ignore[arg-type]
    receive = Receive(1, buffers, b"", sum(cuts), asyncio.get_running_loop().create_future())  # type: ignore[arg-type]
    at = 0
    for start, size, targets in message._cut(receive.buffers):
        assert start == at
        assert 0 < size <= 4 << 20
        assert size == sum(target.nbytes for target in targets)
        for target in targets:
            assert target.__cuda_array_interface__["data"][0] == (1 << 40) + at  # type: ignore[union-attr]
            at += target.nbytes
        assert len(targets) == 1 or size <= 256 << 10
    assert at == sum(cuts)


def test_without_a_device_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))
    )
    assert memory.find_accelerator(True) is memory.NO_DEVICE
    monkeypatch.delitem(sys.modules, "torch")
    assert memory.find_accelerator(True) is memory.NO_DEVICE
    with pytest.raises(TypeError, match="no CUDA device"):
        memory.NO_DEVICE.read(FakeBuffer(room(4)))


def test_staging_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True))
    )
    with caplog.at_level(logging.INFO, "ruda_async.ucx"):
        assert memory.find_accelerator(True).native
        assert not caplog.records
        assert not memory.find_accelerator(False).native
    assert len(caplog.records) == 1
    assert "staged" in caplog.text


def test_fences_wait_for_the_current_stream_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    class Event:
        def __init__(self) -> None:
            self.stream: Any = None
            self.over = False
            events.append(self)

        def record(self, stream: Any) -> None:
            self.stream = stream

        def query(self) -> bool:
            return self.over

    cuda = SimpleNamespace(
        device=lambda kind, index: f"{kind}:{index}",
        cuda=SimpleNamespace(
            Event=Event,
            current_device=lambda: 0,
            current_stream=lambda device: f"current stream of {device}",
            default_stream=lambda device: f"default stream of {device}",
            ExternalStream=lambda handle, device: f"stream {handle} of {device}",
        ),
    )

    def buffer(index: int | None = None, **interface: Any) -> FakeBuffer:
        made: Any = FakeBuffer(room(4))
        made.__cuda_array_interface__ |= interface
        if index is not None:
            made.device_index = index
        return made

    fence = memory.TorchAccelerator(cuda, True).fence(
        [
            buffer(),
            buffer(1, stream=None),
            buffer(1, stream=1),
            memory.piece(buffer(2, stream=0xBEE0), 1, 3),
            memory.piece(buffer(2, stream=0xBEE0), 0, 1),
            memory.piece(buffer(3), 0, 0),
            memoryview(room(3)),
        ]
    )
    assert [event.stream for event in events] == [
        "current stream of cuda:0",
        "current stream of cuda:1",
        "default stream of cuda:1",
        "stream 48864 of cuda:2",
    ]
    for event in events:
        assert not fence()
        event.over = True
    assert fence()


@pytest.mark.parametrize("rows", [3, 30_000])
@pytest.mark.parametrize("name", sorted(CALLS))
async def test_tensors_go_down_as_device_memory(
    accelerator: Callable[[bool], FakeAccelerator], monkeypatch: pytest.MonkeyPatch, name: str, rows: int
) -> None:
    """torch's CPU is the device here: its memory goes to UCX as device memory, none by way of the host."""

    async def body(comm: AsyncCommunicator) -> Any:
        return await CALLS[name](comm, values(comm.rank, rows, torch.bfloat16))

    expected = await run_ranks(3, body)
    fake = accelerator(True)
    monkeypatch.setattr(TorchAdapter, "on_devices", True)
    monkeypatch.setattr(TorchAdapter, "for_call", lambda self, value, resident: TorchResident(value.device))

    def staged(*_: Any) -> None:
        raise AssertionError("memory of the host was asked for")

    monkeypatch.setattr(TorchAdapter, "read", staged)
    monkeypatch.setattr(TorchAdapter, "allocate", staged)
    found = await run_ranks(3, body, url=fresh_url("ucx"))
    assert fake.fences
    for ours, theirs in zip(found, expected, strict=True):
        same(ours, theirs)
