"""Calls handed over to an event loop: by a thread that does not run it, or begun by hand."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import types
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["Handed", "hand_over", "rest_of"]

R = TypeVar("R")


class Handed(concurrent.futures.Future[R]):
    """A call that was handed over. Once it has begun, `cancel` asks its task, which may just have ended well.

    `asyncio.run_coroutine_threadsafe` takes a call for over when its future is cancelled; its task may even
    begin after that, and what it receives then is lost.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._task: asyncio.Task[R] | None = None
        self._beginning = threading.RLock()

    def cancel(self) -> bool:
        """Ask for its end; False where it is over."""
        with self._beginning:
            if self._task is None:
                return super().cancel()
        if self.done():
            return False
        with suppress(RuntimeError):  # the loop is closed, and the task with it
            self._loop.call_soon_threadsafe(self._task.cancel)
        return True

    def begin(self, call: Coroutine[Any, Any, R], ended: Callable[[], None], may_not_begin: bool) -> None:
        """Make `call` a task; on the loop's thread."""
        task = self._loop.create_task(call)
        with self._beginning:
            self._task = task
            cancelled = self.cancelled()
        if cancelled:
            if may_not_begin:
                task.cancel()
            else:
                self._loop.call_soon(task.cancel)  # after its first step
        task.add_done_callback(self._settle)
        task.add_done_callback(lambda _: ended())

    def _settle(self, task: asyncio.Task[R]) -> None:
        if task.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
        elif not self.set_running_or_notify_cancel():
            task.exception()  # nobody wants to know
        elif (error := task.exception()) is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


def hand_over(
    call: Coroutine[Any, Any, R],
    loop: asyncio.AbstractEventLoop,
    ended: Callable[[], None],
    *,
    may_not_begin: bool = False,
) -> Handed[R]:
    """Run `call` as a task of `loop`; from any thread.

    Args:
        call: what to run.
        loop: where; it need not run yet.
        ended: called on the loop's thread when the call is over there.
        may_not_begin: where it is cancelled in time it need not begin. A collective has to: only a call that
            has taken its number is cancelled on the other ranks too.

    Raises:
        RuntimeError: the loop is closed.
    """
    future = Handed[R](loop)
    loop.call_soon_threadsafe(future.begin, call, ended, may_not_begin)
    return future


@types.coroutine
def _awaiting(call: Coroutine[Any, Any, R], first: Any) -> Generator[Any, Any, R]:
    """Go on with a coroutine that was started by hand and waits for `first`."""
    step: Callable[[Any], Any]
    argument: Any
    while True:
        try:
            sent = yield first
        except GeneratorExit:
            call.close()
            raise
        except BaseException as error:
            step = call.throw
            argument = error
        else:
            step, argument = call.send, sent
        try:
            first = step(argument)
        except StopIteration as done:
            result: R = done.value
            return result


async def rest_of(call: Coroutine[Any, Any, R], first: Any) -> R:
    """What is left of a call that was run by hand until it waited for `first`; for a task."""
    return await _awaiting(call, first)
