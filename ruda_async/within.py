"""Waiting for an awaitable until a deadline, at no cost where it is ready, and without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Party", "Within"]

T = TypeVar("T")


class Party(Protocol):
    """Who wants to know of waits."""

    def waits(self, wait: Within[Any]) -> None:
        """It begins; may be ended at once."""
        ...

    def waits_no_more(self, wait: Within[Any]) -> None:
        """It is over."""
        ...


class Within(Generic[T]):
    """`awaitable`, or `TimeoutError` when `deadline` has passed first.

    `asyncio.timeout` cancels the task that it is in, which a blocking call that is run by hand does not
    have, and sets a timer in any case. Here it is the future waited for that is cancelled, which withdraws
    a send or a receive just as a cancelled task would; and a timer is set only where there is a wait.

    Args:
        awaitable: what to wait for.
        deadline: on the clock of `time.monotonic`.
        party: who is told where there is a wait, and may `end` it.

    Attributes:
        waited: it was not ready.
        came: it ended well, also where the task was cancelled before it could go on with that.
    """

    __slots__ = ("_awaitable", "_deadline", "_error", "_party", "_waiting", "came", "waited")

    def __init__(self, awaitable: Awaitable[T], deadline: float, party: Party | None = None) -> None:
        self._awaitable = awaitable
        self._deadline = deadline
        self._party = party
        self._error: Exception | None = None
        self._waiting: Any = None
        self.waited = self.came = False

    def __await__(self) -> Generator[Any, None, T]:
        inner = self._awaitable.__await__()
        try:
            self._waiting = next(inner)
        except StopIteration as done:
            self.came = True
            result: T = done.value
            return result
        self.waited = True
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(self._deadline - monotonic(), 0.0), self.end, TimeoutError())
        cancels = _cancels(loop)
        party = self._party
        if party is not None:
            party.waits(self)
        try:
            while True:
                thrown = None
                try:
                    yield self._waiting
                except BaseException as error:
                    thrown = error
                if self._error is not None and thrown is None and self._waiting is None:  # between two turns
                    thrown = asyncio.CancelledError()
                elif isinstance(thrown, asyncio.CancelledError) and _is_done(self._waiting):
                    self._go_on(inner, thrown)
                self._waiting = inner.send(None) if thrown is None else inner.throw(thrown)
        except StopIteration as done:
            self.came = True
            result = done.value
            return result
        except asyncio.CancelledError:
            if self._error is not None and _cancels(loop) == cancels:
                raise self._error from None
            raise
        finally:
            timer.cancel()
            if party is not None:
                party.waits_no_more(self)

    def _go_on(self, inner: Generator[Any, None, T], cancelled: BaseException) -> None:
        """The task was cancelled when what it waited for had come: see how that ends, if it does at once."""
        try:
            self._waiting = inner.send(None)
        except StopIteration:
            self.came = True
            raise cancelled from None
        except Exception:
            raise cancelled from None

    def end(self, error: Exception) -> None:
        """End the wait with `error`, unless it has its result or is being cancelled already."""
        if self._waiting is None or self._waiting.cancel():
            self._error = error


def _is_done(waiting: Any) -> bool:
    return isinstance(waiting, asyncio.Future) and waiting.done() and not waiting.cancelled()


def _cancels(loop: asyncio.AbstractEventLoop) -> int:
    """How often somebody has asked for the cancellation of the task that waits, if it is one yet."""
    task = asyncio.current_task(loop)
    return 0 if task is None else task.cancelling()
