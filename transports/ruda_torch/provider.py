"""torch.distributed's collectives, as a provider: what Gloo's and NCCL's have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from ruda_async.transport import (
    Buffer,
    NativeCall,
    NativeGroup,
    NativeReducer,
    RudaError,
    copy,
)

from .calls import TYPES
from .groups import Groups

__all__ = ["TorchProvider"]

#: Bytes copied or divided between two turns of the loop.
_SLICE = 512 * 1024


class TorchProvider:
    """See `ruda_async.transport.Provider`.

    Args:
        dial: opens the store where the ranks of a process group meet.
        least: bytes of input from which a call is taken without being asked for by name.
    """

    name: str
    exact = False
    agrees = False
    #: Why it should be taken, as half a sentence.
    virtue: str
    #: Operators that it has not.
    lacks: tuple[str, ...] = ()

    def __init__(self, dial: Callable[[timedelta], Any], least: int) -> None:
        self._least = least
        self._groups = Groups(dial, self.make)
        self._stops: dict[tuple[int, int], asyncio.Future[None]] = {}

    def make(self, store: Any, rank: int, size: int, wait: timedelta) -> Any:
        """A process group; blocks until all its ranks are there."""
        raise NotImplementedError

    async def execute(
        self,
        process_group: Any,
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
        if call.operation == "all_gather_v":
            return "torch has no such operation"
        if call.operator is None:
            return None
        if call.dtype not in TYPES or call.operator in self.lacks:
            return f"{self.name} has no {call.operator} of {call.dtype} as documented"
        if call.operator in ("max", "min") and call.dtype.startswith("float"):
            return f"the {call.operator} of {self.name} does not promise to keep NaN"
        return None

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
            making = self._groups.get(group)
            work = await _prepared(group, call, taken, result)
            await asyncio.wait((making, stop), return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                stop.result()
            await self.execute(making.result(), group, call, taken, work, stop)
        except (RuntimeError, dist.DistError) as error:
            raise RudaError(f"{self.name} failed in {call.operation}: {error}") from None
        finally:
            del self._stops[group.channel, group.sequence]
        if work is not result and len(result) and not (call.operation == "broadcast" and group.in_place):
            await _copy(result, work)
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
        self._groups.forget(channel)

    def close(self) -> None:
        """The transport is over."""
        self._groups.close()


async def _prepared(group: NativeGroup, call: NativeCall, source: memoryview, out: memoryview) -> memoryview:
    """The memory that torch writes to: the result's own where that may be left to it, else some of its own.

    torch reduces and broadcasts in place, so the input is there already then.
    """
    if call.operation in ("all_reduce", "reduce", "broadcast"):
        work = out if group.owned and len(out) == call.nbytes else _room(call.nbytes)
        if len(source):
            await _copy(work, source)
        return work
    return out if group.owned else _room(len(out))


def _room(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data


async def _copy(out: memoryview, source: memoryview) -> None:
    for at in range(0, len(out), _SLICE):
        if at:
            await asyncio.sleep(0)
        copy(out[at : at + _SLICE], source[at : at + _SLICE])


async def _divide(reducer: NativeReducer, out: memoryview) -> None:
    for at in range(0, len(out), _SLICE):
        if at:
            await asyncio.sleep(0)
        reducer.finish_inplace(out[at : at + _SLICE])
