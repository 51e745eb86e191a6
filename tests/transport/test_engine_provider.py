"""What providers of engines have in common, with an engine that does as it is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
from support import counting_turns

from ruda_async import RudaError
from ruda_async.transport import (
    EngineContexts,
    EngineProvider,
    NativeCall,
    NativeGroup,
    copy_in_turns,
    ended,
    engine_provider,
)

CALL = NativeCall("all_reduce", 2, "float32", 16, "sum")
LARGE = 3 * engine_provider._SLICE + 5


def group(epoch: int = 0, *, channel: int = 1, owned: bool = True) -> NativeGroup:
    return NativeGroup(0, 2, (0, 1), channel, 0, epoch, time.monotonic() + 30, b"", owned=owned)


class Contexts(EngineContexts[str]):
    """Contexts are names; those that were released stand in `released`."""

    def __init__(self) -> None:
        super().__init__()
        self.released: list[str] = []
        self.refusals = 0

    async def make(self, group: NativeGroup) -> str:
        await asyncio.sleep(0)
        if self.refusals:
            self.refusals -= 1
            raise OSError("no context")
        return f"{group.channel}/{group.epoch}"

    def release(self, channel: int, making: asyncio.Task[str]) -> None:
        if making.done() and not self.failed(making):
            self.released.append(making.result())


class Engine(EngineProvider[str]):
    """Writes 7s, and then does what `then` says."""

    name = "seven"
    label = "Seven"
    virtue = "lucky"
    failures = (OSError,)

    def __init__(self, then: Callable[[asyncio.Future[None]], Awaitable[None]] | None = None) -> None:
        self.contexts = Contexts()
        super().__init__(self.contexts, least=10)
        self._then = then
        self.used: list[str] = []

    def lacks(self, call: NativeCall) -> str | None:
        return "Seven has no int8" if call.dtype == "int8" else None

    async def prepare(
        self, group: NativeGroup, call: NativeCall, source: memoryview, out: memoryview
    ) -> memoryview:
        return out if group.owned else memoryview(bytearray(len(out)))

    async def execute(
        self,
        context: str,
        group: NativeGroup,
        call: NativeCall,
        source: memoryview,
        work: memoryview,
        stop: asyncio.Future[None],
    ) -> None:
        self.used.append(context)
        work[:] = b"\7" * len(work)
        if self._then is not None:
            await self._then(stop)


class Halving:
    """Divides, as far as it is asked to."""

    dtype, operator, size, itemsize = "float32", "mean", 2, 1

    def reduce(self, out_raw: memoryview, raws: object) -> None:
        raise AssertionError("the engine adds")

    def finish_inplace(self, raw: memoryview) -> None:
        view = np.frombuffer(raw, np.uint8)
        view -= 5


async def test_each_epoch_of_a_channel_has_a_context_of_its_own() -> None:
    contexts = Contexts()
    first = contexts.get(group(0))
    assert await first == "1/0"
    assert contexts.get(group(0)) is first
    assert contexts.is_current(group(0))
    assert await contexts.get(group(0, channel=2)) == "2/0"
    assert contexts.released == []
    assert await contexts.get(group(1)) == "1/1"
    assert contexts.released == ["1/0"]
    assert not contexts.is_current(group(0))
    contexts.close()
    assert sorted(contexts.released) == ["1/0", "1/1", "2/0"]


async def test_a_context_that_could_not_be_made_is_made_again() -> None:
    contexts = Contexts()
    contexts.refusals = 1
    with pytest.raises(OSError, match="no context"):
        await contexts.get(group())
    assert await contexts.get(group()) == "1/0"


def test_what_it_takes() -> None:
    engine = Engine()
    assert engine.objection(CALL, (0, 1)) is None
    assert engine.objection(CALL._replace(dtype="int8"), (0, 1)) == "Seven has no int8"
    assert "NaN" in str(engine.objection(CALL._replace(operator="max"), (0, 1)))
    assert engine.objection(CALL._replace(operator="max", dtype="int32"), (0, 1)) is None
    assert "barrier already" in str(engine.objection(NativeCall("barrier", 2), (0, 1)))
    assert engine.reason(CALL, (0, 1)) == "lucky"
    assert engine.reason(CALL._replace(nbytes=9), (0, 1)) is None
    assert engine.reason(NativeCall("all_to_all_v", 2, "float32", 1000), (0, 1)) is None


@pytest.mark.parametrize("owned", [True, False])
async def test_the_result_is_where_it_belongs_and_divided(owned: bool) -> None:
    engine, out = Engine(), np.zeros(LARGE, np.uint8)
    call = CALL._replace(operator="mean")
    await engine.run(group(owned=owned), call, out[:0].data, out.data, Halving())
    assert (out == 2).all()
    assert engine.used == ["1/0"]


async def test_an_error_of_the_engine_names_it() -> None:
    async def breaks(stop: asyncio.Future[None]) -> None:
        raise OSError("the wire is cut")

    engine, out = Engine(breaks), bytearray(4)
    with pytest.raises(RudaError, match="Seven failed in all_reduce: the wire is cut"):
        await engine.run(group(), CALL, memoryview(b""), memoryview(out), None)


@pytest.mark.parametrize("finishes", [True, False], ids=["in time", "too late"])
async def test_a_call_that_is_given_up_leaves_the_callers_memory_alone(
    finishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_provider, "_GRACE", 20.0 if finishes else 0.01)  # 20 s would be noticed
    left: list[str] = []
    running = asyncio.Event()

    async def wait(stop: asyncio.Future[None]) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if finishes:
            stop.add_done_callback(lambda _: done.set_result(None))
        running.set()
        await ended(done, stop, lambda: left.append("left"))

    engine, out = Engine(wait), bytearray(b"\1" * 8)
    lent = group(owned=False)
    call = asyncio.ensure_future(engine.run(lent, CALL, memoryview(b""), memoryview(out), None))
    await running.wait()
    engine.fail(lent, RudaError("rank 1 was cancelled"))
    engine.fail(lent, RudaError("twice is harmless"))
    with pytest.raises(RudaError, match="rank 1 was cancelled"):
        async with asyncio.timeout(10):
            await call
    assert out == b"\1" * 8
    assert left == ([] if finishes else ["left"])
    engine.fail(lent, RudaError("it has ended"))


async def test_a_call_that_is_given_up_while_ranks_still_meet() -> None:
    engine, never = Engine(), asyncio.Event()

    async def make(group: NativeGroup) -> str:
        await never.wait()
        return ""

    engine.contexts.make = make  # type: ignore[method-assign]
    call = asyncio.ensure_future(engine.run(group(), CALL, memoryview(b""), memoryview(bytearray(4)), None))
    await asyncio.sleep(0)
    engine.fail(group(), RudaError("nobody comes"))
    with pytest.raises(RudaError, match="nobody comes"):
        await call
    assert engine.used == []
    never.set()


async def test_long_copies_let_the_loop_turn() -> None:
    source = np.random.default_rng(1).integers(0, 256, LARGE, np.uint8)
    out = np.zeros_like(source)
    async with counting_turns() as turns:
        await copy_in_turns(out.data, source.data)
        assert turns() >= 3
    assert (out == source).all()
