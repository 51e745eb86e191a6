"""The process group: torch's calls, started on a communicator."""

# torch's calls have two signatures each, and change from release to release: `signatures` takes both.
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import CollectiveTimeoutError
from . import calls, sparse
from .calls import Call
from .group import Group
from .signatures import Arguments, lists_of, pairs, tensors_of
from .work import BackendError, Work

__all__ = ["ProcessGroup", "monitored_barrier"]


class ProcessGroup(Group):
    """`torch.distributed.ProcessGroup` over a `ruda_async.sync.Communicator`.

    Calls are started and return a `Work`. Calls of one group match by the order in which they are made, so
    every rank has to make the same ones in the same order.

    Attributes:
        communicator: for calls that torch does not have; its own calls count in that order too.
    """

    # ------------------------------------------------------------------ reductions

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Work:
        """Combine a tensor ``[…]`` over ranks, in place."""
        said = Arguments("allreduce", args, kwargs, op=dist.ReduceOp.SUM)
        values = tensors_of(tensors)
        return self._start(
            "allreduce", [partial(_all_reduce, t, said.op) for t in values], values, said.timeout
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """`allreduce` of several tensors as one work."""
        return self.allreduce(tensors, opts or dist.AllreduceCoalescedOptions())

    def reduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Work:
        """Combine a tensor ``[…]`` over ranks, in place on the root; other ranks' keep their values."""
        said = Arguments("reduce", args, kwargs, root=0, op=dist.ReduceOp.SUM)
        values = tensors_of(tensors)
        return self._start(
            "reduce", [partial(calls.reduce, t, said.root, said.op) for t in values], values, said.timeout
        )

    def reduce_scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:
        """Combine a list of one tensor for each rank; this rank gets its own."""
        said = Arguments("reduce_scatter", args, kwargs, op=dist.ReduceOp.SUM)
        results = tensors_of(outputs)
        lists = [inputs] if isinstance(outputs, Tensor) else inputs
        rank, size = self.rank(), self.size()
        return self._start(
            "reduce_scatter",
            [partial(calls.reduce_scatter_list, o, i, said.op, rank, size) for o, i in pairs(results, lists)],
            results,
            said.timeout,
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Combine ``[W·n, …]`` over ranks; this rank gets its block of ``n`` rows."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """`reduce_scatter_single` of several tensors as one work."""
        said = Arguments("reduce_scatter_single", (opts,), {}, op=dist.ReduceOp.SUM)
        return self._start(
            "reduce_scatter_single",
            [partial(calls.reduce_scatter, o, i, said.op) for o, i in pairs(outputs, inputs)],
            outputs,
            said.timeout,
        )

    # ------------------------------------------------------------------ gathers

    def allgather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:
        """Every rank's tensor in a list of one for each rank."""
        said = Arguments("allgather", args, kwargs)
        lists = [outputs] if isinstance(inputs, Tensor) else outputs
        size = self.size()
        return self._start(
            "allgather",
            [partial(calls.all_gather_list, o, i, size) for o, i in pairs(lists, tensors_of(inputs))],
            [tensor for tensors in lists for tensor in tensors],
            said.timeout,
        )

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """`allgather` of several tensors as one work; ``outputs[rank][i]`` receives rank's tensor *i*."""
        said = Arguments("allgather_coalesced", (opts,), {})
        lists = [[tensors[i] for tensors in outputs] for i in range(len(inputs))]
        size = self.size()
        return self._start(
            "allgather_coalesced",
            [partial(calls.all_gather_list, o, i, size) for o, i in pairs(lists, inputs)],
            [tensor for tensors in outputs for tensor in tensors],
            said.timeout,
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Every rank's ``[n, …]`` in one ``[W·n, …]``."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """`all_gather_single` of several tensors as one work."""
        said = Arguments("all_gather_single", (opts,), {})
        return self._start(
            "all_gather_single",
            [partial(calls.all_gather, o, i) for o, i in pairs(outputs, inputs)],
            outputs,
            said.timeout,
        )

    def gather(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:
        """Every rank's tensor in the root's list of one for each rank."""
        said = Arguments("gather", args, kwargs, root=0)
        lists = lists_of(outputs, single=isinstance(inputs, Tensor))
        rank, size = self.rank(), self.size()
        values = tensors_of(inputs)
        return self._start(
            "gather",
            [
                partial(calls.gather, o, i, said.root, rank, size)
                for o, i in pairs(lists or [None] * len(values), values)
            ],
            [tensor for tensors in lists for tensor in tensors],
            said.timeout,
        )

    # ------------------------------------------------------------------ from one to all

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> Work:
        """The root's tensor ``[…]`` in every rank's."""
        said = Arguments("broadcast", args, kwargs, root=0)
        values = tensors_of(tensors)
        return self._start(
            "broadcast", [partial(calls.broadcast, t, said.root) for t in values], values, said.timeout
        )

    def scatter(self, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Work:
        """Each rank's tensor of the root's list."""
        said = Arguments("scatter", args, kwargs, root=0)
        results = tensors_of(outputs)
        lists = lists_of(inputs, single=isinstance(outputs, Tensor))
        rank, size = self.rank(), self.size()
        return self._start(
            "scatter",
            [
                partial(calls.scatter, o, i, said.root, rank, size)
                for o, i in pairs(results, lists or [None] * len(results))
            ],
            results,
            said.timeout,
        )

    # ------------------------------------------------------------------ from all to all

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *args: Any, **kwargs: Any) -> Work:
        """Tensor *r* of `inputs` to rank *r*, and from it tensor *r* of `outputs`."""
        said = Arguments("alltoall", args, kwargs)
        size = self.size()
        return self._start(
            "alltoall", [partial(calls.all_to_all_list, outputs, inputs, size)], outputs, said.timeout
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        *args: Any,
        **kwargs: Any,
    ) -> Work:
        """So many rows of `input` to each rank, and so many of `output` from each; equal without sizes."""
        said = Arguments("all_to_all_single", args, kwargs)
        size = self.size()
        return self._start(
            "all_to_all_single",
            [partial(calls.all_to_all, output, input, output_split_sizes, input_split_sizes, size)],
            [output],
            said.timeout,
        )

    # ------------------------------------------------------------------ point to point

    def send(self, tensors: list[Tensor], dstRank: int, tag: int = 0) -> Work:
        """Send one tensor to a rank of the group."""
        return self._start_pair("send", lambda tensor: calls.send(tensor, dstRank, tag), tensors)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int = 0) -> Work:
        """Receive one tensor from a rank of the group."""
        return self._start_pair("recv", lambda tensor: calls.receive(tensor, srcRank, tag), tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        """Receive one tensor from whichever rank sends first; the work's `source_rank` tells which."""
        return self._start_pair("recv", lambda tensor: calls.receive_any(tensor, tag), tensors)

    # ------------------------------------------------------------------ barriers

    def barrier(self, *args: Any, **kwargs: Any) -> Work:
        """A work that is done when every rank has made this call."""
        said = Arguments("barrier", args, kwargs)
        return self._start("barrier", [calls.barrier], [], said.timeout)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, and say which did not come. All of them are named, whatever `wait_all_ranks`.

        Raises:
            BackendError: some did not come in time; their ranks are in ``.error.missing``.
        """
        limit = timeout or self._timeout
        try:
            self._start("barrier", [calls.barrier], [], limit).wait()
        except BackendError as failed:
            if not isinstance(failed.error, CollectiveTimeoutError) or not failed.error.missing:
                raise
            missing = failed.error.missing
            ranks = ", ".join(map(str, missing))
            text = (
                f"[Rank {self.rank()}]: Ranks {ranks} failed to pass monitoredBarrier in "
                f"{limit.total_seconds() * 1000:.0f} ms"
            )
            error = CollectiveTimeoutError(text, rank=failed.error.rank, missing=missing)
            error.__cause__ = failed.error
            raise BackendError(error) from error

    # ------------------------------------------------------------------ older names of the same calls

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


def _all_reduce(tensor: Any, op: Any) -> Call:
    dense = not isinstance(tensor, Tensor) or tensor.layout is torch.strided
    return calls.all_reduce(tensor, op) if dense else sparse.all_reduce(tensor, op)


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """`torch.distributed.monitored_barrier`, which torch itself allows for Gloo alone.

    Raises:
        BackendError: some ranks did not come in time; they are in ``.error.missing``.
        TypeError: the group is of another backend.
    """
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, ProcessGroup):
        raise TypeError("the group is not of the backend ruda; use torch.distributed.monitored_barrier")
    chosen.monitored_barrier(timeout, wait_all_ranks)
