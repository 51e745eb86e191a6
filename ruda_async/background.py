"""An event loop in a thread of its own, and handles on what runs there."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from .errors import CollectiveTimeoutError, CommunicatorClosedError, RudaError

__all__ = ["BackgroundLoop", "Work"]

R = TypeVar("R")

#: Seconds that an interrupted call may take to withdraw before the interrupt is raised all the same.
_WITHDRAW = 5.0


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: it saves about a third of a small operation's time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Work(Generic[R]):
    """A call that was started and runs on the communicator's loop."""

    def __init__(self, future: concurrent.futures.Future[R], label: str) -> None:
        self._future = future
        self._label = label

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> R:
        """The call's result.

        Args:
            timeout: seconds to wait here; the call itself goes on when they pass.

        Raises:
            CollectiveTimeoutError: the seconds passed.
            RudaError: the call failed.
        """
        try:
            return self._future.result(timeout)
        except concurrent.futures.CancelledError:
            raise RudaError(f"{self._label} was cancelled") from None
        except concurrent.futures.TimeoutError:
            if self._future.done():
                raise  # the call's own
            raise CollectiveTimeoutError(
                f"{self._label} is not done after {timeout:g} s; it goes on, wait again or cancel() it"
            ) from None

    def cancel(self) -> bool:
        """Cancel the call on every rank; False when it was over already."""
        return self._future.cancel()


class BackgroundLoop:
    """Runs coroutines for threads that block."""

    def __init__(self) -> None:
        self._loop = _new_loop()
        self.stopped = False
        self._thread = threading.Thread(target=self._main, name="ruda-async loop", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._finish()

    def _finish(self) -> None:
        """Cancel what is left and close the loop, on its own thread."""
        loop = self._loop
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=2))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def _submit(self, call: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        if self.stopped:
            call.close()
            raise CommunicatorClosedError("this communicator is closed")
        if threading.current_thread() is self._thread:
            call.close()
            raise RuntimeError(
                "a blocking call was made on the communicator's own loop; use the asynchronous one there"
            )
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def run(self, call: Coroutine[Any, Any, R]) -> R:
        """Run `call` on the loop and wait. An interrupt (Ctrl-C) cancels it before it goes on."""
        future = self._submit(call)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise CommunicatorClosedError("this communicator was closed during the call") from None
        except BaseException:
            if not future.done():
                future.cancel()
                self._settle()
            raise

    def _settle(self) -> None:
        """Let a cancelled call withdraw what it posted: a few turns of the loop."""

        async def turns() -> None:
            for _ in range(5):
                await asyncio.sleep(0)

        try:
            asyncio.run_coroutine_threadsafe(turns(), self._loop).result(_WITHDRAW)
        except (concurrent.futures.TimeoutError, RuntimeError):
            pass

    def start(self, call: Coroutine[Any, Any, R], label: str) -> Work[R]:
        """Start `call` on the loop."""
        return Work(self._submit(call), label)

    def stop(self) -> None:
        """End the loop and its thread. Harmless twice."""
        if self.stopped:
            return
        self.stopped = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
