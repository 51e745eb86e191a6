"""A transport of one process whose provider runs every collective: ranks leave their memory on a table."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from typing import Any

from ruda_async.transport import (
    Buffer,
    Job,
    NativeCall,
    NativeGroup,
    NativeReducer,
    Transport,
)
from ruda_async.transport.registry import get_plugin

_jobs = itertools.count()


class Table:
    """Where the ranks of one call put their input until all have come."""

    def __init__(self) -> None:
        self.sources: dict[int, memoryview] = {}
        self.calls: dict[int, NativeCall] = {}
        self.changed = asyncio.Event()


class FakeProvider:
    """See `ruda_async.transport.Provider`. Counts what it is told; `hold` keeps calls from ending."""

    name = "table"
    agrees = False

    def __init__(self, tables: dict[Any, Table], exact: bool) -> None:
        self.exact = exact
        self.tables = tables
        self.ran: list[tuple[NativeGroup, NativeCall]] = []
        self.failed: list[tuple[NativeGroup, BaseException]] = []
        self.forgotten: list[int] = []
        self.running: dict[tuple[int, int], asyncio.Future[None]] = {}
        self.overlaps = 0
        self.break_with: BaseException | None = None
        #: Set to let calls end.
        self.go = asyncio.Event()
        self.go.set()

    def objection(self, call: NativeCall, members: tuple[int, ...]) -> str | None:
        return "it takes no groups of three" if len(members) == 3 else None

    def reason(self, call: NativeCall, members: tuple[int, ...]) -> str | None:
        return None if call.dtype == "int8" else "the table is near"

    async def run(
        self,
        group: NativeGroup,
        call: NativeCall,
        source: Buffer,
        out: Buffer,
        reducer: NativeReducer | None,
    ) -> None:
        self.overlaps += any(channel == group.channel for channel, _ in self.running)
        self.ran.append((group, call))
        stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running[group.channel, group.sequence] = stop
        work = asyncio.ensure_future(self._work(group, call, source, out, reducer))
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            (work if work.done() else stop).result()
        finally:
            del self.running[group.channel, group.sequence]
            work.cancel()

    async def _work(
        self, group: NativeGroup, call: NativeCall, source: Any, out: Any, reducer: NativeReducer | None
    ) -> None:
        if self.break_with is not None:
            raise self.break_with
        table = self.tables[group.channel, group.sequence, group.epoch, group.members]
        table.sources[group.rank], table.calls[group.rank] = memoryview(bytes(source)), call
        while len(table.sources) < group.size:
            table.changed.clear()
            await table.changed.wait()
        table.changed.set()
        await self.go.wait()
        rank, size = group.rank, group.size
        inputs = [table.sources[r] for r in range(size)]
        match call.operation:
            case "all_reduce" | "reduce" | "reduce_scatter":
                assert reducer is not None
                whole = memoryview(bytearray(call.nbytes))
                reducer.reduce(whole, inputs)
                shard = len(whole) // size
                if call.operation == "reduce_scatter":
                    whole = whole[rank * shard : (rank + 1) * shard]
                if len(out):
                    out[:] = whole
            case "all_gather" | "gather" | "all_gather_v":
                if len(out):
                    out[:] = b"".join(inputs)
            case "broadcast":
                assert call.root is not None
                out[:] = inputs[call.root]
            case "scatter":
                assert call.root is not None
                out[:] = inputs[call.root][rank * call.nbytes : (rank + 1) * call.nbytes]
            case "all_to_all":
                part = len(out) // size
                out[:] = b"".join(i[rank * part : (rank + 1) * part] for i in inputs)
            case "all_to_all_v":
                parts = []
                for peer, data in enumerate(inputs):
                    lengths = table.calls[peer].send_lengths
                    at = sum(lengths[:rank])
                    assert lengths[rank] == call.receive_lengths[peer]
                    parts.append(data[at : at + lengths[rank]])
                out[:] = b"".join(parts)

    def fail(self, group: NativeGroup, error: BaseException) -> None:
        self.failed.append((group, error))
        stop = self.running.get((group.channel, group.sequence))
        if stop is not None and not stop.done():
            stop.set_exception(RuntimeError("told to fail"))

    def forget(self, channel: int) -> None:
        self.forgotten.append(channel)


class TablePlugin:
    """``table://`` is ``memory://`` with a provider; `providers` has each rank's after `connect`."""

    summary = "memory with a provider"
    rank_per = "task"
    preference = -100
    provider_names = ("table",)

    def __init__(self, exact: bool = True) -> None:
        self.scheme = f"table{next(_jobs)}"
        self.example = f"{self.scheme}://example"
        self.parameters = get_plugin("memory").parameters
        self.exact = exact
        self.tables: dict[Any, Table] = defaultdict(Table)
        self.providers: dict[int, FakeProvider] = {}

    def unavailable(self) -> str | None:
        return None

    async def connect(self, job: Job) -> Transport:
        transport: Any = await get_plugin("memory").connect(job)
        self.providers[job.rank] = FakeProvider(self.tables, self.exact)
        transport.providers = (self.providers[job.rank],)
        return transport  # type: ignore[no-any-return]
