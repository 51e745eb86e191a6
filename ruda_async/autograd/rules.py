"""What each differentiable operation runs forward, and which operation carries its gradient back.

Every operation here is linear in its tensor, so its backward is its transpose, which is again one of
these operations: that is why each is differentiable any number of times. The pairs are those of
Megatron-LM (Shoeybi et al. 2019, section 3) and of `torch.distributed.nn.functional`.

A rule object belongs to one call. `run` is a coroutine over the asynchronous communicator; `local` takes
its place in the operations that need no messages in one direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from ..collectives import all_to_all_v as exchanges
from ..communicator import AsyncCommunicator
from ..errors import TensorContractError

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AllToAllV",
    "Broadcast",
    "CopyTo",
    "GatherFrom",
    "ReduceFrom",
    "ReduceScatter",
    "ReduceTo",
    "Rule",
    "ScatterTo",
]


class Rule(Protocol):
    """One call of one operation."""

    #: Whether `run` has to be awaited; otherwise `local` gives the result.
    communicates: bool
    #: The same of its transpose.
    communicates_back: bool

    async def run(self, comm: AsyncCommunicator, value: Tensor, timeout: float | None) -> Tensor:
        """The result, without a gradient."""
        ...

    def local(self, value: Tensor, rank: int, size: int) -> Tensor:
        """The result of an operation that needs no messages."""
        ...

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        """The call, and its input, that give the input's gradient from the output's."""
        ...


class _Remote:
    __slots__ = ()
    communicates = True
    communicates_back = True

    def local(self, value: Tensor, rank: int, size: int) -> Tensor:
        raise NotImplementedError


class _Local:
    __slots__ = ()
    communicates = False
    communicates_back = True

    async def run(self, comm: AsyncCommunicator, value: Tensor, timeout: float | None) -> Tensor:
        return self.local(value, comm.rank, comm.world_size)

    def local(self, value: Tensor, rank: int, size: int) -> Tensor:
        raise NotImplementedError


class AllGather(_Remote):
    """Concatenate shards along `dim`; `name` is the communicator's method for axis 0."""

    __slots__ = ("dim", "name")

    def __init__(self, dim: int | None = None, name: str = "all_gather") -> None:
        self.dim = dim
        self.name = name

    async def run(self, comm: AsyncCommunicator, value: Tensor, timeout: float | None) -> Tensor:
        if self.dim is None:
            return cast(Tensor, await getattr(comm, self.name)(value, timeout=timeout))
        return await comm.all_gather_dim(value, self.dim, timeout=timeout)

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        return ReduceScatter("sum", self.dim), gradient


class ReduceScatter(_Remote):
    """Sum or average over ranks and keep this rank's shard along `dim`."""

    __slots__ = ("dim", "op")

    def __init__(self, op: str = "sum", dim: int | None = None) -> None:
        self.op = op
        self.dim = dim

    async def run(self, comm: AsyncCommunicator, value: Tensor, timeout: float | None) -> Tensor:
        if self.dim is not None:
            return await comm.reduce_scatter_dim(value, self.dim, self.op, timeout=timeout)
        if self.op == "sum":
            return await comm.reduce_scatter_sum(value, timeout=timeout)
        return await comm.reduce_scatter(value, self.op, timeout=timeout)

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        return AllGather(self.dim), gradient if self.op == "sum" else gradient / size


class AllReduce(_Remote):
    """Sum or average over ranks, on every rank: its own transpose."""

    __slots__ = ("op",)

    def __init__(self, op: str = "sum") -> None:
        self.op = op

    async def run(self, comm: AsyncCommunicator, value: Tensor, timeout: float | None) -> Tensor:
        if self.op == "sum":
            return await comm.all_reduce_sum(value, timeout=timeout)
        return await comm.all_reduce(value, self.op, timeout=timeout)

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        return AllReduce(self.op), gradient


class Broadcast(_Remote):
    """The root's tensor on every rank."""

    __slots__ = ("name", "root")

    def __init__(self, root: int, name: str = "broadcast") -> None:
        self.root = root
        self.name = name

    async def run(self, comm: AsyncCommunicator, value: Tensor, timeout: float | None) -> Tensor:
        return cast(Tensor, await getattr(comm, self.name)(value, self.root, timeout=timeout))

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        return ReduceTo(self.root), gradient


class ReduceTo(_Remote):
    """The sum over ranks on the root and zeros elsewhere: the transpose of a broadcast."""

    __slots__ = ("root",)

    def __init__(self, root: int) -> None:
        self.root = root

    async def run(self, comm: AsyncCommunicator, value: Tensor, timeout: float | None) -> Tensor:
        total = await comm.reduce(value, self.root, "sum", timeout=timeout)
        return torch.zeros_like(value) if total is None else total

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        return Broadcast(self.root), gradient


class AllToAll(_Remote):
    """Split along one axis, exchange blocks, join along another."""

    __slots__ = ("concat_dim", "split_dim")

    def __init__(self, split_dim: int, concat_dim: int) -> None:
        self.split_dim = split_dim
        self.concat_dim = concat_dim

    async def run(self, comm: AsyncCommunicator, value: Tensor, timeout: float | None) -> Tensor:
        return await comm.all_to_all_dim(value, self.split_dim, self.concat_dim, timeout=timeout)

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        return AllToAll(self.concat_dim, self.split_dim), gradient


class AllToAllV(_Remote):
    """The uneven exchange of rows; the received counts, known after `run`, drive the way back.

    `name` and `purpose` are those of the request.
    """

    __slots__ = ("name", "purpose", "receive_counts", "send_counts")

    def __init__(self, send_counts: Sequence[int], name: str = "all_to_all_v", purpose: str = "") -> None:
        self.send_counts = send_counts
        self.receive_counts: tuple[int, ...] = ()
        self.name = name
        self.purpose = purpose

    async def run(self, comm: AsyncCommunicator, value: Tensor, timeout: float | None) -> Tensor:
        kind = self.name.partition("_v_")[2] or None
        request = exchanges.AllToAllV(
            value, self.send_counts, kind=kind, name=self.name, purpose=self.purpose
        )
        exchange = await comm._call(request, timeout)
        self.receive_counts = exchange.receive_counts
        return exchange.value

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        return AllToAllV(self.receive_counts), gradient


# ---------------------------------------------------------------------- tensor-parallel regions


class CopyTo(_Local):
    """Megatron's *f*: the input forward, the sum of gradients backward."""

    __slots__ = ()

    def local(self, value: Tensor, rank: int, size: int) -> Tensor:
        return value.view_as(value)

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        return ReduceFrom(), gradient


class ReduceFrom(_Remote):
    """Megatron's *g*: the sum over ranks forward, the gradient as it is backward."""

    __slots__ = ()
    communicates_back = False

    async def run(self, comm: AsyncCommunicator, value: Tensor, timeout: float | None) -> Tensor:
        return await comm.all_reduce_sum(value, timeout=timeout)

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        return CopyTo(), gradient


class ScatterTo(_Local):
    """This rank's slice of a replicated tensor forward, the gather of gradients backward."""

    __slots__ = ("dim",)

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def local(self, value: Tensor, rank: int, size: int) -> Tensor:
        if value.dim() == 0 or not -value.dim() <= self.dim < value.dim():
            raise TensorContractError(
                f"rank {rank} of {size}: scatter_to has no axis dim={self.dim} in a tensor of shape "
                f"{tuple(value.shape)}; pass one that it has",
                rank=rank,
            )
        length = value.shape[self.dim]
        if length % size:
            raise TensorContractError(
                f"rank {rank} of {size}: scatter_to cannot split axis {self.dim} of shape "
                f"{tuple(value.shape)} into {size} equal parts; pad it to a multiple",
                rank=rank,
            )
        shard = length // size
        return value.narrow(self.dim, rank * shard, shard)

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        return GatherFrom(self.dim), gradient


class GatherFrom(_Remote):
    """The gather of slices forward, this rank's slice of the (replicated) gradient backward."""

    __slots__ = ("dim",)
    communicates_back = False

    def __init__(self, dim: int) -> None:
        self.dim = dim

    async def run(self, comm: AsyncCommunicator, value: Tensor, timeout: float | None) -> Tensor:
        return await comm.all_gather_dim(value, self.dim, timeout=timeout)

    def transposed(self, gradient: Tensor, size: int) -> tuple[Rule, Tensor]:
        return ScatterTo(self.dim), gradient
