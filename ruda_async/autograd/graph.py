"""Collectives as operators of torch, so that they stay in the graphs of `torch.compile`.

Two operators carry all of them: `start` makes a call and `transpose` its backward. What tells one call from
another (the communicator's number, the operation's name, its integers) is constant in the graph. Their fake
kernels say what shape comes out, without communicating; the rows that an all-to-all-v receives are an
unbacked size. Both are declared to have side effects, so that none is dropped.

Beside its result, `start` returns a *ticket*: a mark by which it is known, the communicator's number, that of
the call on its channel, how often its backward was run and at which moment last, and the received counts. The
backward reads it, so its channel has the name that `engine` gives it: ranks that compile and ranks that do
not understand each other. Torch keeps it with the node of one call or of a whole compiled graph, where a pass
that has failed finds what is left of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..errors import CommunicatorClosedError, TensorContractError
from ..sync import Communicator, numbered
from ..traits import VariableTensorExchange
from . import rules
from .compiling import eager
from .engine import numbered_call, on_channel
from .recomputing import moment

__all__ = [
    "abandon_in_graph",
    "in_graph",
    "traced",
    "traced_dim",
    "traced_dims",
    "traced_exchange",
    "traced_op",
    "traced_root",
]

F = TypeVar("F", bound=Callable[..., Any])

_torch_library: Any = torch.library
_library = _torch_library.Library("ruda_async", "DEF")
_library.define(
    "start(Tensor value, int comm, str name, SymInt[] numbers, float? timeout) -> (Tensor, Tensor)"
)
_library.define(
    "transpose(Tensor gradient, Tensor ticket, int comm, str name, SymInt[] numbers, float? timeout, "
    "SymInt[] shape) -> Tensor"
)
#: The first entry of each ticket; other integers that torch keeps do not look like it.
_MARK = 0x5275_6461_7469_636B
#: Where in a ticket is what, and where the received counts begin.
_COMM, _NUMBER, _RUNS, _LATEST, _COUNTS = range(1, 6)


def _rule(name: str, numbers: Sequence[int]) -> rules.Rule:
    """The operation of that name."""
    operation, _, variant = name.partition(".")
    if operation == "all_gather":
        return rules.AllGather(numbers[0]) if numbers else rules.AllGather(name=variant)
    if operation == "reduce_scatter":
        return rules.ReduceScatter(variant, *numbers)
    if operation == "all_reduce":
        return rules.AllReduce(variant)
    if operation == "broadcast":
        return rules.Broadcast(numbers[0], variant)
    if operation == "all_to_all_dim":
        return rules.AllToAll(*numbers)
    return rules.AllToAllV(tuple(numbers), variant)


def _communicator(number: int) -> Communicator:
    comm = numbered.get(number)
    if comm is None:
        raise CommunicatorClosedError("the communicator of this compiled graph is gone; compile again")
    return comm


# ---------------------------------------------------------------------- what runs


def _start(
    value: Tensor, comm: int, name: str, numbers: Sequence[int], timeout: float | None
) -> tuple[Tensor, Tensor]:
    base = _communicator(comm)
    rule = _rule(name, numbers)
    path, result = base._wait(numbered_call(base._inner, rule, value, timeout))
    counts = rule.receive_counts if isinstance(rule, rules.AllToAllV) else ()
    return result, torch.tensor([_MARK, comm, int(path), 0, 0, *counts], dtype=torch.int64, device="cpu")


def _next_run(entries: Any) -> str:
    """The name of the run that begins now, of the call with the ticket `entries`."""
    path = f"{entries[_NUMBER]}.{entries[_RUNS]}"
    entries[_RUNS] += 1
    entries[_LATEST] = moment()
    return path


def _transpose(
    gradient: Tensor,
    ticket: Tensor,
    comm: int,
    name: str,
    numbers: Sequence[int],
    timeout: float | None,
    shape: Sequence[int],
) -> Tensor:
    base = _communicator(comm)
    rule = _rule(name, numbers)
    entries = ticket.numpy()  # so that counting a run is no edit of a saved tensor
    if isinstance(rule, rules.AllToAllV):
        rule.receive_counts = tuple(entries[_COUNTS:].tolist())
    path = _next_run(entries)
    back, value = rule.transposed(gradient, base.world_size)
    return base._wait(on_channel(base._inner, path, back, value, timeout))


_library.impl("start", _start, "CompositeExplicitAutograd")
_library.impl("transpose", _transpose, "CompositeExplicitAutograd")


def abandon_in_graph(node: Any, since: int) -> Iterator[tuple[Communicator, str]]:
    """The calls in `node`, compiled or traced, as `Call.abandon` has them, with their communicators."""
    try:
        # Not unpacked, which would recompute what is in a checkpoint.
        kept = [getattr(saved, "data", None) for saved in getattr(node, "_raw_saved_tensors", ())]
    except RuntimeError:  # freed: it has run
        return
    for ticket in kept:
        if isinstance(ticket, Tensor) and (ticket.dtype, ticket.dim()) == (torch.int64, 1) and ticket.is_cpu:
            entries = ticket.numpy()
            if len(entries) >= _COUNTS and entries[0] == _MARK and entries[_LATEST] <= since:
                path = _next_run(entries)
                comm = numbered.get(int(entries[_COMM]))
                if comm is not None:
                    yield comm, path


# ---------------------------------------------------------------------- what a graph is told


def _announce_effects() -> None:
    """Tell torch that these calls are to be made though nobody uses the result; when first traced."""
    if not _announced:
        _announced.append(True)
        torch.fx.node.has_side_effect(torch.ops.ruda_async.start.default)
        torch.fx.node.has_side_effect(torch.ops.ruda_async.transpose.default)


_announced: list[bool] = []


def _grow(shape: list[Any], dim: int, size: int) -> None:
    if -len(shape) <= dim < len(shape):  # the call itself refuses what is not an axis
        shape[dim] *= size


def _cut(shape: list[Any], dim: int, size: int) -> None:
    if -len(shape) <= dim < len(shape):
        shape[dim] //= size


def _fake_start(
    value: Tensor, comm: int, name: str, numbers: Sequence[int], timeout: float | None
) -> tuple[Tensor, Tensor]:
    _announce_effects()
    size = _communicator(comm).world_size
    shape: list[Any] = list(value.shape)
    operation = name.partition(".")[0]
    length = _COUNTS
    if operation == "all_to_all_v":
        length += size
        if shape:
            shape[0] = _torch_library.get_ctx().new_dynamic_size()
    elif operation == "all_to_all_dim":
        _cut(shape, numbers[0], size)
        _grow(shape, numbers[1], size)
    elif operation == "all_gather":
        _grow(shape, numbers[0] if numbers else 0, size)
    elif operation == "reduce_scatter":
        _cut(shape, numbers[0] if numbers else 0, size)
    return value.new_empty(shape), torch.empty(length, dtype=torch.int64, device="cpu")


def _fake_transpose(
    gradient: Tensor,
    ticket: Tensor,
    comm: int,
    name: str,
    numbers: Sequence[int],
    timeout: float | None,
    shape: Sequence[int],
) -> Tensor:
    _announce_effects()
    return gradient.new_empty(shape)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    value, *ctx.call = inputs
    ctx.shape = value.shape
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    (ticket,) = ctx.saved_tensors
    result = torch.ops.ruda_async.transpose(gradient, ticket, *ctx.call, ctx.shape)
    return (result, *(None,) * len(ctx.call))


_torch_library.register_fake("ruda_async::start", _fake_start, lib=_library)
_torch_library.register_fake("ruda_async::transpose", _fake_transpose, lib=_library)
_torch_library.register_autograd("ruda_async::start", _backward, setup_context=_remember, lib=_library)

# ---------------------------------------------------------------------- what is traced


def stays(comm: Any, value: object) -> bool:
    """Whether a call can stay in the graph that is being traced: no scope records it, and it blocks."""
    base = getattr(comm, "plain", comm)
    return isinstance(value, Tensor) and isinstance(base, Communicator) and not base._inner._channel.recorded


def _call(comm: Any, name: str, numbers: Sequence[int], value: Tensor, timeout: float | None) -> Any:
    base = getattr(comm, "plain", comm)
    return torch.ops.ruda_async.start(value, base._number, name, numbers, timeout)


def traced(name: str) -> Callable[..., Tensor]:
    """The operation of that name, as ``f(comm, value)``."""

    def call(comm: Any, value: Tensor, *, timeout: float | None = None) -> Tensor:
        return cast(Tensor, _call(comm, name, (), value, timeout)[0])

    return call


def traced_dim(name: str) -> Callable[..., Tensor]:
    """As ``f(comm, value, dim)``."""

    def call(comm: Any, value: Tensor, dim: int, *, timeout: float | None = None) -> Tensor:
        return cast(Tensor, _call(comm, name, (dim,), value, timeout)[0])

    return call


def traced_root(name: str) -> Callable[..., Tensor]:
    """As ``f(comm, value, root)``."""

    def call(comm: Any, value: Tensor, root: int, *, timeout: float | None = None) -> Tensor:
        return cast(Tensor, _call(comm, name, (root,), value, timeout)[0])

    return call


def traced_op(comm: Any, value: Tensor, dim: int, op: str = "sum", *, timeout: float | None = None) -> Tensor:
    """`reduce_scatter_dim`."""
    if op not in ("sum", "mean"):
        raise TensorContractError(
            f"reduce_scatter_dim with op={op!r} has no gradient here; use 'sum' or 'mean'"
        )
    return cast(Tensor, _call(comm, f"reduce_scatter.{op}", (dim,), value, timeout)[0])


def traced_dims(
    comm: Any, value: Tensor, split_dim: int, concat_dim: int, *, timeout: float | None = None
) -> Tensor:
    """`all_to_all_dim`."""
    return cast(Tensor, _call(comm, "all_to_all_dim", (split_dim, concat_dim), value, timeout)[0])


def traced_exchange(name: str) -> Callable[..., VariableTensorExchange[Tensor]]:
    """`all_to_all_v`; the counts that come back are unbacked sizes."""

    def call(
        comm: Any, value: Tensor, send_counts: Sequence[int], *, timeout: float | None = None
    ) -> VariableTensorExchange[Tensor]:
        result, ticket = _call(comm, name, tuple(send_counts), value, timeout)
        counts = tuple(ticket[_COUNTS:].tolist())
        check: Any = torch._check
        total = 0
        for count in counts:
            check(count >= 0)
            total = total + count
        check(result.shape[0] == total)
        return VariableTensorExchange(result, counts)

    return call


def in_graph(traced: Callable[..., Any]) -> Callable[[F], F]:
    """Mark a collective function of ``(comm, value, …)`` as one that compiles.

    Args:
        traced: a function of the same arguments, made of operators, that takes its place in a graph where
            `stays` says so. Otherwise the graph breaks at the call and it runs eagerly.
    """

    def decorate(function: F) -> F:
        broken = eager(function)

        @functools.wraps(function)
        def either(comm: Any, value: Any, *args: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() and stays(comm, value):
                return traced(comm, value, *args, **options)
            return broken(comm, value, *args, **options)

        for mark in ("_torchdynamo_disable", "_torchdynamo_disable_msg"):
            either.__dict__.pop(mark, None)  # the other's, which `wraps` copied
        return cast(F, either)

    return decorate
