"""Tensors in device memory, on a device that is played: none passes through the host, all keeps its order."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from device_calls import ALGORITHMS, CALLS, ROWS, shard, tree_sum, values
from device_transport import DevicePlugin
from fake_device import ADAPTER, Device, FakeAdapter, FakeTensor
from support import fresh_url, outcome, run_ranks

from ruda_async import (
    AsyncCommunicator,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    TensorContractError,
    sync,
)
from ruda_async.tensors import adapter, register_adapter
from ruda_async.tensors import device as device_module
from ruda_async.transport.registry import register_plugin, unregister_plugin


@pytest.fixture
def device() -> Iterator[Device]:
    """A fresh device, whose tensors the library knows."""
    register_adapter(ADAPTER)
    yield Device()
    adapter._adapters.remove(ADAPTER)
    adapter._by_type.clear()


@pytest.fixture
def plugin(device: Device) -> Iterator[DevicePlugin]:
    made = DevicePlugin(device)
    register_plugin(made)
    yield made
    unregister_plugin(made.scheme)


async def on_device(
    plugin: DevicePlugin, size: int, body: Callable[[AsyncCommunicator], Any], **options: Any
) -> Any:
    """Run `body` over ``device://``, and see that nothing was staged."""
    results = await run_ranks(size, body, url=fresh_url(plugin.scheme), **options)
    assert plugin.device.staged == 0
    assert not plugin.device.sending
    assert not plugin.device.receiving
    return results


def check(result: Any, expected: np.ndarray | None) -> None:
    """Kind, dtype, shape and bits."""
    if expected is None:
        assert result is None
        return
    tensor = getattr(result, "value", result)
    assert type(tensor) is FakeTensor
    found = tensor.values()
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes()


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(("name", "algorithm"), ALGORITHMS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
async def test_every_algorithm_gives_numpys_values(
    plugin: DevicePlugin, name: str, algorithm: str, size: int
) -> None:
    """Segments are short here, so that pipelines have several."""
    plugin.hosts = tuple(rank // 2 for rank in range(size)) if size > 2 else None
    _, shape, call, expect = CALLS[name]
    dtypes = ("float32", "float16", "int64") if "reduce" in name and "mean" not in name else ("bfloat16",)
    cases = [
        [np.repeat(values(rank, shape(rank, size), dtype), factor, -1) for rank in range(size)]
        for dtype in dtypes
        for factor in (1, 40)
    ]

    async def body(comm: AsyncCommunicator) -> None:
        for inputs in cases:
            given = plugin.device.tensor(inputs[comm.rank])
            check(await call(comm, given), expect(inputs, comm.rank))
            assert given.values().tobytes() == inputs[comm.rank].tobytes()

    await on_device(plugin, size, body, algorithm=algorithm)


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_within_a_byte_budget(plugin: DevicePlugin, name: str) -> None:
    size = 3
    _, shape, call, expect = CALLS[name]
    inputs = [values(rank, shape(rank, size), "float32") for rank in range(size)]

    async def body(comm: AsyncCommunicator) -> None:
        result = await call(comm.bounded(24), plugin.device.tensor(inputs[comm.rank]))
        check(result, expect(inputs, comm.rank))

    await on_device(plugin, size, body)


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_ranks_may_differ_in_where_their_tensors_lie(plugin: DevicePlugin, name: str) -> None:
    size = 4
    _, shape, call, expect = CALLS[name]
    inputs = [values(rank, shape(rank, size), "float16") for rank in range(size)]

    async def body(comm: AsyncCommunicator) -> None:
        given = inputs[comm.rank]
        expected = expect(inputs, comm.rank)
        if comm.rank % 2:
            check(await call(comm, plugin.device.tensor(given)), expected)
        else:
            result = await call(comm, given)
            result = getattr(result, "value", result)
            assert (result is None) is (expected is None)
            assert result is None or result.tobytes() == np.ascontiguousarray(expected).tobytes()

    await on_device(plugin, size, body)


async def test_results_in_the_callers_memory(plugin: DevicePlugin) -> None:
    """`out` of its own, in another order of axes, and the input itself."""
    size = 3
    device = plugin.device
    inputs = [values(rank, (ROWS, 6), "float32") for rank in range(size)]
    total = tree_sum(inputs)

    async def body(comm: AsyncCommunicator) -> None:
        x = inputs[comm.rank]
        out = device.tensor(np.zeros_like(x))
        assert await comm.all_reduce_sum(device.tensor(x), out=out) is out
        check(out, total)
        same = device.tensor(x)
        await comm.all_reduce_sum(same, out=same)
        check(same, total)
        turned = device.tensor(np.zeros((6, ROWS), np.float32)).moved(0, 1)
        await comm.broadcast(device.tensor(x), 1, out=turned)
        check(turned, inputs[1])
        # The input lies in the result already.
        whole = device.tensor(np.zeros((size * ROWS, 6), np.float32))
        part = FakeTensor(device, "float32", (ROWS, 6), np.split(whole.data, size)[comm.rank])
        device.current.put(lambda: part.arranged().__setitem__(..., x), [], [part.data])
        check(await comm.all_gather(part, out=whole), np.concatenate(inputs))
        # It overlaps the result.
        shards = device.tensor(x)
        mine = FakeTensor(device, "float32", (ROWS // size, 6), np.split(shards.data, size)[0])
        check(await comm.reduce_scatter_sum(shards, out=mine), shard(total, comm.rank, size))

    await on_device(plugin, size, body)


@pytest.mark.parametrize("nbytes", [16, 400_000])
async def test_point_to_point(plugin: DevicePlugin, nbytes: int) -> None:
    device = plugin.device
    value = values(0, (nbytes // 4,), "int32")

    async def body(comm: AsyncCommunicator) -> None:
        if comm.rank == 0:
            for _ in range(4):
                await comm.send(device.tensor(value), 1)
        else:
            check(await comm.recv(0, like=device.tensor(np.zeros(1))), value)
            out = device.tensor(np.zeros_like(value))
            assert await comm.recv(0, out=out) is out
            check(out, value)
            received, source = await comm.recv_any(like=out)
            assert source == 0
            check(received, value)
            assert np.array_equal(await comm.recv(0), value)  # on the host, where nothing else is asked for

    await on_device(plugin, 2, body)


# ---------------------------------------------------------------------- order


@pytest.mark.parametrize("scheme", ["device", "memory"])
@pytest.mark.parametrize("name", sorted(CALLS))
async def test_a_call_keeps_to_the_stream_it_was_made_on(
    plugin: DevicePlugin, name: str, scheme: str
) -> None:
    """Other tasks make other streams current meanwhile; nothing of the call is queued there."""
    size = 3
    device = plugin.device
    _, shape, call, expect = CALLS[name]
    inputs = [np.repeat(values(rank, shape(rank, size), "float16"), 40, -1) for rank in range(size)]

    async def body(comm: AsyncCommunicator) -> None:
        mine = device.current = device.stream()
        given = device.tensor(inputs[comm.rank])
        assert mine.waiting  # the input is not written yet
        result = await call(comm, given)
        device.current = mine  # until here it was whichever the last rank to run has made current
        check(result, expect(inputs, comm.rank))

    before = device.current
    await run_ranks(size, body, url=fresh_url(scheme))
    assert before.queued == 0
    assert bool(device.staged) is (scheme == "memory")


def test_a_call_that_another_thread_runs_keeps_to_its_makers_streams(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `start` does it. What is noted there does not outlive the call."""
    maker: ContextVar[int] = ContextVar("maker", default=0)
    monkeypatch.setattr(device_module, "_notes", [lambda: maker.set(threading.get_ident())])
    asked: list[tuple[int, int]] = []
    for_call = FakeAdapter.for_call

    def noted(self: FakeAdapter, value: FakeTensor, resident: bool) -> Any:
        asked.append((maker.get(), threading.get_ident()))
        return for_call(self, value, resident)

    monkeypatch.setattr(FakeAdapter, "for_call", noted)
    x = values(0, (ROWS, 5), "float32")
    with sync.connect("memory://notes", rank=0, world_size=1) as comm:
        check(comm.start.all_reduce_sum(device.tensor(x)).wait(10), x)
        check(comm.all_reduce_sum(device.tensor(x)), x)
    here = threading.get_ident()
    assert asked[0][0] == here != asked[0][1]
    assert maker.get() == 0
    assert asked[1] == (0, here)


async def test_the_loop_turns_while_the_device_computes(plugin: DevicePlugin) -> None:
    """Rank 0's input is late; other calls come to their end meanwhile."""
    device = plugin.device

    async def body(comm: AsyncCommunicator) -> None:
        other = comm.channel("other")
        quick, slow = device.stream(), device.stream()

        async def slowly() -> None:
            device.current = slow
            given = device.tensor(np.full(4, comm.rank, np.int32))
            for _ in range(2000 if comm.rank == 0 else 0):
                slow.put(lambda: None, [], [given.data])
            total = await comm.all_reduce_sum(given)
            device.current = slow
            check(total, np.full(4, 1, np.int32))

        late = asyncio.ensure_future(slowly())
        await asyncio.sleep(0)
        for _ in range(3):
            device.current = quick
            total = await other.all_reduce_sum(device.tensor(np.full(4, 1, np.int32)))
            device.current = quick
            check(total, np.full(4, 2, np.int32))
        assert not late.done()
        await late

    await on_device(plugin, 2, body)


# ---------------------------------------------------------------------- failure


async def test_calls_that_fail_leave_nothing_under_way(plugin: DevicePlugin) -> None:
    device = plugin.device
    over = asyncio.Event()

    async def body(comm: AsyncCommunicator) -> None:
        x = device.tensor(values(comm.rank, (ROWS, 5), "float32"))
        short = device.tensor(np.zeros((ROWS + 1, 5), np.float32))
        error = await outcome(comm.reduce_scatter_sum(short if comm.rank == 1 else x))
        assert isinstance(error, TensorContractError)
        assert error.rank == 1
        error = await outcome(comm.barrier() if comm.rank == 2 else comm.all_gather(x))
        assert isinstance(error, CollectiveMismatchError)
        if comm.rank == 2:  # comes too late
            await over.wait()
        error = await outcome(comm.all_reduce_sum(x, timeout=0.2 if comm.rank == 0 else 10))
        if comm.rank == 0:
            assert isinstance(error, CollectiveTimeoutError)
            over.set()
        check(await comm.all_gather(x), np.concatenate([values(r, (ROWS, 5), "float32") for r in range(3)]))

    await on_device(plugin, 3, body)


async def test_an_out_that_does_not_fit_is_refused(plugin: DevicePlugin) -> None:
    device = plugin.device

    async def body(comm: AsyncCommunicator) -> None:
        x = device.tensor(np.zeros((4, 2), np.float32))
        for out in (device.tensor(np.zeros((2, 4), np.float32)), np.zeros((4, 2), np.float32)):
            error = await outcome(comm.all_reduce_sum(x, out=out))
            assert isinstance(error, TensorContractError)
            assert "out=" in str(error)

    await on_device(plugin, 2, body)


# ---------------------------------------------------------------------- elsewhere it is staged


async def _staged(url: str, device: Device, caplog: pytest.LogCaptureFixture) -> None:
    """Every call has its values, and one line of the log says what happens."""
    size = 3

    async def body(comm: AsyncCommunicator) -> None:
        for _, shape, call, expect in CALLS.values():
            inputs = [values(rank, shape(rank, size), "float32") for rank in range(size)]
            check(await call(comm, device.tensor(inputs[comm.rank])), expect(inputs, comm.rank))
        peer = (comm.rank + 1) % size
        x = device.tensor(np.full(3, comm.rank))
        sending = asyncio.ensure_future(comm.send(x, peer))
        check(await comm.recv((comm.rank - 1) % size, like=x), np.full(3, (comm.rank - 1) % size))
        await sending

    with caplog.at_level(logging.INFO, "ruda_async"):
        await run_ranks(size, body, url=url)
    assert device.staged >= 2 * size * len(CALLS) - 2 * size
    lines = [record.getMessage() for record in caplog.records if "staged" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("fake tensors")


@pytest.fixture
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_said", set())


@pytest.mark.parametrize("scheme", ["memory", "tcp"])
async def test_other_transports_stage_and_say_so_once(
    device: Device, nothing_said: None, caplog: pytest.LogCaptureFixture, scheme: str
) -> None:
    await _staged(fresh_url(scheme), device, caplog)


async def test_a_provider_of_host_memory_alone_has_tensors_staged(
    plugin: DevicePlugin, nothing_said: None, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.providers = (SimpleNamespace(objection=lambda *_: "not here", name="none", exact=True),)
    await _staged(fresh_url(plugin.scheme), plugin.device, caplog)


async def test_a_provider_that_takes_device_memory_gets_it(plugin: DevicePlugin) -> None:
    seen = []

    class Provider:
        name = "copy"
        exact = agrees = device_memory = True

        def objection(self, call: Any, members: Any) -> str | None:
            return None if call.operation == "all_reduce" else "only that"

        def reason(self, call: Any, members: Any) -> str | None:
            return "to see"

        async def run(self, group: Any, call: Any, source: Any, out: Any, reducer: Any) -> None:
            seen.append((type(source), type(out), type(reducer)))
            out[:] = source

        def fail(self, group: Any, error: BaseException) -> None:
            pass

        def forget(self, channel: int) -> None:
            pass

    plugin.providers = (Provider(),)
    x = values(0, (ROWS,), "float32")

    async def body(comm: AsyncCommunicator) -> None:
        check(await comm.all_reduce(plugin.device.tensor(x), "max"), x)

    await on_device(plugin, 2, body)
    assert len(seen) == 2
    assert {kind.__name__ for kinds in seen for kind in kinds} == {"FakeMemory", "FakeReducer"}
