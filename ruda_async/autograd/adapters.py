"""`differentiable(comm)`: the trait stack with gradients, so that code written against it can train."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, overload

from torch import Tensor

from ..communicator import AsyncCommunicator
from ..errors import TensorContractError
from ..sync import Communicator
from ..traits import VariableTensorExchange
from . import aio, functions, rules
from .compiling import eager
from .engine import run, run_async, scope_of, tracks
from .graph import in_graph, traced, traced_exchange, traced_root

__all__ = ["AsyncDifferentiableCommunicator", "DifferentiableCommunicator", "differentiable"]

#: Calls that move or reduce tensors and have no gradient here; the others know nothing of tensors.
_NOT_DIFFERENTIABLE = ("all_gather_v", "all_to_all", "gather", "recv", "reduce", "scatter", "send")


def _no_gradient(comm: AsyncCommunicator, name: str, values: Sequence[object]) -> None:
    """Refuse to lose a gradient silently."""
    if any(isinstance(value, Tensor) and tracks(comm, value) and value.requires_grad for value in values):
        raise TensorContractError(
            f"{name} has no gradient here, and would lose that of its input; pass value.detach(), or use one "
            "of all_gather, reduce_scatter, all_reduce, broadcast, all_to_all_v and their *_dim forms"
        )


class DifferentiableCommunicator:
    """A `ruda_async.sync.Communicator` whose calls on floating torch tensors carry gradients.

    Satisfies every synchronous protocol of `ruda_async.traits`. Integers, numpy arrays, and all calls without
    tensors pass through. A call that has no gradient here refuses an input that needs one. `channel`,
    `split`, `bounded` and `shrink` return wrapped communicators; `start` is the plain one's.

    Attributes:
        plain: the communicator itself.
    """

    def __init__(self, plain: Communicator) -> None:
        self.plain = plain

    @property
    def rank(self) -> int:
        """As `Communicator.rank`."""
        return self.plain.rank

    @property
    def world_size(self) -> int:
        """As `Communicator.world_size`."""
        return self.plain.world_size

    @property
    def autodiff_context(self) -> object | None:
        """The `CollectiveScope` bound to this communicator, or None."""
        return scope_of(self.plain._inner)

    @in_graph(traced("all_gather.all_gather_float"))
    def all_gather_float(self, value: Tensor, *, timeout: float | None = None) -> Tensor:
        """As `functions.all_gather`; integers are refused."""
        return run(self.plain, rules.AllGather(name="all_gather_float"), value, timeout)

    def all_gather_int(self, value: Tensor, *, timeout: float | None = None) -> Tensor:
        """As `Communicator.all_gather_int`."""
        return self.plain.all_gather_int(value, timeout=timeout)

    @in_graph(traced_root("broadcast.broadcast_float"))
    def broadcast_float(self, value: Tensor, root: int, *, timeout: float | None = None) -> Tensor:
        """As `functions.broadcast`; integers are refused."""
        return run(self.plain, rules.Broadcast(root, "broadcast_float"), value, timeout)

    @in_graph(traced_exchange("all_to_all_v.all_to_all_v_float"))
    def all_to_all_v_float(
        self, value: Tensor, send_counts: Sequence[int], *, timeout: float | None = None
    ) -> VariableTensorExchange[Tensor]:
        """As `functions.all_to_all_v`; integers are refused."""
        rule = rules.AllToAllV(tuple(send_counts), "all_to_all_v_float")
        return VariableTensorExchange(run(self.plain, rule, value, timeout), rule.receive_counts)

    def all_to_all_v_int(
        self, value: Tensor, send_counts: Sequence[int], *, timeout: float | None = None
    ) -> VariableTensorExchange[Tensor]:
        """As `Communicator.all_to_all_v_int`."""
        return self.plain.all_to_all_v_int(value, send_counts, timeout=timeout)

    all_gather = functions.all_gather
    all_gather_dim = functions.all_gather_dim
    all_reduce_mean = functions.all_reduce_mean
    all_reduce_sum = functions.all_reduce_sum
    all_to_all_dim = functions.all_to_all_dim
    all_to_all_v = functions.all_to_all_v
    broadcast = functions.broadcast
    reduce_scatter_mean = functions.reduce_scatter_mean
    reduce_scatter_sum = functions.reduce_scatter_sum

    @eager
    def all_reduce(self, value: Tensor, op: str = "sum", *, timeout: float | None = None) -> Tensor:
        """As `Communicator.all_reduce`; ``sum`` and ``mean`` carry gradients."""
        if op in ("sum", "mean"):
            return run(self.plain, rules.AllReduce(op), value, timeout)
        _no_gradient(self.plain._inner, f"all_reduce with op={op!r}", (value,))
        return self.plain.all_reduce(value, op, timeout=timeout)

    @eager
    def reduce_scatter(self, value: Tensor, op: str = "sum", *, timeout: float | None = None) -> Tensor:
        """As `Communicator.reduce_scatter`; ``sum`` and ``mean`` carry gradients."""
        if op in ("sum", "mean"):
            return run(self.plain, rules.ReduceScatter(op), value, timeout)
        _no_gradient(self.plain._inner, f"reduce_scatter with op={op!r}", (value,))
        return self.plain.reduce_scatter(value, op, timeout=timeout)

    @eager
    def reduce_scatter_dim(
        self, value: Tensor, dim: int, op: str = "sum", *, timeout: float | None = None
    ) -> Tensor:
        """As `Communicator.reduce_scatter_dim`; ``sum`` and ``mean`` carry gradients."""
        if op in ("sum", "mean"):
            return run(self.plain, rules.ReduceScatter(op, dim), value, timeout)
        _no_gradient(self.plain._inner, f"reduce_scatter_dim with op={op!r}", (value,))
        return self.plain.reduce_scatter_dim(value, dim, op, timeout=timeout)

    def channel(self, name: str) -> DifferentiableCommunicator:
        """As `Communicator.channel`."""
        return DifferentiableCommunicator(self.plain.channel(name))

    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> DifferentiableCommunicator | None:
        """As `Communicator.split`."""
        group = self.plain.split(color, key, timeout=timeout)
        return None if group is None else DifferentiableCommunicator(group)

    def bounded(self, max_bytes: int) -> DifferentiableCommunicator:
        """As `Communicator.bounded`; backward is bounded too."""
        return DifferentiableCommunicator(self.plain.bounded(max_bytes))

    def shrink(self, *, timeout: float | None = None) -> DifferentiableCommunicator:
        """As `Communicator.shrink`."""
        return DifferentiableCommunicator(self.plain.shrink(timeout=timeout))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "plain":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        found = getattr(self.plain, name)
        if name not in _NOT_DIFFERENTIABLE:
            return found

        def call(*args: Any, **options: Any) -> Any:
            _no_gradient(self.plain._inner, name, [*args, *options.values()])
            return found(*args, **options)

        return call

    def __repr__(self) -> str:
        return f"<differentiable {self.plain!r}>"

    def __enter__(self) -> DifferentiableCommunicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.plain.close()


class AsyncDifferentiableCommunicator:
    """An `AsyncCommunicator` whose calls on floating torch tensors carry gradients.

    Satisfies every asynchronous protocol of `ruda_async.traits`; otherwise as `DifferentiableCommunicator`.
    Call ``await ruda_async.autograd.backward(loss)`` for the backward pass.
    """

    def __init__(self, plain: AsyncCommunicator) -> None:
        self.plain = plain

    @property
    def rank(self) -> int:
        """As `AsyncCommunicator.rank`."""
        return self.plain.rank

    @property
    def world_size(self) -> int:
        """As `AsyncCommunicator.world_size`."""
        return self.plain.world_size

    @property
    def autodiff_context(self) -> object | None:
        """The `CollectiveScope` bound to this communicator, or None."""
        return scope_of(self.plain)

    async def all_gather_float(self, value: Tensor, *, timeout: float | None = None) -> Tensor:
        """As `aio.all_gather`; integers are refused."""
        return await run_async(self.plain, rules.AllGather(name="all_gather_float"), value, timeout)

    async def all_gather_int(self, value: Tensor, *, timeout: float | None = None) -> Tensor:
        """As `AsyncCommunicator.all_gather_int`."""
        return await self.plain.all_gather_int(value, timeout=timeout)

    async def broadcast_float(self, value: Tensor, root: int, *, timeout: float | None = None) -> Tensor:
        """As `aio.broadcast`; integers are refused."""
        return await run_async(self.plain, rules.Broadcast(root, "broadcast_float"), value, timeout)

    async def all_to_all_v_float(
        self, value: Tensor, send_counts: Sequence[int], *, timeout: float | None = None
    ) -> VariableTensorExchange[Tensor]:
        """As `aio.all_to_all_v`; integers are refused."""
        rule = rules.AllToAllV(tuple(send_counts), "all_to_all_v_float")
        result = await run_async(self.plain, rule, value, timeout)
        return VariableTensorExchange(result, rule.receive_counts)

    async def all_to_all_v_int(
        self, value: Tensor, send_counts: Sequence[int], *, timeout: float | None = None
    ) -> VariableTensorExchange[Tensor]:
        """As `AsyncCommunicator.all_to_all_v_int`."""
        return await self.plain.all_to_all_v_int(value, send_counts, timeout=timeout)

    all_gather = aio.all_gather
    all_gather_dim = aio.all_gather_dim
    all_reduce_mean = aio.all_reduce_mean
    all_reduce_sum = aio.all_reduce_sum
    all_to_all_dim = aio.all_to_all_dim
    all_to_all_v = aio.all_to_all_v
    broadcast = aio.broadcast
    reduce_scatter_mean = aio.reduce_scatter_mean
    reduce_scatter_sum = aio.reduce_scatter_sum

    async def all_reduce(self, value: Tensor, op: str = "sum", *, timeout: float | None = None) -> Tensor:
        """As `AsyncCommunicator.all_reduce`; ``sum`` and ``mean`` carry gradients."""
        if op in ("sum", "mean"):
            return await run_async(self.plain, rules.AllReduce(op), value, timeout)
        _no_gradient(self.plain, f"all_reduce with op={op!r}", (value,))
        return await self.plain.all_reduce(value, op, timeout=timeout)

    async def reduce_scatter(self, value: Tensor, op: str = "sum", *, timeout: float | None = None) -> Tensor:
        """As `AsyncCommunicator.reduce_scatter`; ``sum`` and ``mean`` carry gradients."""
        if op in ("sum", "mean"):
            return await run_async(self.plain, rules.ReduceScatter(op), value, timeout)
        _no_gradient(self.plain, f"reduce_scatter with op={op!r}", (value,))
        return await self.plain.reduce_scatter(value, op, timeout=timeout)

    async def reduce_scatter_dim(
        self, value: Tensor, dim: int, op: str = "sum", *, timeout: float | None = None
    ) -> Tensor:
        """As `AsyncCommunicator.reduce_scatter_dim`; ``sum`` and ``mean`` carry gradients."""
        if op in ("sum", "mean"):
            return await run_async(self.plain, rules.ReduceScatter(op, dim), value, timeout)
        _no_gradient(self.plain, f"reduce_scatter_dim with op={op!r}", (value,))
        return await self.plain.reduce_scatter_dim(value, dim, op, timeout=timeout)

    def channel(self, name: str) -> AsyncDifferentiableCommunicator:
        """As `AsyncCommunicator.channel`."""
        return AsyncDifferentiableCommunicator(self.plain.channel(name))

    async def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> AsyncDifferentiableCommunicator | None:
        """As `AsyncCommunicator.split`."""
        group = await self.plain.split(color, key, timeout=timeout)
        return None if group is None else AsyncDifferentiableCommunicator(group)

    def bounded(self, max_bytes: int) -> AsyncDifferentiableCommunicator:
        """As `AsyncCommunicator.bounded`; backward is bounded too."""
        return AsyncDifferentiableCommunicator(self.plain.bounded(max_bytes))

    async def shrink(self, *, timeout: float | None = None) -> AsyncDifferentiableCommunicator:
        """As `AsyncCommunicator.shrink`."""
        return AsyncDifferentiableCommunicator(await self.plain.shrink(timeout=timeout))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "plain":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        found = getattr(self.plain, name)
        if name not in _NOT_DIFFERENTIABLE:
            return found

        async def call(*args: Any, **options: Any) -> Any:
            _no_gradient(self.plain, name, [*args, *options.values()])
            return await found(*args, **options)

        return call

    def __repr__(self) -> str:
        return f"<differentiable {self.plain!r}>"

    async def __aenter__(self) -> AsyncDifferentiableCommunicator:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.plain.close()


@overload
def differentiable(comm: Communicator | DifferentiableCommunicator) -> DifferentiableCommunicator: ...


@overload
def differentiable(
    comm: AsyncCommunicator | AsyncDifferentiableCommunicator,
) -> AsyncDifferentiableCommunicator: ...


@overload
def differentiable(comm: object) -> Any: ...


def differentiable(comm: object) -> Any:
    """Wrap a communicator so that its calls on floating torch tensors carry gradients.

    A wrapper is returned as it is.

    Raises:
        TypeError: not a communicator of this library.
    """
    if isinstance(comm, (DifferentiableCommunicator, AsyncDifferentiableCommunicator)):
        return comm
    if isinstance(comm, Communicator):
        return DifferentiableCommunicator(comm)
    if isinstance(comm, AsyncCommunicator):
        return AsyncDifferentiableCommunicator(comm)
    raise TypeError(f"not a communicator of ruda_async: {comm!r}")
