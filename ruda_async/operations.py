"""The collective calls of an asynchronous communicator, each one line over a request.

What the parameters have in common: `value` is a numpy array or a torch tensor (or of any kind with a
registered adapter) and is only read; results are fresh and of the same kind, dtype and device. `timeout`
is in seconds and replaces the communicator's default for this call. `out`, where there is one, is a
tensor of the result's shape and dtype that receives the result and is returned. `op` is one of
``sum mean max min prod`` or, for integers, ``band bor bxor``.

What they raise in common: `TensorContractError` for an input outside the contract, here or on the rank
in ``.rank``; `CollectiveMismatchError` when ranks make different calls; `PeerLostError`,
`CollectiveTimeoutError`, `CollectiveCancelledError` when the call cannot finish, on every rank;
`CommunicatorClosedError` after `close`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from .collectives.all_gather import AllGather
from .collectives.all_gather_v import AllGatherV
from .collectives.all_reduce import AllReduce
from .collectives.all_to_all import AllToAll
from .collectives.all_to_all_v import AllToAllV
from .collectives.barrier import Barrier
from .collectives.broadcast import Broadcast
from .collectives.gather import Gather
from .collectives.objects import AllGatherObject, BroadcastObject, GatherObject
from .collectives.reduce import Reduce
from .collectives.reduce_scatter import ReduceScatter
from .collectives.request import Request
from .collectives.scatter import Scatter
from .traits import VariableTensorExchange

__all__ = ["AsyncOperations"]

T = TypeVar("T")
R = TypeVar("R")


class AsyncOperations:
    """The calls; `AsyncCommunicator` adds identity, life and point-to-point."""

    async def _call(self, request: Request[R], timeout: float | None) -> R:
        raise NotImplementedError

    # ------------------------------------------------------------------ sums and their kin

    async def all_reduce(
        self,
        value: T,
        op: str = "sum",
        *,
        out: T | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> T:
        """Combine ``[…]`` over ranks by `op`; every rank gets the result, of the input's shape and dtype.

        Half-precision sums, means and products accumulate in float32 and round once. The order of
        additions depends on the world size alone, so results are equal to the bit on all ranks and in all
        runs; ``order="any"`` lets faster algorithms choose their own.
        """
        return await self._call(AllReduce(value, op, out=out, order=order), timeout)

    async def all_reduce_sum(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """`all_reduce` with ``op="sum"``."""
        return await self._call(AllReduce(value, "sum", out=out, name="all_reduce_sum"), timeout)

    async def reduce(
        self,
        value: T,
        root: int,
        op: str = "sum",
        *,
        out: T | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> T | None:
        """Combine ``[…]`` over ranks by `op` on rank `root`; None on the others."""
        return await self._call(Reduce(value, root, op, out=out, order=order), timeout)

    async def reduce_scatter(
        self,
        value: T,
        op: str = "sum",
        *,
        out: T | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> T:
        """Combine ``[world_size*n, …]`` over ranks by `op`; this rank gets its shard ``[n, …]``."""
        return await self._call(ReduceScatter(value, op, out=out, order=order), timeout)

    async def reduce_scatter_sum(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """`reduce_scatter` with ``op="sum"``."""
        return await self._call(ReduceScatter(value, "sum", out=out, name="reduce_scatter_sum"), timeout)

    async def reduce_scatter_dim(
        self,
        value: T,
        dim: int,
        op: str = "sum",
        *,
        out: T | None = None,
        order: str | None = None,
        timeout: float | None = None,
    ) -> T:
        """`reduce_scatter` along axis `dim` (negative axes count from the end)."""
        request = ReduceScatter(value, op, dim=dim, out=out, order=order, name="reduce_scatter_dim")
        return await self._call(request, timeout)

    # ------------------------------------------------------------------ gathers

    async def all_gather(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """Concatenate every rank's equal shard ``[n, …]`` in rank order into ``[world_size*n, …]``."""
        return await self._call(AllGather(value, out=out), timeout)

    async def all_gather_float(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """`all_gather` of a floating tensor; integers are refused."""
        return await self._call(AllGather(value, out=out, kind="float", name="all_gather_float"), timeout)

    async def all_gather_int(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """`all_gather` of an integer or bool tensor, moved as bits; floats are refused."""
        return await self._call(AllGather(value, out=out, kind="int", name="all_gather_int"), timeout)

    async def all_gather_dim(
        self, value: T, dim: int, *, out: T | None = None, timeout: float | None = None
    ) -> T:
        """`all_gather` along axis `dim` (negative axes count from the end)."""
        return await self._call(AllGather(value, dim=dim, out=out, name="all_gather_dim"), timeout)

    async def all_gather_v(
        self, value: T, *, out: T | None = None, timeout: float | None = None
    ) -> VariableTensorExchange[T]:
        """Concatenate shards ``[n_r, …]`` of different lengths; the lengths are in ``receive_counts``."""
        return await self._call(AllGatherV(value, out=out), timeout)

    async def gather(
        self, value: T, root: int, *, out: T | None = None, timeout: float | None = None
    ) -> T | None:
        """Concatenate every rank's equal shard ``[n, …]`` on rank `root`; None on the others."""
        return await self._call(Gather(value, root, out=out), timeout)

    # ------------------------------------------------------------------ from one to all

    async def broadcast(
        self, value: T, root: int, *, out: T | None = None, timeout: float | None = None
    ) -> T:
        """A fresh copy of the root's ``[…]`` on every rank; others' input gives shape and dtype."""
        return await self._call(Broadcast(value, root, out=out), timeout)

    async def broadcast_float(
        self, value: T, root: int, *, out: T | None = None, timeout: float | None = None
    ) -> T:
        """`broadcast` of a floating tensor; integers are refused."""
        request = Broadcast(value, root, out=out, kind="float", name="broadcast_float")
        return await self._call(request, timeout)

    async def scatter(
        self,
        value: T | None,
        root: int,
        *,
        like: T | None = None,
        out: T | None = None,
        timeout: float | None = None,
    ) -> T:
        """Give every rank its equal shard ``[n, …]`` of the root's ``[world_size*n, …]``.

        Other ranks pass None, or `like`: a tensor whose kind and device the result takes.
        """
        return await self._call(Scatter(value, root, like=like, out=out), timeout)

    # ------------------------------------------------------------------ from all to all

    async def all_to_all(self, value: T, *, out: T | None = None, timeout: float | None = None) -> T:
        """Send block *r* of ``[world_size*n, …]`` to rank *r*; blocks arrive in source order."""
        return await self._call(AllToAll(value, out=out), timeout)

    async def all_to_all_dim(
        self,
        value: T,
        split_dim: int,
        concat_dim: int,
        *,
        out: T | None = None,
        timeout: float | None = None,
    ) -> T:
        """`all_to_all` that splits along `split_dim` and joins what arrives along `concat_dim`."""
        request = AllToAll(value, split_dim=split_dim, concat_dim=concat_dim, out=out, name="all_to_all_dim")
        return await self._call(request, timeout)

    async def all_to_all_v(
        self,
        value: T,
        send_counts: Sequence[int],
        *,
        out: T | None = None,
        timeout: float | None = None,
    ) -> VariableTensorExchange[T]:
        """Send ``send_counts[r]`` rows of ``[sum(send_counts), …]`` to each rank *r*, in rank order."""
        return await self._call(AllToAllV(value, send_counts, out=out), timeout)

    async def all_to_all_v_float(
        self,
        value: T,
        send_counts: Sequence[int],
        *,
        out: T | None = None,
        timeout: float | None = None,
    ) -> VariableTensorExchange[T]:
        """`all_to_all_v` of a floating tensor; integers are refused."""
        request = AllToAllV(value, send_counts, out=out, kind="float", name="all_to_all_v_float")
        return await self._call(request, timeout)

    async def all_to_all_v_int(
        self,
        value: T,
        send_counts: Sequence[int],
        *,
        out: T | None = None,
        timeout: float | None = None,
    ) -> VariableTensorExchange[T]:
        """`all_to_all_v` of an integer or bool tensor, moved as bits; floats are refused."""
        request = AllToAllV(value, send_counts, out=out, kind="int", name="all_to_all_v_int")
        return await self._call(request, timeout)

    # ------------------------------------------------------------------ without tensors

    async def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank has called it."""
        await self._call(Barrier(), timeout)

    async def broadcast_object(self, value: Any, root: int, *, timeout: float | None = None) -> Any:
        """The root's small object on every rank: None, bool, int, float, str, bytes, lists and dicts."""
        return await self._call(BroadcastObject(value, root), timeout)

    async def gather_object(self, value: Any, root: int, *, timeout: float | None = None) -> list[Any] | None:
        """Every rank's small object on rank `root`, in rank order; None on the others."""
        return await self._call(GatherObject(value, root), timeout)

    async def all_gather_object(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        """Every rank's small object on every rank, in rank order."""
        return await self._call(AllGatherObject(value), timeout)
