"""What providers that hand whole calls to an engine (MPI, Gloo, NCCL) have in common.

Such an engine matches collectives by their order in a context of its own (a communicator, a process group),
and cannot take back what has begun. So each channel that uses it has a context, and each epoch of the channel
another one; and a call that is given up waits a moment for the engine, and else leaves it the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import RudaError
from .matching import copy
from .provider import NativeCall, NativeGroup, NativeReducer

if TYPE_CHECKING:
    from .base import Buffer

__all__ = ["EngineContexts", "EngineProvider", "copy_in_turns", "ended"]

C = TypeVar("C")

#: Seconds that a call which ends early waits for the engine to be done with its memory.
_GRACE = 0.1
#: Bytes copied or divided between two turns of the loop.
_SLICE = 512 * 1024


class EngineContexts(Generic[C]):
    """The contexts of one transport, each made when a channel first uses it."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[int, asyncio.Task[C]]] = {}

    async def make(self, group: NativeGroup) -> C:
        """Make the context of the call's channel and epoch, together with the group's other ranks."""
        raise NotImplementedError

    def release(self, channel: int, making: asyncio.Task[C]) -> None:
        """Nobody uses the context any more that `making` has made, has failed to, or still makes."""
        raise NotImplementedError

    def get(self, group: NativeGroup) -> asyncio.Task[C]:
        """The context of the call's channel and epoch: the result of this task."""
        epoch, making = self._made.get(group.channel, (-1, None))
        if making is not None and epoch == group.epoch and not (making.done() and self.failed(making)):
            return making
        self.forget(group.channel)
        making = asyncio.get_running_loop().create_task(self.make(group))
        self._made[group.channel] = (group.epoch, making)
        return making

    def is_current(self, group: NativeGroup) -> bool:
        """Whether the channel's context is that of the call's epoch."""
        epoch, _ = self._made.get(group.channel, (-1, None))
        return epoch == group.epoch

    def holds(self, channel: int, making: asyncio.Task[C]) -> bool:
        """Whether what `making` makes is the channel's context still, and not released. On any thread."""
        _, current = self._made.get(channel, (-1, None))
        return current is making

    def forget(self, channel: int) -> None:
        """Release the channel's context."""
        _, making = self._made.pop(channel, (-1, None))
        if making is not None:
            self.release(channel, making)

    def close(self) -> None:
        """Release all."""
        for channel in list(self._made):
            self.forget(channel)

    @staticmethod
    def failed(making: asyncio.Task[C]) -> bool:
        """Whether a task that is done has made no context."""
        return making.cancelled() or making.exception() is not None


class EngineProvider(Generic[C]):
    """A `Provider` but for the engine's own calls.

    Args:
        contexts: where its collectives run.
        least: bytes of input from which a call is taken without being asked for by name.

    Attributes:
        label: what texts for people call the engine.
        virtue: why it should be taken, as half a sentence.
        failures: what the engine raises.
    """

    name: str
    exact = False
    agrees = False
    label: str
    virtue: str
    failures: tuple[type[Exception], ...]

    def __init__(self, contexts: EngineContexts[C], least: int) -> None:
        self._contexts = contexts
        self._least = least
        self._stops: dict[tuple[int, int], asyncio.Future[None]] = {}

    # ------------------------------------------------------------------ what an engine fills in

    def lacks(self, call: NativeCall) -> str | None:
        """Why the engine has no such call, in a few words; None where it has. See `Provider.objection`."""
        raise NotImplementedError

    async def prepare(
        self, group: NativeGroup, call: NativeCall, source: memoryview, out: memoryview
    ) -> memoryview:
        """The memory that the result will be in: `out`, or other memory, from which it is copied there.

        The engine may write to it after the call was given up, so it must be `out` only where that is
        `NativeGroup.owned`.
        """
        raise NotImplementedError

    async def execute(
        self,
        context: C,
        group: NativeGroup,
        call: NativeCall,
        source: memoryview,
        work: memoryview,
        stop: asyncio.Future[None],
    ) -> None:
        """Run the collective and wait for it, or until `stop` fails."""
        raise NotImplementedError

    # ------------------------------------------------------------------ choice

    def objection(self, call: NativeCall, members: tuple[int, ...]) -> str | None:
        """See `Provider.objection`."""
        if call.operation == "barrier":
            return "the agreement before it is a barrier already"
        lacking = self.lacks(call)
        if lacking is None and call.operator in ("max", "min") and call.dtype.startswith("float"):
            return f"the {call.operator} of {self.label} does not promise to keep NaN"
        return lacking

    def reason(self, call: NativeCall, members: tuple[int, ...]) -> str | None:
        """See `Provider.reason`."""
        if call.operation.endswith("_v") or call.operation == "scatter" or call.nbytes < self._least:
            return None
        return self.virtue

    # ------------------------------------------------------------------ running

    async def run(
        self,
        group: NativeGroup,
        call: NativeCall,
        source: Buffer,
        out: Buffer,
        reducer: NativeReducer | None,
    ) -> None:
        """See `Provider.run`."""
        taken, result = memoryview(source), memoryview(out)  # type: ignore[arg-type]
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stops[group.channel, group.sequence] = stop
        try:
            making = self._contexts.get(group)
            work = await self.prepare(group, call, taken, result)
            await asyncio.wait((making, stop), return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                stop.result()
            await self.execute(making.result(), group, call, taken, work, stop)
        except self.failures as error:
            raise RudaError(f"{self.label} failed in {call.operation}: {error}") from None
        finally:
            del self._stops[group.channel, group.sequence]
        if work is not result and not (group.in_place and call.operation == "broadcast"):
            await copy_in_turns(result, work)
        if reducer is not None and call.operator == "mean" and len(result):
            await _divide(reducer, result)

    def fail(self, group: NativeGroup, error: BaseException) -> None:
        """See `Provider.fail`."""
        stop = self._stops.get((group.channel, group.sequence))
        if stop is not None and not stop.done():
            stop.set_exception(RudaError(str(error)))
            stop.exception()

    def forget(self, channel: int) -> None:
        """See `Provider.forget`."""
        self._contexts.forget(channel)

    def close(self) -> None:
        """The transport is over."""
        self._contexts.close()


async def ended(done: asyncio.Future[Any], stop: asyncio.Future[None], leave: Callable[[], object]) -> None:
    """Wait until the engine is done with a call, or the call is given up.

    Args:
        done: the engine is done.
        stop: fails when the call is given up. The engine, which mostly ends the call too, gets a moment.
        leave: called where it takes longer: the call's memory, and its context, are left to it.
    """
    try:
        await asyncio.wait((done, stop), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not done.done():
            try:
                await asyncio.wait((done,), timeout=_GRACE)
            finally:
                if not done.done():
                    leave()
    if stop.done():
        stop.result()
    done.result()


async def copy_in_turns(out: memoryview, source: memoryview) -> None:
    """Copy as many bytes as `out` has, and let the loop turn in between."""
    for at in range(0, len(out), _SLICE):
        if at:
            await asyncio.sleep(0)
        copy(out[at : at + _SLICE], source[at : at + _SLICE])


async def _divide(reducer: NativeReducer, out: memoryview) -> None:
    for at in range(0, len(out), _SLICE):
        if at:
            await asyncio.sleep(0)
        reducer.finish_inplace(out[at : at + _SLICE])
