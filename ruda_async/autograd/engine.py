"""How one collective becomes part of torch's graph.

A call makes two nodes: `_Entry` when it starts and `_Exit` when it is done. Backward meets them the other way
round: at `_Exit` the gradient's collective is started, at `_Entry` it is waited for. Torch runs the nodes
of one thread in the exact reverse of the order in which they were made, so a backward pass is its forward
pass in reversed time, and it cannot deadlock where forward did not: a rank that had several calls in flight,
in whatever order, has their gradients in flight too.

Backward runs on a channel of its own, named after the forward call's sequence number, which is the same
on all ranks because calls match by it. A node that is run again (``retain_graph``) takes the next name,
and what a backward adds to the graph (``create_graph``) is named below its own: ``backward 17.0``,
``backward 17.1``, ``backward 17.0/0.0``.

Where calls are never in flight together, those of a blocking communicator outside a scope, one node does the
work of both.

The collective itself runs on plain tensors, blocking or awaited, so both forms share all of this.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..channel import Channel
from ..communicator import AsyncCommunicator
from ..errors import TensorContractError
from ..sync import Communicator
from .recomputing import made_again, moment, recomputes
from .rules import Rule
from .waiting import Lane

if TYPE_CHECKING:
    from .scope import CollectiveScope

__all__ = [
    "Call",
    "begin",
    "channel_of_run",
    "keep",
    "numbered_call",
    "on_channel",
    "run",
    "run_async",
    "run_on",
    "scope_of",
    "tracks",
]

#: The scope that records each channel's differentiable collectives.
scopes: weakref.WeakKeyDictionary[Channel, CollectiveScope] = weakref.WeakKeyDictionary()

#: Numbers of operations that are local forward and communicate backward, by channel.
_regions: weakref.WeakKeyDictionary[Channel, itertools.count[int]] = weakref.WeakKeyDictionary()
_regions_lock = threading.Lock()

#: A leaf that makes a node part of the graph on a rank whose own input needs no gradient.
_anchor = torch.zeros((), requires_grad=True)

_graph_task = torch._C._current_graph_task_id


class Call:
    """One differentiable call, and what its backward needs to know.

    Attributes:
        path: the call's name, the same on all ranks.
        token: a scalar that leads from the exit to the entry in the graph. No user sees it, so nothing
            can be done to it; who depends on it enters the call's backward.
        tracks: whether this rank's own input needs the gradient.
        inert: whether ranks agreed (see `scope`) that no rank needs it.
    """

    __slots__ = (
        "_latest",
        "_like",
        "_runs",
        "_started",
        "_whole",
        "inert",
        "lane",
        "path",
        "rule",
        "scope",
        "timeout",
        "token",
        "tracks",
    )

    def __init__(
        self, lane: Lane, rule: Rule, value: Tensor, timeout: float | None, scope: CollectiveScope | None
    ) -> None:
        self.lane = lane
        self.rule = rule
        self.timeout = timeout
        self.scope = scope
        self.path = ""
        self.inert = False
        self.tracks = value.requires_grad
        self._like: tuple[torch.Size, torch.dtype, torch.device]
        self._runs = 0
        #: The moment at which the latest run was started.
        self._latest = 0
        #: Backward passes that have left the exit and not reached the entry, by the pass's number.
        self._started: dict[int, _Flight] = {}
        self.token: Tensor | None = None
        #: What a single node leads from, or None where there are two.
        self._whole: tuple[Tensor, Tensor | None] | None = None
        ends = value, None if self.tracks else _anchor
        if rule.communicates and scope is None and lane.in_turn:
            self._whole = ends
        else:
            self.token = _tracked(_Entry, *ends, self)

    def finish(self, path: str, result: Tensor) -> Tensor:
        """`result` as the call's output in the graph."""
        self.path = path
        if self._whole is not None:
            ends, self._whole = self._whole, None
            return _tracked(_Whole, *ends, self, [result])
        self._like = (result.shape, result.dtype, result.device)
        output = _tracked(_Exit, self.token, self, [result])
        if self.scope is not None:
            self.scope._record(self)
        else:
            self.token = None
        return output

    def start(self, gradient: Tensor) -> None:
        """Send the output's gradient on its way."""
        flight = _Flight(self, self._path_of_run(), gradient)
        self._count_run()  # not before: what cannot be started on this thread is no run
        flight.began = self._latest
        self._started[_graph_task()] = flight

    def _path_of_run(self) -> str:
        return f"{self.path}.{self._runs}"

    def _count_run(self) -> None:
        self._runs += 1
        self._latest = moment()

    def gradient(self) -> Tensor:
        """The input's gradient, once it is there."""
        task = _graph_task()
        if task not in self._started:  # this rank's loss does not depend on the output
            shape, dtype, device = self._like
            self.start(torch.zeros(shape, dtype=dtype, device=device))
        return self._started.pop(task).land()

    def abandon(self, since: int) -> list[str]:
        """The pass that began at the moment `since` has failed here: have it count as a run all the same.

        Ranks count runs alike only if each does so, whether the failed pass had come to this call or not.

        Returns:
            the runs that other ranks may wait in, and that this one has not begun and never will.
        """
        if self._latest <= since:
            path = self._path_of_run()
            self._count_run()
            return [path] if self.rule.communicates_back and not self.inert else []
        tasks = [task for task, flight in self._started.items() if flight.began > since]
        flights = [self._started.pop(task) for task in tasks]
        # What is not in turn is under way, whoever waits for it.
        return [flight.path for flight in flights if flight.communicates and self.lane.in_turn]


def _tracked(function: Any, *args: Any) -> Tensor:
    """Apply `function` with grad mode on: another rank may track, and this one have agreed to, without."""
    if torch.is_grad_enabled():
        return function.apply(*args)  # type: ignore[no-any-return]
    with torch.enable_grad():
        return function.apply(*args)  # type: ignore[no-any-return]


class _Flight:
    """The backward collective of one call, in one backward pass."""

    __slots__ = ("_call", "_next", "_result", "_value", "_wait", "began", "communicates", "path")

    def __init__(self, call: Call, path: str, gradient: Tensor) -> None:
        inner = call.lane.inner
        rule, value = call.rule.transposed(gradient, inner.world_size)
        self._call = call
        self.path = path
        #: The moment.
        self.began = 0
        self.communicates = rule.communicates
        #: Held, lest torch take its memory for a leaf's gradient and add to it while it is being sent.
        self._value = (gradient, value)
        # With create_graph the others may differentiate this again even where our gradient is a
        # constant, so the nodes are made in any case.
        self._next: Call | None = None
        if torch.is_grad_enabled():
            self._next = Call(call.lane, rule, value, call.timeout, call.scope)
        self._wait: Callable[[], Tensor] | None = None
        if rule.communicates:
            plain = value.detach()
            self._wait = call.lane.begin(lambda: on_channel(inner, path, rule, plain, call.timeout))
        else:
            self._result = rule.local(value.detach(), inner.rank, inner.world_size)

    def land(self) -> Tensor:
        if self._wait is not None:
            self._result = self._wait()
        return self._result if self._next is None else self._next.finish(f"{self.path}/0", self._result)


def channel_of_run(path: str) -> str:
    """The name of the channel of a run of a backward, which has one call."""
    return f"backward {path}"


async def on_channel(
    comm: AsyncCommunicator, path: str, rule: Rule, value: Tensor, timeout: float | None
) -> Tensor:
    """Run a backward collective on the channel of its name."""
    channel = comm.channel(channel_of_run(path))
    try:
        return await rule.run(channel, value, timeout)
    finally:
        await channel.close()


class _Entry(torch.autograd.Function):
    """From a call's input to its token."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor | None, call: Call) -> Tensor:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return value.new_empty(())  # on the input's device, so that torch runs both nodes on one stream

    @staticmethod
    def backward(ctx: Any, nothing: None) -> tuple[Tensor | None, None, None]:
        call: Call = ctx.call
        return (None if call.inert else call.gradient()), None, None


def _fresh(result: Tensor) -> Tensor:
    """Fresh memory, even where an operation made it a view (of its own buffer): editing it is harmless."""
    return result.data if result._is_view() else result


class _Exit(torch.autograd.Function):
    """From a call's token to its output, which was computed already."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, call: Call, box: list[Tensor]) -> Tensor:
        ctx.call = call
        result = box.pop()
        return _fresh(result) if call.rule.communicates else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        call: Call = ctx.call
        if not call.inert:
            call.start(gradient)
        return None, None, None  # torch goes on to the entry all the same


class _Whole(torch.autograd.Function):
    """From a call's input to its output, which was computed already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor | None, call: Call, box: list[Tensor]) -> Tensor:
        ctx.call = call
        return _fresh(box.pop())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        call: Call = ctx.call
        call.start(gradient)
        return call.gradient(), None, None, None


class _Keep(torch.autograd.Function):
    """The first input, with the nodes of the others kept in its graph."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *others: Tensor) -> Tensor:
        ctx.others = len(others)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Torch runs the nodes of a gradient that is None too. So nothing is ever multiplied by 0, which would
        # turn a NaN or an infinity into a NaN.
        return (gradient, *(None,) * ctx.others)


def keep(value: Tensor, *others: Tensor) -> Tensor:
    """`value`, to the bit, whose backward also enters the nodes of `others`, and adds nothing there."""
    kept: Tensor = _Keep.apply(value, *others)  # type: ignore[no-untyped-call]
    return kept


# ---------------------------------------------------------------------- forward


def scope_of(comm: AsyncCommunicator) -> CollectiveScope | None:
    """The scope bound to this communicator's channel."""
    return scopes.get(comm._channel) if scopes else None


def _refuse_transforms(value: object) -> None:
    if isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise TensorContractError(
            "collectives do not run under torch.func transforms (vmap, grad, vjp, jvp): a transform's tensor "
            "has no memory to send; call loss.backward() or torch.autograd.grad, and move vmap inside, "
            "around the computation between collectives"
        )


def tracks(comm: AsyncCommunicator, value: object, force: bool = False) -> bool:
    """Whether a call on `value` makes a node."""
    _refuse_transforms(value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    if force:
        return True
    return torch.is_grad_enabled() and (value.requires_grad or scope_of(comm) is not None)


def begin(comm: Communicator | AsyncCommunicator, rule: Rule, value: Tensor, timeout: float | None) -> Call:
    """The node of a call that starts now; what it gives is no part of the graph before `Call.finish`."""
    lane = Lane(comm)
    scope = scope_of(lane.inner)
    # The nodes of a checkpoint's recomputation are thrown away.
    return Call(lane, rule, value, timeout, None if recomputes() else scope)


async def numbered_call(
    comm: AsyncCommunicator, rule: Rule, value: Tensor, timeout: float | None
) -> tuple[str, Tensor]:
    """Run a forward collective; its path and its result."""
    number = comm._channel.next  # what the call, which starts before the next await, will take
    return str(number), await rule.run(comm, value.detach(), timeout)


def _region(comm: AsyncCommunicator) -> str:
    with _regions_lock:
        counter = _regions.setdefault(comm._channel, itertools.count())
        return f"region {next(counter)}"


def run(comm: Communicator, rule: Rule, value: Tensor, timeout: float | None, force: bool = False) -> Tensor:
    """Make the call, blocking; its result is part of the graph where `tracks` says so."""
    tracked = tracks(comm._inner, value, force)
    if not recomputes():
        return run_on(comm, rule, value, timeout, tracked)
    with made_again(comm) as twin:
        return run_on(twin, rule, value, timeout, tracked)


def run_on(comm: Communicator, rule: Rule, value: Tensor, timeout: float | None, tracked: bool) -> Tensor:
    """As `run`, on this channel in any case."""
    inner = comm._inner
    if not tracked:
        if rule.communicates:
            return comm._wait(rule.run(inner, value, timeout))
        return rule.local(value, inner.rank, inner.world_size)
    call = begin(comm, rule, value, timeout)
    if rule.communicates:
        return call.finish(*comm._wait(numbered_call(inner, rule, value, timeout)))
    return call.finish(_region(inner), rule.local(value.detach(), inner.rank, inner.world_size))


async def run_async(
    comm: AsyncCommunicator, rule: Rule, value: Tensor, timeout: float | None, force: bool = False
) -> Tensor:
    """As `run`, awaited."""
    if not tracks(comm, value, force):
        return await rule.run(comm, value, timeout)
    call = begin(comm, rule, value, timeout)
    if rule.communicates:
        return call.finish(*await numbered_call(comm, rule, value, timeout))
    return call.finish(_region(comm), rule.local(value.detach(), comm.rank, comm.world_size))
