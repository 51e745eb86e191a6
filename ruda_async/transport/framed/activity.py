"""What the links on one event loop have in common: frames that wait for company, and who is writing."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from .sender import Sender

__all__ = ["Activity", "Looking", "Spin", "Withdrawable", "activity_of", "blocking"]


T = TypeVar("T")


class _Blocking(threading.local):
    """Whether the code that runs now may block its thread, and for how long.

    Code that runs on an event loop may not, so `seconds` is 0. A blocking call that runs its operation by
    hand sets it: that thread has nothing better to do than to wait for the very bytes it needs.

    Attributes:
        seconds: to wait for nothing, at most.
        until: when (`time.monotonic`) the loop has to turn for others, though bytes still come.
    """

    seconds = 0.0
    until = 0.0


blocking = _Blocking()


class Spin(NamedTuple):
    """Seconds that a waiting rank looks for bytes before it sleeps: on its loop, and in a blocking call.

    Looking on a core that the peer needs makes both late. Where it does not, a sleep costs both ranks more
    than the answer to a small message takes: one for waking, the other for being woken. An event loop has
    other work; a thread that may block has none.
    """

    on_loop: float
    blocking: float

    @classmethod
    def of(cls, asked: float, ranks: int) -> Spin:
        """Those asked for, or with -1 what suits so many ranks on this host."""
        if asked >= 0:
            return cls(asked, asked)
        try:
            cores = len(os.sched_getaffinity(0))
        except AttributeError:  # not on every system
            cores = os.cpu_count() or 1
        return cls(20e-6, 100e-6) if ranks <= cores else cls(0.0, 0.0)

    def now(self) -> float:
        """Those for the code that runs now."""
        return self.blocking if blocking.seconds else self.on_loop


class Looking(Generic[T]):
    """A message that waits for its peer; awaiting it looks at the stream first, which may save a turn of
    the loop."""

    __slots__ = ("_future", "_look")

    def __init__(self, future: asyncio.Future[T], look: Callable[[asyncio.Future[Any]], None]) -> None:
        self._future = future
        self._look = look

    @classmethod
    def unless_ready(cls, waiting: Awaitable[T], look: Callable[[asyncio.Future[Any]], None]) -> Awaitable[T]:
        """What `Inbox.probe` gave: itself where nothing is waited for."""
        return cls(waiting, look) if isinstance(waiting, asyncio.Future) else waiting

    def __await__(self) -> Generator[Any, None, T]:
        future = self._future
        if not future.done():
            self._look(future)
        return (yield from future)


class Withdrawable(Looking[T]):
    """A receive that, once withdrawn, says so before its caller goes on and may change the memory.

    A callback of the future would come too late: it runs behind the caller's own step.
    """

    __slots__ = ("_on_withdrawn",)

    def __init__(
        self,
        future: asyncio.Future[T],
        look: Callable[[asyncio.Future[Any]], None],
        on_withdrawn: Callable[[asyncio.Future[Any]], None],
    ) -> None:
        super().__init__(future, look)
        self._on_withdrawn = on_withdrawn

    def __await__(self) -> Generator[Any, None, T]:
        future = self._future
        if not future.done():
            self._look(future)
        try:
            return (yield from future)
        except asyncio.CancelledError:
            if future.cancelled():
                self._on_withdrawn(future)
            raise


class Activity:
    """Shared by the senders of all transports on one event loop: a rank may have several; see `activity_of`.

    Attributes:
        writers: the senders whose stream is full; the loop has to turn for them.
    """

    __slots__ = ("_waiting", "writers")

    def __init__(self) -> None:
        self._waiting: list[Sender] = []
        self.writers = 0

    def wait_for_company(self, sender: Sender) -> None:
        """`sender` has frames that may leave with the next message; at the latest when the loop turns."""
        if not self._waiting:
            sender.loop.call_soon(self.push)
        self._waiting.append(sender)

    def push(self) -> None:
        """Write what waits: the loop has turned, or somebody is about to wait for the answer."""
        while self._waiting:
            self._waiting.pop().push()


#: An activity does not hold on to its loop, or neither would ever go.
_activities: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Activity] = weakref.WeakKeyDictionary()


def activity_of(loop: asyncio.AbstractEventLoop) -> Activity:
    """The one activity of `loop`."""
    activity = _activities.get(loop)
    if activity is None:
        activity = _activities[loop] = Activity()
    return activity
