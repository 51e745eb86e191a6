"""Differentiable collectives to await, over an `AsyncCommunicator` or its differentiable wrapper.

Names, arguments, results, gradients and errors are those of `ruda_async.autograd.functions`; a test holds
the two files' signatures against each other. The loss's backward must not run on the event loop's
thread: ``await ruda_async.autograd.backward(loss)``.

Torch's grad mode belongs to the thread, not to the task: ``with torch.no_grad():`` around an ``await``
switches it for every task of the loop, and leaves it switched where two such blocks overlap. A call looks at
it when it starts; hold `torch.no_grad` around what runs without awaiting, or around the whole program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..communicator import AsyncCommunicator
from ..sync import Communicator
from ..traits import VariableTensorExchange
from . import rules
from .engine import run_async
from .functions import mean_or_sum, tensor_only, wants_gradient
from .passes import backward
from .scope import complete_scopes_async as complete_scopes

__all__ = [
    "all_gather",
    "all_gather_dim",
    "all_reduce_mean",
    "all_reduce_sum",
    "all_to_all_dim",
    "all_to_all_v",
    "backward",
    "broadcast",
    "complete_scopes",
    "copy_to",
    "gather_from",
    "reduce_from",
    "reduce_scatter_dim",
    "reduce_scatter_mean",
    "reduce_scatter_sum",
    "scatter_to",
]


def plain(comm: Any) -> AsyncCommunicator:
    """The communicator itself, without a differentiable wrapper.

    Raises:
        TypeError: it is a blocking one, or none of this library's.
    """
    if isinstance(comm, AsyncCommunicator):
        return comm
    inner = getattr(comm, "plain", None)
    if isinstance(inner, AsyncCommunicator):
        return inner
    if isinstance(comm, Communicator) or isinstance(inner, Communicator):
        raise TypeError(
            f"a coroutine was given the blocking communicator {inner or comm!r}; call the function of the "
            "same name outside the `aio` module, or connect by `await ruda_async.connect`"
        )
    raise TypeError(f"not a communicator of ruda_async: {comm!r}")


async def all_gather(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """As `functions.all_gather`."""
    return await run_async(plain(comm), rules.AllGather(), value, timeout)


async def all_gather_dim(comm: Any, value: Tensor, dim: int, *, timeout: float | None = None) -> Tensor:
    """As `functions.all_gather_dim`."""
    return await run_async(plain(comm), rules.AllGather(dim), value, timeout)


async def reduce_scatter_sum(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """As `functions.reduce_scatter_sum`."""
    return await run_async(plain(comm), rules.ReduceScatter("sum"), value, timeout)


async def reduce_scatter_mean(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """As `functions.reduce_scatter_mean`."""
    return await run_async(plain(comm), rules.ReduceScatter("mean"), value, timeout)


async def reduce_scatter_dim(
    comm: Any, value: Tensor, dim: int, op: str = "sum", *, timeout: float | None = None
) -> Tensor:
    """As `functions.reduce_scatter_dim`."""
    rule = rules.ReduceScatter(mean_or_sum(op, "reduce_scatter_dim"), dim)
    return await run_async(plain(comm), rule, value, timeout)


async def all_reduce_sum(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """As `functions.all_reduce_sum`."""
    return await run_async(plain(comm), rules.AllReduce("sum"), value, timeout)


async def all_reduce_mean(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """As `functions.all_reduce_mean`."""
    return await run_async(plain(comm), rules.AllReduce("mean"), value, timeout)


async def broadcast(comm: Any, value: Tensor, root: int, *, timeout: float | None = None) -> Tensor:
    """As `functions.broadcast`."""
    return await run_async(plain(comm), rules.Broadcast(root), value, timeout)


async def all_to_all_dim(
    comm: Any, value: Tensor, split_dim: int, concat_dim: int, *, timeout: float | None = None
) -> Tensor:
    """As `functions.all_to_all_dim`."""
    return await run_async(plain(comm), rules.AllToAll(split_dim, concat_dim), value, timeout)


async def all_to_all_v(
    comm: Any,
    value: Tensor,
    send_counts: Sequence[int],
    *,
    coordinated: bool = False,
    timeout: float | None = None,
) -> VariableTensorExchange[Tensor]:
    """As `functions.all_to_all_v`."""
    base = plain(comm)
    rule = rules.AllToAllV(tuple(send_counts))
    force = coordinated and any(await base.all_gather_object(wants_gradient(value), timeout=timeout))
    result = await run_async(base, rule, value, timeout, force)
    return VariableTensorExchange(result, rule.receive_counts)


async def copy_to(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """As `functions.copy_to`."""
    tensor_only(value, "copy_to")
    return await run_async(plain(comm), rules.CopyTo(), value, timeout)


async def reduce_from(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """As `functions.reduce_from`."""
    tensor_only(value, "reduce_from")
    return await run_async(plain(comm), rules.ReduceFrom(), value, timeout)


async def scatter_to(comm: Any, value: Tensor, dim: int = -1, *, timeout: float | None = None) -> Tensor:
    """As `functions.scatter_to`."""
    tensor_only(value, "scatter_to")
    return await run_async(plain(comm), rules.ScatterTo(dim), value, timeout)


async def gather_from(comm: Any, value: Tensor, dim: int = -1, *, timeout: float | None = None) -> Tensor:
    """As `functions.gather_from`."""
    tensor_only(value, "gather_from")
    return await run_async(plain(comm), rules.GatherFrom(dim), value, timeout)
