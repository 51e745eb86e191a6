"""What one rank runs: every subject of its group over every case, in alternating blocks.

    python -m ruda_async.bench.worker JOB.json

is that for ranks that mpiexec has started; others are started by `ruda_async.launch.spawn`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt

from .. import sync
from ..communicator import AsyncCommunicator
from ..config import environment
from ..connecting import connect
from ..launch.plan import prepare
from ..transport.registry import get_plugin, is_network
from ..url import split_url
from .cases import Case, bus_factor
from .contender import Contender, Data, Unsupported
from .events import Outbox
from .local import LocalWork
from .loops import LoopThread
from .ours import AsyncContender, SyncContender
from .peers import MpiPeer, TorchPeer
from .plan import Group, Plan, Subject
from .raw import RawSockets
from .results import Row
from .statistics import ratio, summarize

__all__ = ["Job", "rank_main"]

#: Calls in a block, whatever they take.
_FEWEST, _MOST = 3, 1000
#: Calls in each of the two blocks that warm up and tell how long one takes.
_WARM_UP = 3
#: Blocks for whose time the event loop's ticker is watched, and the least number of seconds.
_STALL, _STALL_LEAST = 2, 0.05

Times = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """What every rank of a group is told.

    Attributes:
        events: where rank 0 tells what it found: see `events`.
        loops: mode → the one event loop of ranks that are tasks; ranks in processes make their own.
    """

    plan: Plan
    group: Group
    events: str
    loops: dict[str, LoopThread] = field(default_factory=dict)

    def to_json(self) -> str:
        """For ranks that mpiexec starts."""
        return json.dumps({"plan": asdict(self.plan), "group": asdict(self.group), "events": self.events})

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        plan: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["plan"].items()}
        group = data["group"]
        subjects = tuple(Subject(**subject) for subject in group["subjects"])
        return cls(Plan(**plan), Group(group["world"], group["placement"], subjects), data["events"])


def rank_main(job: Job) -> None:
    """One rank that `spawn` has started."""
    with sync.connect(timeout=job.plan.timeout) as control:
        _run(job, control)


def _mpi_main(path: str) -> None:
    """One rank that mpiexec has started."""
    job = Job.from_json(Path(path).read_text(encoding="utf-8"))
    world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD

    def share(value: Any) -> Any:
        """Rank 0's value; not by mpi4py's own pickling."""
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        length = np.array([len(text)])
        world.Bcast(length, 0)
        room = text.copy() if world.rank == 0 else np.empty(length[0], np.uint8)
        world.Bcast(room, 0)
        return json.loads(room.tobytes())

    with _meeting(None, world.rank, world.size, share):
        control = sync.connect(timeout=job.plan.timeout)
    with control:
        _run(job, control)


def _run(job: Job, control: sync.Communicator) -> None:
    outbox = Outbox(job.events if control.rank == 0 else None)
    with contextlib.ExitStack() as stack:
        stack.callback(outbox.close)
        contenders = _Entrance(job, control, stack).all()
        for contender in contenders:
            stack.callback(contender.close)
        _Measurement(job, control, contenders, outbox).run()
        control.barrier()  # nobody leaves while another still measures


# ---------------------------------------------------------------------- who takes part


@contextlib.contextmanager
def _meeting(url: str | None, rank: int, world: int, share: Callable[[Any], Any]) -> Any:
    """Inside, ``connect()`` joins a fresh job at `url`, with a free port or a name of its own."""
    place = prepare(url, world, rank_per=_rank_per(url)) if rank == 0 else None
    with place or contextlib.nullcontext():
        shared = share([place.variables(r) for r in range(world)] if place else None)
        variables = dict(shared[rank])
        if place is not None and place.listener is not None:
            variables["RUDA_LISTEN_FD"] = str(place.listener.fileno())
        with environment(variables):
            yield


def _rank_per(url: str | None) -> str:
    return "process" if url is None else get_plugin(split_url(url).scheme).rank_per


def _own_place(url: str, name: str) -> str:
    """`url` with `name` added to its job's, where a name is what keeps jobs apart."""
    parts = split_url(url)
    if is_network(get_plugin(parts.scheme)):
        return url
    path = "/".join(part for part in (parts.host, parts.path, name) if part)
    return f"{parts.scheme}://{path}" + (f"?{urlencode(parts.query)}" if parts.query else "")


class _Entrance:
    """Makes the contenders of one rank; those over one URL in one mode share a communicator."""

    def __init__(self, job: Job, control: sync.Communicator, stack: contextlib.ExitStack) -> None:
        self._job = job
        self._control = control
        self._stack = stack
        self._loops = dict(job.loops)
        self._async: dict[tuple[str, str], AsyncCommunicator] = {}
        self._sync: dict[str, sync.Communicator] = {}

    def all(self) -> list[Contender]:
        """One contender for each subject."""
        return [self._make(subject) for subject in self._job.group.subjects]

    def _make(self, subject: Subject) -> Contender:
        timeout = self._job.plan.timeout
        match subject.name:
            case "gloo" | "ucc":
                return TorchPeer(subject, self._control, timeout)
            case "mpi":
                return MpiPeer(subject)
            case "raw":
                return RawSockets(subject, self._control, timeout)
            case "numpy":
                return LocalWork(subject, self._control.rank, self._job.group.placement == "tasks")
        if subject.mode == "sync":
            return SyncContender(subject, self._sync_comm(subject.url))
        loop = self._loop(subject.mode)
        return AsyncContender(subject, self._async_comm(subject.url, subject.mode, loop), loop)

    def _loop(self, mode: str) -> LoopThread:
        if mode not in self._loops:
            loop = self._loops[mode] = LoopThread(mode)
            self._stack.callback(loop.stop)
        return self._loops[mode]

    def _async_comm(self, url: str, mode: str, loop: LoopThread) -> AsyncCommunicator:
        if (url, mode) not in self._async:
            timeout = self._job.plan.timeout

            async def join() -> AsyncCommunicator:
                return await connect(timeout=timeout)

            with self._meet(url, mode):
                comm = self._async[url, mode] = loop.run(join())
            self._stack.callback(lambda: loop.run(comm.close()))
        return self._async[url, mode]

    def _sync_comm(self, url: str) -> sync.Communicator:
        if url not in self._sync:
            with self._meet(url, "sync"):
                comm = self._sync[url] = sync.connect(timeout=self._job.plan.timeout)
            self._stack.enter_context(comm)
        return self._sync[url]

    def _meet(self, url: str, mode: str) -> Any:
        control = self._control
        name = f"{mode}-{Path(self._job.events).parent.name}"  # of this run and group alone
        return _meeting(
            _own_place(url, name), control.rank, control.world_size, lambda v: control.broadcast_object(v, 0)
        )


# ---------------------------------------------------------------------- measuring


class _Measurement:
    """All cases over all contenders."""

    def __init__(
        self, job: Job, control: sync.Communicator, contenders: list[Contender], outbox: Outbox
    ) -> None:
        self._job = job
        self._control = control
        self._contenders = contenders
        self._outbox = outbox
        self._noted: set[str] = set()

    def run(self) -> None:
        """Measure, and put rows, notes and steps out."""
        plan, control = self._job.plan, self._control
        for operation, nbytes in plan.cases:
            case = Case(operation, nbytes, control.world_size, control.rank, plan.dtype, plan.row)
            self._outbox.put("step", operation=operation, nbytes=case.nbytes)
            self._case(case)

    def _case(self, case: Case) -> None:
        plan = self._job.plan
        data = Data(case, plan.reuse, plan.empty)
        ready = [contender for contender in self._contenders if self._prepared(contender, data)]
        faults = [self._faults(contender) for contender in ready]
        counts = [self._calibrate(contender) for contender in ready]
        blocks: list[list[list[float]]] = [[] for _ in ready]
        for _ in range(plan.rounds):
            for contender, count, own in zip(ready, counts, blocks, strict=True):
                self._control.barrier()
                own.append(contender.block(count))
        times = [self._over_ranks(own, count) for own, count in zip(blocks, counts, strict=True)]
        stalls = [self._stall(contender, own) for contender, own in zip(ready, times, strict=True)]
        if self._control.rank == 0:
            rows = [self._row(case, *found) for found in zip(ready, times, faults, stalls, strict=True)]
            self._compare(rows, times)
            for row in rows:
                self._outbox.put("row", row=asdict(row))

    def _prepared(self, contender: Contender, data: Data) -> bool:
        try:
            contender.prepare(data)
        except Unsupported as error:
            note = f"{contender.subject.label}: {data.case.operation} left out: {error}"
            if note not in self._noted:
                self._noted.add(note)
                self._outbox.put("note", text=note)
            return False
        return True

    def _faults(self, contender: Contender) -> str:
        """The first rank's fault that has one."""
        found = self._control.all_gather_object(contender.check())
        return next((f"rank {rank}: {fault}" for rank, fault in enumerate(found) if fault), "")

    def _calibrate(self, contender: Contender) -> int:
        """How many calls make a block; the same on all ranks."""
        self._control.barrier()
        warm = contender.block(_WARM_UP) and contender.block(_WARM_UP)
        self._control.barrier()
        seconds = max(float(np.median(warm)), 1e-9) * contender.subject.in_flight if warm else 0.0
        seconds = max(self._control.all_gather_object(seconds))
        return int(min(max(self._job.plan.block / seconds, _FEWEST), _MOST))

    def _over_ranks(self, blocks: list[list[float]], count: int) -> Times:
        """``[rounds, calls]``: the mean over the ranks that have times; only rank 0 gets it."""
        own = np.full((1, len(blocks), count), math.nan)
        if blocks[0]:
            own[0] = blocks
        gathered = self._control.gather(own, 0)
        means: Times = own[0] if gathered is None else np.nanmean(gathered, axis=0)
        return means

    def _stall(self, contender: Contender, times: Times) -> float | None:
        """The worst rank's 99th percentile of the ticker's lateness."""
        count = _FEWEST
        if self._control.rank == 0:
            each = max(float(np.median(times)), 1e-6) * contender.subject.in_flight
            count = math.ceil(max(_STALL * self._job.plan.block, _STALL_LEAST) / each)
        count = self._control.broadcast_object(min(max(count, _FEWEST), 10 * _MOST), 0)
        lateness = contender.stall(count)
        own = float(np.percentile(lateness, 99)) if lateness else None
        found = [stall for stall in self._control.all_gather_object(own) if stall is not None]
        return max(found, default=None)

    def _row(self, case: Case, contender: Contender, times: Times, fault: str, stall: float | None) -> Row:
        subject, figures = contender.subject, summarize(times)
        bandwidth = case.nbytes / figures.median
        return Row(
            operation=case.operation,
            nbytes=case.nbytes,
            dtype=case.dtype,
            world=case.world,
            subject=subject.label,
            name=subject.name,
            transport=subject.transport,
            mode=subject.mode,
            in_flight=subject.in_flight,
            placement=self._job.group.placement,
            reuse=self._job.plan.reuse or subject.name not in ("ruda", "numpy"),
            rounds=times.shape[0],
            calls=figures.calls,
            median=figures.median,
            p90=figures.p90,
            p99=figures.p99,
            min=figures.min,
            mean=figures.mean,
            algorithm_bandwidth=bandwidth,
            bus_bandwidth=bandwidth * bus_factor(case.operation, case.world),
            stall=stall,
            fault=fault,
            note=contender.note,
        )

    def _compare(self, rows: list[Row], times: list[Times]) -> None:
        for row, own in zip(rows, times, strict=True):
            for other, theirs in zip(rows, times, strict=True):
                if row.name == "ruda" and other.name != "ruda":
                    row.ratios[other.name] = ratio(own, theirs)


if __name__ == "__main__":
    _mpi_main(sys.argv[1])
