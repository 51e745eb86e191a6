"""MPI's own collectives, as a provider.

MPI matches collectives by order on a communicator, so each epoch of a channel that uses them has one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from mpi4py import MPI

from ruda_async.transport import EngineProvider, NativeCall, NativeGroup, RudaError, ended

from .communicators import Communicators
from .engine import keep_requests
from .pump import Pump

__all__ = ["MpiProvider"]

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


class MpiProvider(EngineProvider[Any]):
    """See `ruda_async.transport.EngineProvider`.

    Args:
        communicator: of all ranks of the job.
        pump: tests its requests.
        least: bytes of input from which a call is taken without being asked for by name.
    """

    name = "mpi"
    label = "MPI"
    virtue = "many bytes: MPI's own algorithm moves them without a copy on the way"
    failures = (MPI.Exception,)

    def __init__(self, communicator: Any, pump: Pump, least: int) -> None:
        self._pump = pump
        self._communicators = Communicators(communicator, pump)
        super().__init__(self._communicators, least)

    def lacks(self, call: NativeCall) -> str | None:
        """See `EngineProvider.lacks`."""
        if call.operator is not None and call.dtype not in _TYPES:
            return f"MPI does not compute with {call.dtype} as documented"
        return None

    async def prepare(
        self, group: NativeGroup, call: NativeCall, source: memoryview, out: memoryview
    ) -> memoryview:
        """See `EngineProvider.prepare`."""
        if call.operation == "broadcast" and group.rank == call.root:
            return source  # which MPI sends, and writes nothing
        return out if group.owned else np.empty(len(out), np.uint8).data

    async def execute(
        self,
        context: Any,
        group: NativeGroup,
        call: NativeCall,
        source: memoryview,
        work: memoryview,
        stop: asyncio.Future[None],
    ) -> None:
        """See `EngineProvider.execute`."""
        request, memory = _start(context, group, call, source, work)
        done = self._pump.finished(request, native=True)

        def leave() -> None:
            done.cancel()
            keep_requests([(request, memory)])

        await ended(done, stop, leave)

    def fail(self, group: NativeGroup, error: BaseException) -> None:
        """See `Provider.fail`."""
        self._communicators.spoil(group)
        super().fail(group, error)


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
