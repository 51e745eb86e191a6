"""MPI's own collectives, as a provider.

MPI matches collectives by order on a communicator, so each channel that uses them has one of its own. MPI
cannot take back a collective that has begun. A call that is given up therefore waits a moment for
MPI, which mostly ends it, and else leaves its memory and its communicator to MPI: the channel's next epoch
has another one.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ruda_async.transport import (
    Buffer,
    NativeCall,
    NativeGroup,
    NativeReducer,
    RudaError,
    copy,
)

from .communicators import Communicators
from .engine import keep_requests
from .pump import Pump

__all__ = ["MpiProvider"]

#: Seconds that a call which ends early waits for MPI to be done with its memory.
_GRACE = 0.1
#: Bytes copied or divided between two turns of the loop.
_SLICE = 512 * 1024

_TYPES = {
    "int8": MPI.INT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "uint16": MPI.UINT16_T,
    "uint32": MPI.UINT32_T,
    "uint64": MPI.UINT64_T,
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
}
_OPERATORS = {
    "sum": MPI.SUM,
    "mean": MPI.SUM,
    "prod": MPI.PROD,
    "max": MPI.MAX,
    "min": MPI.MIN,
    "band": MPI.BAND,
    "bor": MPI.BOR,
    "bxor": MPI.BXOR,
}


class _Running(NamedTuple):
    """A call in MPI's hands."""

    request: Any
    memory: tuple[Any, ...]
    done: asyncio.Future[None]


class MpiProvider:
    """See `ruda_async.transport.Provider`.

    Args:
        communicator: of all ranks of the job.
        pump: tests its requests.
        least: bytes of input from which a call is taken without being asked for by name.
    """

    name = "mpi"
    exact = False
    agrees = False

    def __init__(self, communicator: Any, pump: Pump, least: int) -> None:
        self._pump = pump
        self._least = least
        self._communicators = Communicators(communicator, pump)
        self._stops: dict[tuple[int, int], asyncio.Future[None]] = {}

    # ------------------------------------------------------------------ choice

    def objection(self, call: NativeCall, members: tuple[int, ...]) -> str | None:
        """See `Provider.objection`."""
        if call.operation == "barrier":
            return "the agreement before it is a barrier already"
        if call.operator is None:
            return None
        if call.dtype not in _TYPES:
            return f"MPI does not compute with {call.dtype} as documented"
        if call.operator in ("max", "min") and call.dtype.startswith("float"):
            return f"MPI's {call.operator} does not promise to keep NaN"
        return None

    def reason(self, call: NativeCall, members: tuple[int, ...]) -> str | None:
        """See `Provider.reason`."""
        if call.operation.endswith("_v") or call.operation == "scatter" or call.nbytes < self._least:
            return None
        return "many bytes: MPI's own algorithm moves them without a copy on the way"

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
        # MPI may write to it after the call was given up, so it must not be the caller's.
        work = result if group.owned else np.empty(len(result), np.uint8).data
        try:
            making = self._communicators.get(group)
            await asyncio.wait((making, stop), return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                stop.result()
            request, memory = _start(making.result(), group, call, taken, work)
            done = self._pump.finished(request, native=True)
            await self._wait(_Running(request, memory, done), stop)
        except MPI.Exception as error:
            raise RudaError(f"MPI failed in {call.operation}: {error}") from None
        finally:
            del self._stops[group.channel, group.sequence]
        if call.operation == "broadcast" and group.rank == call.root:
            work = taken
        if work is not result and not (group.in_place and call.operation == "broadcast"):
            await _copy(result, work)
        if reducer is not None and call.operator == "mean" and len(result):
            await _divide(reducer, result)

    async def _wait(self, running: _Running, stop: asyncio.Future[None]) -> None:
        try:
            await asyncio.wait((running.done, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not running.done.done():
                await self._give_up(running)
        if stop.done():
            stop.result()
        running.done.result()

    async def _give_up(self, running: _Running) -> None:
        """Let MPI finish, for a moment; then leave the call's memory to it."""
        try:
            await asyncio.wait((running.done,), timeout=_GRACE)
        finally:
            running.done.cancel()
            if running.done.cancelled():
                keep_requests([(running.request, running.memory)])

    def fail(self, group: NativeGroup, error: BaseException) -> None:
        """See `Provider.fail`."""
        self._communicators.spoil(group)
        stop = self._stops.get((group.channel, group.sequence))
        if stop is not None and not stop.done():
            stop.set_exception(RudaError(str(error)))
            stop.exception()

    def forget(self, channel: int) -> None:
        """See `Provider.forget`."""
        self._communicators.forget(channel)

    def close(self) -> None:
        """The transport is over."""
        self._communicators.close()


def _start(
    communicator: Any, group: NativeGroup, call: NativeCall, source: memoryview, out: memoryview
) -> tuple[Any, tuple[Any, ...]]:
    """Begin the collective; its request, and what must live as long."""
    root = call.root
    at_root = group.rank == root
    ours, theirs = [source, MPI.BYTE], [out, MPI.BYTE]
    if call.operator is not None:
        kind = _TYPES[call.dtype]
        ours, theirs = [source, kind], [out, kind]
    operator = None if call.operator is None else _OPERATORS[call.operator]
    match call.operation:
        case "all_reduce":
            request = communicator.Iallreduce(ours, theirs, operator)
        case "reduce":
            request = communicator.Ireduce(ours, theirs if at_root else None, operator, root)
        case "reduce_scatter":
            request = communicator.Ireduce_scatter_block(ours, theirs, operator)
        case "all_gather":
            request = communicator.Iallgather(ours, theirs)
        case "all_gather_v":
            request = communicator.Iallgatherv(ours, [out, (call.receive_lengths, None), MPI.BYTE])
        case "gather":
            request = communicator.Igather(ours, theirs if at_root else None, root)
        case "scatter":
            request = communicator.Iscatter(ours if at_root else None, theirs, root)
        case "broadcast":
            request = communicator.Ibcast(ours if at_root else theirs, root)
        case "all_to_all":
            request = communicator.Ialltoall(ours, theirs)
        case "all_to_all_v":
            request = communicator.Ialltoallv(
                [source, (call.send_lengths, None), MPI.BYTE], [out, (call.receive_lengths, None), MPI.BYTE]
            )
        case _:
            raise RudaError(f"the MPI provider has no {call.operation}; report this")
    return request, (source, out, ours, theirs)


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
