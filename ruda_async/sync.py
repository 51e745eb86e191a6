"""The blocking twin: the same calls, for code that has never heard of asyncio.

A `Communicator` keeps its event loop in a thread of its own, so it serves any thread: a script's main
thread, executor threads beside a running loop, Jupyter, autograd's threads. Every call has the name,
arguments, results and errors of its asynchronous twin in `ruda_async.communicator`.
"""

from __future__ import annotations

import atexit
import itertools
import os
import weakref
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar

from . import communicator as _async
from .background import BackgroundLoop, Work
from .connecting import connect as _connect
from .errors import CommunicatorClosedError, RudaError
from .interrupts import deferred_interrupt
from .node import Node
from .observe.recorder import Stats
from .operations import AsyncOperations
from .sync_operations import Operations

__all__ = ["Communicator", "Work", "connect"]

T = TypeVar("T")
R = TypeVar("R")

_POINT_TO_POINT = ("send", "recv", "recv_any")

_open: weakref.WeakSet[Communicator] = weakref.WeakSet()
_numbers = itertools.count()
#: Every communicator by its number, by which compiled graphs name it.
numbered: weakref.WeakValueDictionary[int, Communicator] = weakref.WeakValueDictionary()


class Communicator(Operations):
    """A group of ranks that make blocking collective calls together.

    Made by `connect`, and from another communicator by `channel`, `split`, `bounded`, `shrink` and `grow`.
    A context manager. Satisfies every synchronous protocol of `ruda_async.traits`. Threads may call at
    once, each best on a channel of its own, since calls of one channel match by order.

    Attributes:
        rank, world_size: this rank, and the number of ranks.
        start: the same calls without waiting: ``work = comm.start.all_reduce_sum(x)``, then
            ``work.wait(timeout)``. Not ready results keep their inputs: do not change them before.
    """

    _inner: _async.AsyncCommunicator

    def __init__(self, inner: _async.AsyncCommunicator, loop: BackgroundLoop, owner: bool) -> None:
        self._inner = inner
        self._loop = loop
        self._owner = owner
        self._pid = os.getpid()
        self._number = next(_numbers)
        numbered[self._number] = self
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.start = _Starter(self)
        if owner:
            loop.users += 1
            _open.add(self)

    def _wait(self, call: Coroutine[Any, Any, R]) -> R:
        self._check(call)
        return self._loop.run(call, by_hand=True)

    def _wait_as_task(self, call: Coroutine[Any, Any, R]) -> R:
        self._check(call)
        return self._loop.run(call)

    def _check(self, call: Coroutine[Any, Any, Any]) -> None:
        if self._pid != os.getpid():
            call.close()
            raise CommunicatorClosedError(
                f"this communicator was made in process {self._pid} and does not survive a fork; connect "
                "again in the child, or start it with the 'spawn' method"
            )

    # ------------------------------------------------------------------ facts

    @property
    def autodiff_context(self) -> object | None:
        """None: this communicator's results carry no gradient."""
        return None

    @property
    def name(self) -> str:
        """The channel's name, for people."""
        return self._inner.name

    @property
    def timeout(self) -> float:
        """Seconds that a call may take where it is not told otherwise."""
        return self._inner.timeout

    @property
    def closed(self) -> bool:
        """Whether calls are refused since `close` or `abort` was called here."""
        return self._inner.closed

    @property
    def node(self) -> Node:
        """As `AsyncCommunicator.node`."""
        return self._inner.node

    def stats(self) -> Stats:
        """As `AsyncCommunicator.stats`."""
        return self._inner.stats()

    def flight_record(self) -> dict[str, Any]:
        """As `AsyncCommunicator.flight_record`."""
        return self._inner.flight_record()

    def last_failure(self) -> dict[str, Any] | None:
        """As `AsyncCommunicator.last_failure`."""
        return self._inner.last_failure()

    def describe(self) -> dict[str, Any]:
        """As `AsyncCommunicator.describe`."""
        return self._inner.describe()

    def explain(self, operation: str, nbytes: int) -> str:
        """As `AsyncCommunicator.explain`."""
        return self._inner.explain(operation, nbytes)

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """As `AsyncCommunicator.empty`."""
        return self._inner.empty(shape, dtype)

    def __repr__(self) -> str:
        return repr(self._inner).replace("AsyncCommunicator", "Communicator", 1)

    # ------------------------------------------------------------------ point to point

    def send(self, value: Any, dest: int, *, tag: int = 0, timeout: float | None = None) -> None:
        """As `AsyncCommunicator.send`, blocking."""
        self._wait(self._inner.send(value, dest, tag=tag, timeout=timeout))

    def recv(
        self,
        source: int,
        *,
        tag: int = 0,
        like: T | None = None,
        out: T | None = None,
        timeout: float | None = None,
    ) -> T:
        """As `AsyncCommunicator.recv`, blocking."""
        return self._wait(self._inner.recv(source, tag=tag, like=like, out=out, timeout=timeout))

    def recv_any(
        self, *, tag: int = 0, like: T | None = None, out: T | None = None, timeout: float | None = None
    ) -> tuple[T, int]:
        """As `AsyncCommunicator.recv_any`, blocking."""
        return self._wait_as_task(self._inner.recv_any(tag=tag, like=like, out=out, timeout=timeout))

    # ------------------------------------------------------------------ other communicators

    def channel(self, name: str) -> Communicator:
        """As `AsyncCommunicator.channel`."""
        return self._derive(self._wait(_called(self._inner.channel, name)))

    def split(self, color: int | None, key: int = 0, *, timeout: float | None = None) -> Communicator | None:
        """As `AsyncCommunicator.split`, blocking."""
        inner = self._wait(self._inner.split(color, key, timeout=timeout))
        return None if inner is None else self._derive(inner)

    def subgroup(self, ranks: Sequence[int], name: str) -> Communicator:
        """As `AsyncCommunicator.subgroup`."""
        return self._derive(self._wait(_called(self._inner.subgroup, ranks, name)))

    def bounded(self, max_bytes: int) -> Communicator:
        """As `AsyncCommunicator.bounded`."""
        return self._derive(self._inner.bounded(max_bytes))

    def shrink(self, *, timeout: float | None = None) -> Communicator:
        """As `AsyncCommunicator.shrink`, blocking."""
        return self._derive(self._wait_as_task(self._inner.shrink(timeout=timeout)))

    def grow(self, n: int = 1, *, url: str | None = None, timeout: float | None = None) -> Communicator:
        """As `AsyncCommunicator.grow`, blocking."""
        grown = self._wait_as_task(self._inner.grow(n, url=url, timeout=timeout))
        return type(self)(grown, self._loop, owner=True)

    def _derive(self, inner: _async.AsyncCommunicator) -> Communicator:
        return type(self)(inner, self._loop, owner=False)

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """As `AsyncCommunicator.close`, blocking; harmless twice and in a forked child."""
        if self._pid != os.getpid() or self._loop.stopped:
            return
        _open.discard(self)
        try:
            self._loop.run(self._inner.close())
        finally:
            if self._owner:
                self._owner = False
                self._loop.users -= 1
                if not self._loop.users:
                    self._loop.stop()

    def abort(self, reason: str = "abort() was called") -> None:
        """As `AsyncCommunicator.abort`."""
        if self._pid != os.getpid() or self._loop.stopped:
            return
        self._loop.run(_called(self._inner.abort, reason))

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Starter:
    """The calls of a communicator, started and not waited for."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> Callable[..., Work[Any]]:
        if name.startswith("_") or not (hasattr(AsyncOperations, name) or name in _POINT_TO_POINT):
            raise AttributeError(f"there is no call {name!r} to start")
        communicator = self._communicator
        method = getattr(communicator._inner, name)

        def start(*args: Any, **options: Any) -> Work[Any]:
            work: Work[Any] | None = None
            try:
                with deferred_interrupt():  # from when there is a call until there is a handle on it
                    call = method(*args, **options)
                    communicator._check(call)
                    # A small message leaves at once, without a task of its own.
                    work = communicator._loop.start(
                        call,
                        f"rank {communicator.rank}, {name}",
                        by_hand=name == "send",
                        may_not_begin=name in _POINT_TO_POINT,
                    )
            except KeyboardInterrupt:
                if work is not None:
                    work.cancel()  # nobody has the handle
                raise
            return work

        start.__name__ = name
        return start

    def __dir__(self) -> list[str]:
        return sorted([n for n in dir(AsyncOperations) if not n.startswith("_")] + [*_POINT_TO_POINT])


async def _called(function: Callable[..., R], *args: Any) -> R:
    """Run a plain function on the loop's thread."""
    return function(*args)


def connect(
    url: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | None = None,
    join: bool = False,
    **options: Any,
) -> Communicator:
    """Join a job, blocking until all ranks are there; a context manager.

    Arguments and errors are those of `ruda_async.connect`.
    """
    connecting = _connect(url, rank=rank, world_size=world_size, timeout=timeout, join=join, **options)

    async def enter() -> _async.AsyncCommunicator:
        return await connecting

    return opened(enter())


def opened(opening: Coroutine[Any, Any, _async.AsyncCommunicator]) -> Communicator:
    """The blocking twin of the communicator that `opening` makes, on an event loop of its own.

    Raises what `opening` raises.
    """
    loop = BackgroundLoop()
    try:
        return Communicator(loop.run(opening), loop, owner=True)
    except BaseException:
        loop.stop()
        raise


@atexit.register
def _say_goodbye() -> None:
    """A script that ends without close() leaves in an orderly way all the same."""
    for communicator in list(_open):
        try:
            communicator.close()
        except RudaError:
            pass
