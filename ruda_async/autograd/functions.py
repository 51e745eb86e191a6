"""Differentiable collectives, blocking. `ruda_async.autograd.aio` has the awaitable twins.

What the functions have in common: `comm` is a `ruda_async.sync.Communicator` or its differentiable
wrapper; `value` is a floating torch tensor (float16, bfloat16, float32 or float64), only read. Where grad
mode is on and `value` requires a gradient, the result does too; otherwise the function is the communicator's
plain call, and integers and numpy arrays pass through it. `timeout` in seconds holds for the call and for
its backward. Gradients have the input's shape, dtype and device.

All ranks must call alike, as for any collective, and all must enter the backward of what one of
them enters. Which ranks need a gradient must not differ, unless a `CollectiveScope` is bound or, for
`all_to_all_v`, ``coordinated=True`` is given. The order of backward nodes may differ from rank to rank.

What they raise in common: what the plain calls raise, in forward directly and in backward through
``loss.backward()``; `TensorContractError` under a `torch.func` transform; `TypeError` for another kind of
communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..communicator import AsyncCommunicator
from ..errors import TensorContractError
from ..sync import Communicator
from ..traits import VariableTensorExchange
from . import rules
from .compiling import eager
from .engine import run
from .graph import in_graph, traced, traced_dim, traced_dims, traced_exchange, traced_op, traced_root
from .recomputing import made_again

__all__ = [
    "all_gather",
    "all_gather_dim",
    "all_reduce_mean",
    "all_reduce_sum",
    "all_to_all_dim",
    "all_to_all_v",
    "broadcast",
    "copy_to",
    "gather_from",
    "reduce_from",
    "reduce_scatter_dim",
    "reduce_scatter_mean",
    "reduce_scatter_sum",
    "scatter_to",
]


def plain(comm: Any) -> Communicator:
    """The communicator itself, without a differentiable wrapper.

    Raises:
        TypeError: it is an asynchronous one, or none of this library's.
    """
    if isinstance(comm, Communicator):
        return comm
    inner = getattr(comm, "plain", None)
    if isinstance(inner, Communicator):
        return inner
    if isinstance(comm, AsyncCommunicator) or isinstance(inner, AsyncCommunicator):
        raise TypeError(
            f"a blocking function was given the asynchronous communicator {inner or comm!r}; await the "
            "function of the same name in the `aio` module, or connect by ruda_async.sync.connect"
        )
    raise TypeError(f"not a communicator of ruda_async: {comm!r}")


def mean_or_sum(op: str, function: str) -> str:
    """`op`, if it has a gradient here.

    Raises:
        TensorContractError
    """
    if op not in ("sum", "mean"):
        raise TensorContractError(
            f"{function} with op={op!r} has no gradient here; use 'sum' or 'mean', or pass value.detach()"
        )
    return op


def tensor_only(value: object, function: str) -> None:
    """Refuse what the tensor-parallel regions cannot take.

    Raises:
        TensorContractError
    """
    if not isinstance(value, Tensor):
        raise TensorContractError(f"{function} takes a torch tensor, not {type(value).__name__}")


@in_graph(traced("all_gather.all_gather"))
def all_gather(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """Concatenate every rank's equal shard ``[n, …]`` into ``[world_size*n, …]``.

    Backward sums the gradients over ranks and scatters them (reduce-scatter).
    """
    return run(plain(comm), rules.AllGather(), value, timeout)


@in_graph(traced_dim("all_gather"))
def all_gather_dim(comm: Any, value: Tensor, dim: int, *, timeout: float | None = None) -> Tensor:
    """`all_gather` along axis `dim`; negative axes count from the end."""
    return run(plain(comm), rules.AllGather(dim), value, timeout)


@in_graph(traced("reduce_scatter.sum"))
def reduce_scatter_sum(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """Sum ``[world_size*n, …]`` over ranks and keep this rank's ``[n, …]``. Backward is an all-gather."""
    return run(plain(comm), rules.ReduceScatter("sum"), value, timeout)


@in_graph(traced("reduce_scatter.mean"))
def reduce_scatter_mean(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """`reduce_scatter_sum` divided by the world size."""
    return run(plain(comm), rules.ReduceScatter("mean"), value, timeout)


@in_graph(traced_op)
def reduce_scatter_dim(
    comm: Any, value: Tensor, dim: int, op: str = "sum", *, timeout: float | None = None
) -> Tensor:
    """Reduce-scatter along axis `dim`, with `op` ``"sum"`` or ``"mean"``."""
    rule = rules.ReduceScatter(mean_or_sum(op, "reduce_scatter_dim"), dim)
    return run(plain(comm), rule, value, timeout)


@in_graph(traced("all_reduce.sum"))
def all_reduce_sum(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """Sum ``[…]`` over ranks, on every rank. Backward is the same sum of the gradients.

    That is the gradient of the sum of all ranks' losses. For one loss that every rank computes alike,
    see `reduce_from`.
    """
    return run(plain(comm), rules.AllReduce("sum"), value, timeout)


@in_graph(traced("all_reduce.mean"))
def all_reduce_mean(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """`all_reduce_sum` divided by the world size, forward and backward."""
    return run(plain(comm), rules.AllReduce("mean"), value, timeout)


@in_graph(traced_root("broadcast.broadcast"))
def broadcast(comm: Any, value: Tensor, root: int, *, timeout: float | None = None) -> Tensor:
    """The root's ``[…]`` on every rank. Backward: the sum of gradients at the root, zeros elsewhere."""
    return run(plain(comm), rules.Broadcast(root), value, timeout)


@in_graph(traced_dims)
def all_to_all_dim(
    comm: Any, value: Tensor, split_dim: int, concat_dim: int, *, timeout: float | None = None
) -> Tensor:
    """Split along `split_dim`, exchange blocks, join along `concat_dim`. Backward swaps the two."""
    return run(plain(comm), rules.AllToAll(split_dim, concat_dim), value, timeout)


def _traced_exchange(
    comm: Any,
    value: Tensor,
    send_counts: Sequence[int],
    *,
    coordinated: bool = False,
    timeout: float | None = None,
) -> VariableTensorExchange[Tensor]:
    if coordinated:
        return _broken_exchange(comm, value, send_counts, timeout=timeout)
    return _exchange_in_graph(comm, value, send_counts, timeout=timeout)


_exchange_in_graph = traced_exchange("all_to_all_v.all_to_all_v")


@eager
def _broken_exchange(
    comm: Any, value: Tensor, send_counts: Sequence[int], *, timeout: float | None = None
) -> VariableTensorExchange[Tensor]:
    return all_to_all_v(comm, value, send_counts, coordinated=True, timeout=timeout)


@in_graph(_traced_exchange)
def all_to_all_v(
    comm: Any,
    value: Tensor,
    send_counts: Sequence[int],
    *,
    coordinated: bool = False,
    timeout: float | None = None,
) -> VariableTensorExchange[Tensor]:
    """Send ``send_counts[r]`` rows of ``[sum(send_counts), …]`` to each rank *r*.

    Backward is the inverse exchange, with the received counts.

    Args:
        coordinated: agree first, in one small collective, whether any rank tracks a gradient; if so, the
            results of all ranks require one, and all must enter backward by ``loss.backward()``.
    """
    base = plain(comm)
    rule = rules.AllToAllV(tuple(send_counts))
    force = False
    if coordinated:
        with made_again(base) as here:
            force = any(here.all_gather_object(wants_gradient(value), timeout=timeout))
    result = run(base, rule, value, timeout, force)
    return VariableTensorExchange(result, rule.receive_counts)


def wants_gradient(value: object) -> bool:
    """Whether this rank's call alone would be part of a graph."""
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


# ---------------------------------------------------------------------- tensor-parallel regions


@eager
def copy_to(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """Enter a tensor-parallel region with a replicated ``[…]``: the value itself; backward sums over ranks.

    Megatron-LM's *f*. For one loss that all ranks compute alike from sharded parameters; the forward sends
    nothing. `timeout` is that of the backward.
    """
    tensor_only(value, "copy_to")
    return run(plain(comm), rules.CopyTo(), value, timeout)


@eager
def reduce_from(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
    """Leave a region with partial sums ``[…]``: their sum over ranks; backward passes the gradient on.

    Megatron-LM's *g*.
    """
    tensor_only(value, "reduce_from")
    return run(plain(comm), rules.ReduceFrom(), value, timeout)


@eager
def scatter_to(comm: Any, value: Tensor, dim: int = -1, *, timeout: float | None = None) -> Tensor:
    """Enter a region with this rank's slice of a replicated ``[…]`` along `dim`; backward gathers.

    Raises:
        TensorContractError: the world size does not divide the axis, or there is no such axis.
    """
    tensor_only(value, "scatter_to")
    return run(plain(comm), rules.ScatterTo(dim), value, timeout)


@eager
def gather_from(comm: Any, value: Tensor, dim: int = -1, *, timeout: float | None = None) -> Tensor:
    """Leave a region with slices: their concatenation along `dim`; backward keeps this rank's slice."""
    tensor_only(value, "gather_from")
    return run(plain(comm), rules.GatherFrom(dim), value, timeout)
