"""How one collective becomes one node of torch's graph.

The collective runs first, on plain tensors, blocking or awaited; its result is then given a `grad_fn` by a
`torch.autograd.Function` that computes nothing. So the synchronous and the asynchronous forms share all
of this, and without gradients neither pays for it.

Backward runs on a channel of its own, named after the forward call's sequence number, which is the same
on all ranks because calls match by it; ranks may therefore reach backward nodes in any order. A node
that is run again (``retain_graph``) takes the next name, and what a backward adds to the graph
(``create_graph``) is named below its own: ``backward 17.0``, ``backward 17.1``, ``backward 17.0/0.0``.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..channel import Channel
from ..communicator import AsyncCommunicator
from ..errors import TensorContractError
from ..sync import Communicator
from .rules import Rule
from .waiting import waiter

if TYPE_CHECKING:
    from .scope import CollectiveScope

__all__ = ["Ticket", "attach", "keep", "run", "run_async", "scope_of", "tracks"]

#: The scope that records each channel's differentiable collectives.
scopes: weakref.WeakKeyDictionary[Channel, CollectiveScope] = weakref.WeakKeyDictionary()

#: Numbers of operations that are local forward and communicate backward, by channel.
_regions: weakref.WeakKeyDictionary[Channel, itertools.count[int]] = weakref.WeakKeyDictionary()
_regions_lock = threading.Lock()

#: A leaf that makes a node part of the graph on a rank whose own input needs no gradient.
_anchor = torch.zeros((), requires_grad=True)

Wait = Callable[[Coroutine[Any, Any, Any]], Any]


class Ticket:
    """What a backward node needs to know.

    Attributes:
        comm: the communicator of the forward call.
        wait: runs a coroutine of `comm` from autograd's thread.
        path: the node's name, the same on all ranks.
        inert: whether ranks agreed (see `scope`) that no rank needs this node's gradient.
        tracks: whether this rank's own input needs the gradient.
    """

    __slots__ = ("comm", "inert", "path", "rule", "runs", "scope", "timeout", "tracks", "wait")

    def __init__(
        self,
        comm: AsyncCommunicator,
        wait: Wait,
        path: str,
        rule: Rule,
        timeout: float | None,
        scope: CollectiveScope | None,
    ) -> None:
        self.comm = comm
        self.wait = wait
        self.path = path
        self.rule = rule
        self.timeout = timeout
        self.scope = scope
        self.inert = False
        self.tracks = True
        self.runs = 0

    def backward(self, gradient: Tensor) -> Tensor | None:
        """Carry the output's gradient to the input, together with all ranks."""
        if self.inert:
            return None
        path = f"{self.path}.{self.runs}"
        self.runs += 1

        def step(rule: Rule, gradient: Tensor) -> Tensor:
            comm = self.comm
            if rule.communicates:
                result: Tensor = self.wait(_on_channel(comm, path, rule, gradient.detach(), self.timeout))
            else:
                result = rule.local(gradient.detach(), comm.rank, comm.world_size)
            if not torch.is_grad_enabled():
                return result
            # With create_graph the others may differentiate this again even where our gradient is
            # a constant, so the node is made in any case.
            ticket = Ticket(comm, self.wait, f"{path}/0", rule, self.timeout, self.scope)
            return attach(gradient, result, ticket, record=self.scope is not None)

        return self.rule.backward(step, gradient, self.comm.world_size)


async def _on_channel(
    comm: AsyncCommunicator, path: str, rule: Rule, value: Tensor, timeout: float | None
) -> Tensor:
    channel = comm.channel(f"backward {path}")
    try:
        return await rule.run(channel, value, timeout)
    finally:
        await channel.close()


class CollectiveBackward(torch.autograd.Function):
    """Gives a finished collective's result its node; see the module's text."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, value: Tensor, anchor: Tensor | None, ticket: Ticket, result: list[Tensor], tied: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.ticket = ticket
        # A list, because an input that is returned as it is would count as a view of itself.
        return (result.pop(), torch.zeros(())) if tied else result.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        return ctx.ticket.backward(gradients[0]), None, None, None, None


class Keep(torch.autograd.Function):
    """The first input, with the nodes of the others kept in its graph: they get a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:  # type: ignore[override]
        ctx.others = len(others)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        # Torch still runs a node whose gradient is None, and makes zeros of it there. So nothing is
        # ever multiplied by 0, which would turn a NaN or an infinity into a NaN.
        return (gradient, *(None,) * ctx.others)


def keep(value: Tensor, *others: Tensor) -> Tensor:
    """`value`, to the bit, whose backward also enters the nodes of `others`, with zeros."""
    kept: Tensor = Keep.apply(value, *others)  # type: ignore[no-untyped-call]
    return kept


def attach(value: Tensor, result: Tensor, ticket: Ticket, *, record: bool) -> Tensor:
    """`result` as a function of `value` in the graph, whether `value` needs a gradient or not."""
    ticket.tracks = value.requires_grad
    anchor = None if ticket.tracks else _anchor
    node: Any = CollectiveBackward.apply(value, anchor, ticket, [result], record)  # type: ignore[no-untyped-call]
    if not record:
        return node  # type: ignore[no-any-return]
    output, tie = node
    assert ticket.scope is not None
    ticket.scope._record(ticket, tie)
    return output  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- forward


def scope_of(comm: AsyncCommunicator) -> CollectiveScope | None:
    """The scope bound to this communicator's channel."""
    return scopes.get(comm._channel) if scopes else None


def _refuse_transforms(value: object) -> None:
    if isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise TensorContractError(
            "collectives do not run under torch.func transforms (vmap, grad, vjp, jvp): a transform's tensor has "
            "no memory to send; call loss.backward() or torch.autograd.grad, and move vmap inside, around "
            "the computation between collectives"
        )


def tracks(comm: AsyncCommunicator, value: object, force: bool = False) -> bool:
    """Whether a call on `value` makes a node."""
    _refuse_transforms(value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    if force:
        return True
    return torch.is_grad_enabled() and (value.requires_grad or scope_of(comm) is not None)


def _finish(
    comm: AsyncCommunicator, wait: Wait, path: str, rule: Rule, timeout: float | None, value: Tensor, result: Tensor
) -> Tensor:
    scope = scope_of(comm)
    # Forward calls during a backward pass are a checkpoint's recomputation: their nodes are thrown away.
    record = scope is not None and torch._C._current_graph_task_id() == -1
    ticket = Ticket(comm, wait, path, rule, timeout, scope if record else None)
    if torch.is_grad_enabled():
        return attach(value, result, ticket, record=record)
    with torch.enable_grad():  # another rank tracks, and this one agreed to
        return attach(value, result, ticket, record=record)


async def _numbered(
    comm: AsyncCommunicator, rule: Rule, value: Tensor, timeout: float | None
) -> tuple[str, Tensor]:
    number = comm._channel.next  # what the call, which starts before the next await, will take
    return str(number), await rule.run(comm, value.detach(), timeout)


def _region(comm: AsyncCommunicator) -> str:
    with _regions_lock:
        counter = _regions.setdefault(comm._channel, itertools.count())
        return f"region {next(counter)}"


def run(comm: Communicator, rule: Rule, value: Tensor, timeout: float | None, force: bool = False) -> Tensor:
    """Make the call, blocking; its result is part of the graph where `tracks` says so."""
    inner = comm._inner
    if not tracks(inner, value, force):
        if rule.communicates:
            return comm._wait(rule.run(inner, value, timeout))
        return rule.local(value, inner.rank, inner.world_size)
    if rule.communicates:
        path, result = comm._wait(_numbered(inner, rule, value, timeout))
    else:
        path, result = _region(inner), rule.local(value.detach(), inner.rank, inner.world_size)
    return _finish(inner, comm._wait, path, rule, timeout, value, result)


async def run_async(
    comm: AsyncCommunicator, rule: Rule, value: Tensor, timeout: float | None, force: bool = False
) -> Tensor:
    """As `run`, awaited."""
    if not tracks(comm, value, force):
        return await rule.run(comm, value, timeout)
    if rule.communicates:
        path, result = await _numbered(comm, rule, value, timeout)
    else:
        path, result = _region(comm), rule.local(value.detach(), comm.rank, comm.world_size)
    return _finish(comm, waiter(comm), path, rule, timeout, value, result)
