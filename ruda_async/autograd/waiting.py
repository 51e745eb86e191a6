"""Where autograd's threads meet the event loop.

Torch calls backward on whatever thread it likes; collectives are coroutines of one loop. A backward node
therefore submits its collective to the loop, and waits in its own thread. The loop itself never waits for
autograd: on its thread a wait would be for ever, so it is refused, and `passes.backward` runs the whole pass
in a thread of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..background import BackgroundLoop
from ..communicator import AsyncCommunicator
from ..errors import CollectiveCancelledError, CollectiveTimeoutError, RudaError
from ..sync import Communicator

__all__ = ["BlockedLoopError", "Lane", "in_thread"]

R = TypeVar("R")

#: Calls of the pass that this thread runs for `in_thread`, so that cancelling its task reaches them.
_flight: contextvars.ContextVar[_Flight | None] = contextvars.ContextVar("ruda_async_flight", default=None)

#: Held until they are done, as loops hold tasks weakly.
_telling: set[asyncio.Task[None]] = set()


class BlockedLoopError(RudaError, RuntimeError):
    """``loss.backward()`` was called on the event loop that its collectives have to run on."""


class _Flight:
    """The collectives that one `in_thread` waits for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: set[concurrent.futures.Future[Any]] = set()
        self._cancelled = False

    def add(self, future: concurrent.futures.Future[Any]) -> None:
        with self._lock:
            self._futures.add(future)
            cancelled = self._cancelled
        if cancelled:
            future.cancel()
        future.add_done_callback(self._futures.discard)

    def cancel(self) -> None:
        with self._lock:
            self._cancelled = True
            futures = list(self._futures)
        for future in futures:
            future.cancel()


class Lane:
    """The way from any thread to a communicator's event loop.

    Attributes:
        inner: the asynchronous communicator.
    """

    __slots__ = ("_background", "_blocking", "inner")

    def __init__(self, comm: Communicator | AsyncCommunicator) -> None:
        if isinstance(comm, Communicator):
            self.inner = comm._inner
            self._background: BackgroundLoop | None = comm._loop
            self._blocking: Communicator | None = comm
        else:
            self.inner = comm
            self._background = self._blocking = None

    @property
    def in_turn(self) -> bool:
        """Whether a thread's calls are made one after the other; see `begin`."""
        return self._blocking is not None

    def start(self, call: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        """Submit `call`; does not wait.

        Raises:
            BlockedLoopError: this thread runs the loop.
        """
        if self._background is not None:
            future = self._background._submit(call)
        else:
            loop = self.inner._node.loop
            if asyncio._get_running_loop() is loop:
                call.close()
                raise BlockedLoopError(
                    f"{self._where()}: loss.backward() on the event loop of an AsyncCommunicator would wait "
                    "for ever, since its collectives run on that loop; write "
                    "`await ruda_async.autograd.backward(loss)`"
                )
            future = asyncio.run_coroutine_threadsafe(call, loop)
        flight = _flight.get()
        if flight is not None:
            flight.add(future)
        return future

    def begin(self, make: Callable[[], Coroutine[Any, Any, R]]) -> Callable[[], R]:
        """A call that is under way as soon as others can wait for it, and the function that waits for it.

        Calls of a blocking communicator are never in flight together in one thread; they are made when they
        are waited for, where this thread can run the loop itself: two hand-overs between threads less.

        Raises:
            BlockedLoopError: this thread runs the loop.
        """
        if self._blocking is not None:
            blocking = self._blocking
            return lambda: blocking._wait(make())
        future = self.start(make())
        return lambda: self.wait(future)

    def tell(self, call: Coroutine[Any, Any, None]) -> None:
        """Run `call`, which waits for nobody, before whatever is asked of the loop later.

        Unlike `start`, also where the pass of this thread was cancelled, and on the loop's own thread.
        """
        try:
            if self._blocking is not None:
                self._blocking._wait(call)
                return
            loop = self.inner._node.loop
            if asyncio._get_running_loop() is not loop:
                asyncio.run_coroutine_threadsafe(call, loop)
                return
            task = loop.create_task(call)
            _telling.add(task)
            task.add_done_callback(_telling.discard)
        except (RudaError, RuntimeError):  # closed, so that the others know anyway
            call.close()

    def wait(self, future: concurrent.futures.Future[R]) -> R:
        """The result of a started call.

        Raises:
            RudaError: the call failed.
        """
        # The call's own deadline passes first, unless its loop is blocked, for instance by a backward pass
        # that torch runs on a device's thread while the loop's thread waits for it.
        limit = 2 * self.inner.timeout + 5
        try:
            return future.result(limit)
        except concurrent.futures.CancelledError:
            raise CollectiveCancelledError(
                f"{self._where()}: this backward pass was cancelled, or its communicator closed",
                rank=self.inner.rank,
            ) from None
        except concurrent.futures.TimeoutError:
            if future.done():
                raise  # the call's own
            future.cancel()
            raise CollectiveTimeoutError(
                f"{self._where()}: the communicator's event loop did not run a backward collective within "
                f"{limit:g} s; do not block it, and use `await ruda_async.autograd.backward(loss)`",
                rank=self.inner.rank,
            ) from None
        except BaseException:
            future.cancel()  # an interrupt; without effect where the call itself failed
            raise

    def _where(self) -> str:
        return f"rank {self.inner.rank} of {self.inner.world_size}"


async def in_thread(function: Callable[[], R]) -> R:
    """Run a blocking `function`, such as a backward pass, in a thread of its own and await it.

    A pool would not do: with several ranks on one loop, all its threads could wait for a pass that has
    none. Cancelling cancels the pass's collectives on all ranks, then waits for the thread to end.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()
    flight = _Flight()

    def finish(result: R | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def main() -> None:
        _flight.set(flight)
        try:
            result, error = function(), None
        except BaseException as caught:
            result, error = None, caught
        loop.call_soon_threadsafe(finish, result, error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(main,), name="ruda-async backward", daemon=True).start()
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        if done.done():
            raise
        flight.cancel()
        await asyncio.wait([done])
        done.exception()  # seen: the cancellation is what the caller gets
        raise
