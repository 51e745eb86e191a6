"""Whole backward passes: awaited, and failing on all ranks where one fails.

A backward pass that raises on one rank never comes to the collectives that are left of it, and the others
would wait for it there until their deadline. So the rank walks the graph, and under the name of each run that
it has not begun (see `engine`) makes a call that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..channel import Channel
from ..collectives.refusal import Refusal
from ..errors import CollectiveCancelledError, RudaError, TensorContractError
from ..node import Node
from . import recomputing
from .completion import Reach
from .engine import Call, channel_of_run
from .graph import abandon_in_graph
from .waiting import Lane, in_thread

__all__ = ["abandon_on_error", "backward"]


@contextlib.contextmanager
def abandon_on_error(*tensors: Tensor) -> Iterator[None]:
    """Where the block raises on one rank, the backward of `tensors` fails on all of them at once.

        with autograd.abandon_on_error(loss):
            loss.backward()

    The other ranks get a `TensorContractError` with this rank and its error (of a cancelled task, a
    `CollectiveCancelledError`), out of those backward collectives of the graph that this rank has not begun,
    whether they wait there already or come later.
    Communicators go on to work: zero the gradients and go on with the next step, on all ranks. Every rank
    should have such a block, as `backward` and `training.GradientSync.backward` do.

    Not seen is what a reentrant or compiled checkpoint recomputes, nor calls without a gradient in any.

    Args:
        tensors: what backward is called on in the block, once.
    """
    since = recomputing.moment()
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        _abandon(tensors, since, error)
        raise


def _abandon(tensors: Sequence[Tensor], since: int, error: BaseException) -> None:
    reach = Reach()
    for tensor in tensors:
        for _ in reach.add(tensor.grad_fn):
            pass
    left: dict[Node, list[_Left]] = {}
    for each in _unbegun(reach.nodes, since):
        left.setdefault(each.lane.inner.node, []).append(each)
    cancelled = isinstance(error, CollectiveCancelledError | asyncio.CancelledError)
    kind = RudaError if cancelled else TensorContractError
    text = f"its backward pass failed: {type(error).__name__}: {error}"
    if not (cancelled or isinstance(error, RudaError)):  # else it says itself what to do
        text += "; zero the gradients before the next step"
    for all_left in left.values():
        all_left[0].lane.tell(_refuse(all_left, kind(text)))


class _Left(NamedTuple):
    """The next `calls` calls on a channel of the lane's communicator, which other ranks may wait in."""

    lane: Lane
    channel: str
    calls: int


def _unbegun(nodes: Iterable[Any], since: int) -> Iterator[_Left]:
    """What a pass that began at the moment `since` has left of the calls in `nodes`."""
    again: dict[Channel, tuple[Lane, set[Call]]] = {}
    for node in nodes:
        call = getattr(node, "call", None)
        if isinstance(call, Call):
            for path in call.abandon(since):  # nothing more at the second node of a call
                yield _Left(call.lane, channel_of_run(path), 1)
            if call.lane.in_turn:
                again.setdefault(call.lane.inner._channel, (call.lane, set()))[1].add(call)
        else:
            for comm, path in abandon_in_graph(node, since):
                yield _Left(Lane(comm), channel_of_run(path), 1)
    for lane, calls in again.values():  # a checkpoint may make each of these again
        name = recomputing.abandon(lane.inner, since)
        if name is not None:
            yield _Left(lane, name, len(calls))


async def _refuse(all_left: Iterable[_Left], error: RudaError) -> None:
    """Fail calls for all who wait in them, or will."""
    for lane, name, calls in all_left:
        with contextlib.suppress(RudaError):
            channel = lane.inner.channel(name)
            for _ in range(calls):
                with contextlib.suppress(RudaError):
                    await channel._call(Refusal("backward", error, yields=True), None)
            await channel.close()


async def backward(
    tensors: Tensor | Sequence[Tensor],
    gradients: Tensor | Sequence[Tensor] | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
) -> None:
    """`torch.autograd.backward`, awaitable: for losses whose collectives run on this event loop.

    The pass runs in a thread of its own, and its collectives on the loop, which stays free. Arguments are
    torch's; with ``inputs=`` torch runs only the nodes on a way to them, so give all ranks the same. An error
    ends the pass on all ranks; see `abandon_on_error`.

    Raises:
        RudaError: a backward collective failed, by the types of the forward ones, or another rank's pass.
    """
    roots = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)

    def run() -> None:
        with abandon_on_error(*roots):
            torch.autograd.backward(tensors, gradients, retain_graph, create_graph, inputs=inputs)

    await in_thread(run)
