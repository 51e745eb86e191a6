"""torch.distributed's collectives, as a provider.

torch cannot take back a collective of Gloo that has begun. A call that is given up therefore waits a moment
for it, and else leaves it its memory: Gloo ends it at the call's deadline.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ruda_async.transport import (
    Buffer,
    NativeCall,
    NativeGroup,
    NativeReducer,
    RudaError,
    copy,
)

from .groups import Groups, in_background, seconds_left

__all__ = ["GlooProvider"]

#: Seconds that a call which ends early waits for Gloo to be done with its memory.
_GRACE = 0.1
#: Bytes copied or divided between two turns of the loop.
_SLICE = 512 * 1024

#: Where torch keeps the options of collectives.
_c10d: Any = dist.distributed_c10d

#: The dtypes that Gloo computes with as documented.
_TYPES = {name: getattr(torch, name) for name in ("int8", "uint8", "int32", "int64", "float32", "float64")}
_OPERATORS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


class GlooProvider:
    """See `ruda_async.transport.Provider`.

    Args:
        store: where the ranks of a process group meet.
        least: bytes of input from which a call is taken without being asked for by name.
    """

    name = "gloo"
    exact = False
    agrees = False

    def __init__(self, store: Any, least: int) -> None:
        self._least = least
        self._groups = Groups(store, dist.ProcessGroupGloo)
        self._stops: dict[tuple[int, int], asyncio.Future[None]] = {}

    # ------------------------------------------------------------------ choice

    def objection(self, call: NativeCall, members: tuple[int, ...]) -> str | None:
        """See `Provider.objection`."""
        if call.operation == "barrier":
            return "the agreement before it is a barrier already"
        if call.operation == "all_gather_v":
            return "Gloo has no such operation"
        if call.operator is None:
            return None
        if call.dtype not in _TYPES:
            return f"Gloo does not compute with {call.dtype} as documented"
        if call.operator in ("max", "min") and call.dtype.startswith("float"):
            return f"Gloo's {call.operator} does not promise to keep NaN"
        return None

    def reason(self, call: NativeCall, members: tuple[int, ...]) -> str | None:
        """See `Provider.reason`."""
        if call.operation.endswith("_v") or call.operation == "scatter" or call.nbytes < self._least:
            return None
        return "many bytes: Gloo moves them on threads of its own"

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
            await _finished(making.result(), group, call, taken, work, stop)
        except (RuntimeError, dist.DistError) as error:
            raise RudaError(f"Gloo failed in {call.operation}: {error}") from None
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
    """The memory that Gloo writes to: the result's own where that may be left to it, else some of its own.

    Gloo reduces and broadcasts in place, so the input is there already then.
    """
    if call.operation in ("all_reduce", "reduce", "broadcast"):
        work = out if group.owned and len(out) == call.nbytes else memoryview(bytearray(call.nbytes))
        if len(source):
            await _copy(work, source)
        return work
    return out if group.owned else memoryview(bytearray(len(out)))


async def _finished(
    process_group: Any,
    group: NativeGroup,
    call: NativeCall,
    source: memoryview,
    work: memoryview,
    stop: asyncio.Future[None],
) -> None:
    """Run the collective and wait for it, or until the call is given up."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        _held.discard(handle)
        if handle.abandoned:
            in_background(handle.clear)
        if not done.done():
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
                done.exception()

    def over(wait: Callable[[], object]) -> None:
        error: BaseException | None = None
        try:
            wait()
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:
            pass  # that loop is closed

    handle = _Handle(_start(process_group, group, call, source, work), process_group, source, work)
    _held.add(handle)
    try:
        handle.work.get_future().add_done_callback(lambda future: over(future.value))
    except RuntimeError:  # not every collective of Gloo has a future
        in_background(lambda: over(handle.work.wait))
    try:
        await asyncio.wait((done, stop), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not done.done():
            try:
                await asyncio.wait((done,), timeout=_GRACE)
            finally:
                handle.abandoned = not done.done()
    if stop.done():
        stop.result()
    done.result()


class _Handle:
    """A collective in Gloo's hands and all that must live as long, the group too."""

    def __init__(self, work: Any, *needed: object) -> None:
        self.work = work
        self.abandoned = False
        self._needed = needed

    def clear(self) -> None:
        """Let go of it; not on a thread of the group, which its destructor joins."""
        self.work = None
        self._needed = ()


#: Collectives that Gloo has not finished, among them those that were given up.
_held: set[_Handle] = set()


def _start(group_: Any, group: NativeGroup, call: NativeCall, source: memoryview, out: memoryview) -> Any:
    """Begin the collective; torch's handle on it."""
    kind = torch.uint8 if call.operator is None else _TYPES[call.dtype]
    given, result = _tensor(source, kind), _tensor(out, kind)
    at_root = group.rank == call.root
    size = group.size
    match call.operation:
        case "all_reduce":
            return group_.allreduce([result], _options(_c10d.AllreduceOptions, group, call))
        case "reduce":
            return group_.reduce([result], _options(_c10d.ReduceOptions, group, call))
        case "reduce_scatter":
            return group_._reduce_scatter_base(
                result, given, _options(_c10d.ReduceScatterOptions, group, call)
            )
        case "all_gather":
            return group_._allgather_base(result, given, _options(_c10d.AllgatherOptions, group, call))
        case "gather":
            blocks = [list(result.chunk(size))] if at_root else []
            return group_.gather(blocks, [given], _options(_c10d.GatherOptions, group, call))
        case "scatter":
            blocks = [list(given.chunk(size))] if at_root else []
            return group_.scatter([result], blocks, _options(_c10d.ScatterOptions, group, call))
        case "broadcast":
            return group_.broadcast([result], _options(_c10d.BroadcastOptions, group, call))
        case "all_to_all":
            return group_.alltoall_base(result, given, [], [], _options(_c10d.AllToAllOptions, group, call))
        case "all_to_all_v":
            lengths = list(call.receive_lengths), list(call.send_lengths)
            return group_.alltoall_base(result, given, *lengths, _options(_c10d.AllToAllOptions, group, call))
    raise RudaError(f"the Gloo provider has no {call.operation}; report this")


def _options(kind: Any, group: NativeGroup, call: NativeCall) -> Any:
    options = kind()
    options.timeout = seconds_left(group)
    if call.operator is not None:
        options.reduceOp = _OPERATORS[call.operator]
    if call.root is not None:
        options.rootRank = call.root
    return options


def _tensor(view: memoryview, kind: torch.dtype) -> Tensor:
    """The bytes as a flat tensor, without a copy."""
    if not len(view):
        return torch.empty(0, dtype=kind)
    if view.readonly:  # torch has no tensors that are only read, and would warn
        address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        return torch.frombuffer((ctypes.c_char * len(view)).from_address(address), dtype=kind)
    return torch.frombuffer(view, dtype=kind)


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
