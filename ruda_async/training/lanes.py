"""From blocking training code to a communicator's event loop, whichever kind of communicator it is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, NoReturn, ParamSpec, TypeVar

from ..autograd.waiting import BlockedLoopError, Lane, in_thread
from ..collectives.refusal import Refusal
from ..communicator import AsyncCommunicator
from ..errors import CommunicatorClosedError
from ..sync import Communicator

__all__ = ["all_done", "await_here", "channel_of", "close_later", "inner_of", "off_loop", "refused", "submit"]

P = ParamSpec("P")
R = TypeVar("R")


async def off_loop(function: Callable[P, R], *args: P.args, **options: P.kwargs) -> R:
    """Run a blocking function of this package in a thread of its own, and await it.

    For asynchronous programs: ``gradients = await off_loop(GradientSync, model, comm)``,
    ``await off_loop(gradients.backward, loss)``, ``await off_loop(optimizer.step)``. Cancelling it cancels
    backward collectives on all ranks and waits for the thread to end.
    """
    return await in_thread(lambda: function(*args, **options))


def inner_of(comm: Any) -> AsyncCommunicator:
    """The asynchronous communicator below `comm` or its differentiable wrapper.

    Raises:
        TypeError: not a communicator of this library.
    """
    plain = getattr(comm, "plain", comm)
    if isinstance(plain, Communicator):
        return plain._inner
    if isinstance(plain, AsyncCommunicator):
        return plain
    raise TypeError(f"not a communicator of ruda_async: {comm!r}")


def submit(comm: Any, call: Coroutine[Any, Any, R]) -> Future[R]:
    """Start `call` on the communicator's loop, from any thread but that loop's; does not wait.

    Raises:
        BlockedLoopError: this thread runs that loop.
        CommunicatorClosedError: the communicator is closed here.
    """
    plain = getattr(comm, "plain", comm)
    inner = inner_of(plain)
    if isinstance(plain, Communicator):
        plain._check(call)
        plain._loop._check(call)
    elif asyncio._get_running_loop() is inner._node.loop:
        call.close()
        raise BlockedLoopError(
            f"rank {inner.rank} of {inner.world_size}: a blocking call on the event loop of an "
            "AsyncCommunicator would wait for ever; write `await ruda_async.training.off_loop(function, …)`"
        )
    return Lane(plain).start(call)


def await_here(comm: Any, call: Coroutine[Any, Any, R]) -> R:
    """Run `call` on the communicator's loop and wait for its result in this thread.

    Raises:
        BlockedLoopError, CommunicatorClosedError: as `submit`; or what the call raises.
    """
    plain = getattr(comm, "plain", comm)
    if isinstance(plain, Communicator):
        return plain._wait_as_task(call)
    return Lane(plain).wait(submit(plain, call))


async def channel_of(inner: AsyncCommunicator, name: str) -> AsyncCommunicator:
    """`AsyncCommunicator.channel`, on its loop."""
    return inner.channel(name)


def close_later(channels: Iterable[AsyncCommunicator]) -> None:
    """Close channels from wherever the garbage collector runs, without waiting."""
    for channel in channels:
        gone = CommunicatorClosedError(f"the user of channel {channel.name!r} is gone")
        with contextlib.suppress(RuntimeError):  # the loop is closed
            channel._node.loop.call_soon_threadsafe(channel._channel.close, gone)


async def refused(
    comm: AsyncCommunicator, operation: str, error: Exception, calls: int = 1, *, yields: bool = False
) -> NoReturn:
    """Raise `error`, and have the other ranks' next `calls` calls fail at once rather than wait.

    Args:
        yields: not for `error`, where they have failed already.
    """
    for _ in range(calls):
        with contextlib.suppress(Exception):
            await comm._call(Refusal(operation, error, yields=yields), None)
    raise error


async def all_done(*calls: Coroutine[Any, Any, Any]) -> None:
    """Run calls at once; when one fails, the others have ended too before its error is raised."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
