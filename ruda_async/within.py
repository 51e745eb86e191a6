"""Waiting for an awaitable until a deadline, at no cost where it is ready, and without a task."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from time import monotonic
from typing import Any, Generic, TypeVar

__all__ = ["Within"]

T = TypeVar("T")


class Within(Generic[T]):
    """`awaitable`, or `TimeoutError` when `deadline` has passed first.

    `asyncio.timeout` cancels the task that it is in, which a blocking call that is run by hand does not
    have, and sets a timer in any case. Here it is the future waited for that is cancelled, which withdraws
    a send or a receive just as a cancelled task would; and a timer is set only where there is a wait.

    Args:
        awaitable: what to wait for.
        deadline: on the clock of `time.monotonic`.
    """

    __slots__ = ("_awaitable", "_deadline", "_expired", "_waiting")

    def __init__(self, awaitable: Awaitable[T], deadline: float) -> None:
        self._awaitable = awaitable
        self._deadline = deadline
        self._expired = False
        self._waiting: Any = None

    def __await__(self) -> Generator[Any, None, T]:
        inner = self._awaitable.__await__()
        try:
            self._waiting = next(inner)
        except StopIteration as done:
            result: T = done.value
            return result
        loop = asyncio.get_running_loop()
        timer = loop.call_later(max(self._deadline - monotonic(), 0.0), self._expire)
        cancels = _cancels(loop)
        try:
            while True:
                thrown = None
                try:
                    yield self._waiting
                except BaseException as error:
                    thrown = error
                if self._expired and thrown is None and self._waiting is None:  # it gave the loop a turn
                    thrown = asyncio.CancelledError()
                self._waiting = inner.send(None) if thrown is None else inner.throw(thrown)
        except StopIteration as done:
            result = done.value
            return result
        except asyncio.CancelledError:
            if self._expired and _cancels(loop) == cancels:
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()

    def _expire(self) -> None:
        # A future that has its result, or is being cancelled already, is left alone.
        self._expired = self._waiting is None or self._waiting.cancel()


def _cancels(loop: asyncio.AbstractEventLoop) -> int:
    """How often somebody has asked for the cancellation of the task that waits, if it is one yet."""
    task = asyncio.current_task(loop)
    return 0 if task is None else task.cancelling()
