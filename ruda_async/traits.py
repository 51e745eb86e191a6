"""The contract: five protocols, each extending the one before, synchronous and asynchronous.

Code that needs a collective asks for the smallest trait that has it, and runs on this library's
communicators, on differentiable wrappers, and on a test double alike. All protocols are generic in
the tensor type and `runtime_checkable`.

Meaning shared by all members: ranks are ordered ``0 … world_size-1``; inputs are only read; results
are fresh tensors of the input's kind, dtype and device. ``*_float`` members take floating dtypes and
``*_int`` members integers and bool; each refuses the other by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

__all__ = [
    "AsyncBroadcastTensorCollective",
    "AsyncIntegerTensorCollective",
    "AsyncReplicatedTensorCollective",
    "AsyncTensorCollective",
    "AsyncVariableTensorCollective",
    "BroadcastTensorCollective",
    "IntegerTensorCollective",
    "ReplicatedTensorCollective",
    "TensorCollective",
    "VariableTensorCollective",
    "VariableTensorExchange",
]

T = TypeVar("T")


class VariableTensorExchange(NamedTuple, Generic[T]):
    """What a variable all-to-all brought to this rank.

    Attributes:
        value: the received rows, in source-rank order; trailing shape and dtype as sent.
        receive_counts: rows received from each source rank; they sum to ``len(value)``.
    """

    value: T
    receive_counts: tuple[int, ...]


@runtime_checkable
class TensorCollective(Protocol[T]):
    """Sharded collectives: gather shards, or sum and keep one."""

    @property
    def world_size(self) -> int:
        """The number of ranks, at least 1."""
        ...

    @property
    def autodiff_context(self) -> object | None:
        """The `CollectiveScope` that records differentiable collectives, or None."""
        ...

    def all_gather_float(self, value: T) -> T:
        """Concatenate every rank's equal shard ``[n, …]`` along axis 0 into ``[world_size*n, …]``."""
        ...

    def reduce_scatter_sum(self, value: T) -> T:
        """Sum ``[world_size*n, …]`` over ranks and keep this rank's shard ``[n, …]``."""
        ...


@runtime_checkable
class ReplicatedTensorCollective(TensorCollective[T], Protocol[T]):
    """Adds the sum that every rank receives."""

    def all_reduce_sum(self, value: T) -> T:
        """Sum over ranks; shape and dtype as the input."""
        ...


@runtime_checkable
class BroadcastTensorCollective(ReplicatedTensorCollective[T], Protocol[T]):
    """Adds this rank's number and broadcast."""

    @property
    def rank(self) -> int:
        """This rank, ``0 <= rank < world_size``."""
        ...

    def broadcast_float(self, value: T, root: int) -> T:
        """A copy of the root's tensor on every rank; the input elsewhere gives shape and dtype."""
        ...


@runtime_checkable
class IntegerTensorCollective(BroadcastTensorCollective[T], Protocol[T]):
    """Adds the gather of integers, moved as their bits."""

    def all_gather_int(self, value: T) -> T:
        """As `all_gather_float`, for integer and bool tensors."""
        ...


@runtime_checkable
class VariableTensorCollective(IntegerTensorCollective[T], Protocol[T]):
    """Adds the uneven all-to-all that sharded experts need."""

    def all_to_all_v_float(self, value: T, send_counts: Sequence[int]) -> VariableTensorExchange[T]:
        """Send the first ``send_counts[0]`` rows to rank 0, the next to rank 1, and so on."""
        ...

    def all_to_all_v_int(self, value: T, send_counts: Sequence[int]) -> VariableTensorExchange[T]:
        """As `all_to_all_v_float`, for integer and bool tensors."""
        ...


@runtime_checkable
class AsyncTensorCollective(Protocol[T]):
    """The awaitable form of `TensorCollective`."""

    @property
    def world_size(self) -> int:
        """The number of ranks, at least 1."""
        ...

    @property
    def autodiff_context(self) -> object | None:
        """The `CollectiveScope` that records differentiable collectives, or None."""
        ...

    async def all_gather_float(self, value: T) -> T:
        """As `TensorCollective.all_gather_float`."""
        ...

    async def reduce_scatter_sum(self, value: T) -> T:
        """As `TensorCollective.reduce_scatter_sum`."""
        ...


@runtime_checkable
class AsyncReplicatedTensorCollective(AsyncTensorCollective[T], Protocol[T]):
    """The awaitable form of `ReplicatedTensorCollective`."""

    async def all_reduce_sum(self, value: T) -> T:
        """As `ReplicatedTensorCollective.all_reduce_sum`."""
        ...


@runtime_checkable
class AsyncBroadcastTensorCollective(AsyncReplicatedTensorCollective[T], Protocol[T]):
    """The awaitable form of `BroadcastTensorCollective`."""

    @property
    def rank(self) -> int:
        """This rank, ``0 <= rank < world_size``."""
        ...

    async def broadcast_float(self, value: T, root: int) -> T:
        """As `BroadcastTensorCollective.broadcast_float`."""
        ...


@runtime_checkable
class AsyncIntegerTensorCollective(AsyncBroadcastTensorCollective[T], Protocol[T]):
    """The awaitable form of `IntegerTensorCollective`."""

    async def all_gather_int(self, value: T) -> T:
        """As `IntegerTensorCollective.all_gather_int`."""
        ...


@runtime_checkable
class AsyncVariableTensorCollective(AsyncIntegerTensorCollective[T], Protocol[T]):
    """The awaitable form of `VariableTensorCollective`."""

    async def all_to_all_v_float(self, value: T, send_counts: Sequence[int]) -> VariableTensorExchange[T]:
        """As `VariableTensorCollective.all_to_all_v_float`."""
        ...

    async def all_to_all_v_int(self, value: T, send_counts: Sequence[int]) -> VariableTensorExchange[T]:
        """As `VariableTensorCollective.all_to_all_v_int`."""
        ...
