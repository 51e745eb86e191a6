"""An event loop for threads that block, and handles on what runs on it.

The loop has a thread of its own, but a thread that makes a blocking call runs it itself while it waits:
that saves two hand-overs between threads per call. Better still, a call is first run by hand as far as it
gets; one that finds its peers' messages there already ends without the loop having turned at all. The
loop's own thread takes over when calls were started without waiting, and whenever no call has come
for a few milliseconds, so that heartbeats and peers are served in between.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Coroutine
from contextlib import suppress
from time import monotonic
from typing import Any, Generic, TypeVar

from .errors import CollectiveTimeoutError, CommunicatorClosedError, RudaError
from .handover import Handed, hand_over, rest_of
from .interrupts import Interrupt, deferred_interrupt
from .tensors.device import note_streams
from .transport.framed.activity import blocking

__all__ = ["BackgroundLoop", "Work"]

R = TypeVar("R")

#: Seconds after the last blocking call when the loop's own thread takes over.
_LINGER = 0.005
#: Seconds that an interrupted call may take to withdraw before the interrupt is raised all the same.
_WITHDRAW = 5.0
#: Seconds that calls in flight have to end when the loop ends.
_FINISH = 2.0
#: Seconds that a call run by hand may wait for the bytes it needs before the loop waits for it.
_BLOCK = 0.001
#: Seconds after which it goes on on the loop in any case, for other threads' calls and for Ctrl-C.
_BY_HAND = 0.01
#: Seconds after which a call that ended by hand has the loop turn once, for what such calls have left to it:
#: callbacks that let go of messages. Until then results stay in use, and their memory is not used again.
_AT_REST = 0.005
_ON_ITS_OWN_LOOP = (
    "a blocking call was made on the communicator's own loop; use the asynchronous communicator there"
)
_CLOSED = "this communicator is closed"
_CLOSED_MEANWHILE = "this communicator was closed during the call"


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

    @property
    def future(self) -> concurrent.futures.Future[R]:
        """The future behind this handle, for code that waits for many or wants a callback."""
        return self._future

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
        """Ask for the call's end on every rank; False when it was over already. `wait` tells how it ended."""
        return self._future.cancel()


class BackgroundLoop:
    """Runs coroutines for threads that block."""

    def __init__(self) -> None:
        self._loop = _new_loop()
        #: Held by the thread that runs the loop.
        self._turn = threading.Lock()
        #: Guards what follows.
        self._news = threading.Condition()
        self._caller: int | None = None  # the calling thread that has the loop, or waits for it
        self._thread_has_it = False
        self._started = 0
        self._last_call = monotonic()
        self._last_turn = self._last_call
        self.stopped = False
        #: Communicators that need this loop: `connect` made them, or `grow`.
        self.users = 0
        self._thread = threading.Thread(target=self._main, name="ruda-async loop", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the loop's own thread

    def _main(self) -> None:
        while self._wait_for_turn():
            try:
                asyncio.set_event_loop(self._loop)
                self._loop.run_forever()  # until a caller wants it
            finally:
                # Before the turn goes over: a caller who thought that the loop still runs here would stop it
                # under its own call.
                self._last_turn = monotonic()
                with self._news:
                    self._thread_has_it = False
                self._turn.release()
        with self._turn:
            self._finish()

    def _finish(self) -> None:
        """Cancel what is left and close the loop."""
        loop = self._loop
        end = monotonic() + _FINISH
        while (seconds := end - monotonic()) > 0:
            loop.run_until_complete(asyncio.sleep(0))  # what was submitted just before becomes a task
            tasks = asyncio.all_tasks(loop)
            if not tasks and not self._started:
                break
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=seconds))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    def _wait_for_turn(self) -> bool:
        """Wait until this thread should run the loop, and take the turn; False when it should end."""
        with self._news:
            while not self.stopped:
                idle = self._last_call + _LINGER - monotonic()
                if self._caller is None and (self._started or idle <= 0):
                    # In one step with the flag, or a caller might run the loop first and meet its own stop.
                    self._turn.acquire()  # free: callers give it back before their name
                    self._thread_has_it = True
                    return True
                self._news.wait(_LINGER if self._caller is not None else idle)
            return False

    # ------------------------------------------------------------------ calling threads

    def _take(self) -> bool:
        """Become the thread that runs the loop; False when another caller is.

        Raises:
            CommunicatorClosedError: the loop has ended.
        """
        me = threading.get_ident()
        with self._news:
            if self._caller is not None:
                if self._caller == me:
                    raise RuntimeError(_ON_ITS_OWN_LOOP)
                return False
            self._caller = me
            interrupt = self._thread_has_it
        self._take_turn(interrupt)
        return True

    def _take_turn(self, interrupt: bool) -> None:
        """Wait for the turn, being the caller; `interrupt` the loop's own thread in it."""
        try:
            if interrupt:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._turn.acquire()
        except BaseException:  # a second Ctrl-C does not wait, and the loop may be closed
            self._give_up_name()
            if self.stopped:
                raise CommunicatorClosedError(_CLOSED) from None
            raise
        if self._loop.is_closed():
            self._leave()
            raise CommunicatorClosedError(_CLOSED)

    def _leave(self) -> None:
        self._turn.release()
        self._give_up_name()

    def _give_up_name(self) -> None:
        with self._news:
            self._caller = None
            self._last_call = monotonic()
            if self._started:
                self._news.notify_all()

    def run(self, call: Coroutine[Any, Any, R], *, by_hand: bool = False) -> R:
        """Run `call` on the loop and wait. An interrupt (Ctrl-C) cancels it before it goes on.

        Args:
            by_hand: `call` does not depend on being a task, so it may be started without one.
        """
        self._check(call)
        if asyncio._get_running_loop() is None:
            # Around taking and leaving too: an interrupt in there would keep all threads from the loop.
            with deferred_interrupt() as interrupt:
                if self._try_take(call):
                    try:
                        return self._run_here(call, by_hand, interrupt)
                    finally:
                        self._leave()
        return self._run_elsewhere(call)

    def _try_take(self, call: Coroutine[Any, Any, Any]) -> bool:
        try:
            return self._take()
        except BaseException:
            call.close()
            raise

    def _run_here(self, call: Coroutine[Any, Any, R], by_hand: bool, interrupt: Interrupt) -> R:
        """Run the loop for `call`, having the turn."""
        first = None
        if self._started:
            by_hand, call = False, _after_started(call)
        if by_hand:
            try:
                first = self._begin(call, _BLOCK)
            except StopIteration as done:
                result: R = done.value
                if monotonic() - self._last_turn > _AT_REST:
                    self._turn_once()
                return result
        task = self._loop.create_task(rest_of(call, first) if by_hand else call)
        interrupt.on_interrupt(lambda: self._loop.call_soon_threadsafe(task.cancel))
        try:
            return self._loop.run_until_complete(task)
        except asyncio.CancelledError:
            if interrupt.pending:
                raise KeyboardInterrupt from None
            raise CommunicatorClosedError(_CLOSED_MEANWHILE) from None
        finally:
            self._last_turn = monotonic()

    def _turn_once(self) -> None:
        """Run what the loop has to do now, having the turn."""
        self._loop.call_soon(self._loop.stop)
        self._loop.run_forever()
        self._last_turn = monotonic()

    def _run_elsewhere(self, call: Coroutine[Any, Any, R]) -> R:
        """Wait while another thread runs the loop."""
        future = self._submit(call)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise CommunicatorClosedError(_CLOSED_MEANWHILE) from None
        except BaseException:
            if not future.done():
                future.cancel()
                with suppress(CommunicatorClosedError):
                    concurrent.futures.wait((self._submit(_turns()),), _WITHDRAW)
            raise

    def start(
        self, call: Coroutine[Any, Any, R], label: str, *, by_hand: bool = False, may_not_begin: bool = False
    ) -> Work[R]:
        """Start `call` on the loop.

        Args:
            by_hand: as for `run`; where nobody runs the loop, the call gets as far as it can without waiting.
            may_not_begin: as for `hand_over`.
        """
        self._check(call)
        if by_hand and asyncio._get_running_loop() is None:
            done: concurrent.futures.Future[R] = concurrent.futures.Future()
            try:
                with deferred_interrupt():
                    if self._take_at_once():
                        try:
                            call = rest_of(call, self._begin(call, 0.0))
                        except StopIteration as end:
                            done.set_result(end.value)
                        except Exception as error:
                            done.set_exception(error)
                        finally:
                            self._leave()
            except KeyboardInterrupt:
                if not done.done():
                    self._submit(call).cancel()  # what it has posted is taken back where the loop runs
                raise
            if done.done():
                return Work(done, label)
        return Work(self._submit(call, may_not_begin=may_not_begin), label)

    def _begin(self, call: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """Run `call` by hand until it waits: for what, after waiting for bytes so many seconds at most.

        Raises:
            StopIteration: it has ended; with its result.
        """
        asyncio._set_running_loop(self._loop)
        blocking.seconds = seconds
        blocking.until = monotonic() + _BY_HAND
        try:
            return call.send(None)
        finally:
            blocking.seconds = 0.0
            asyncio._set_running_loop(None)

    def _take_at_once(self) -> bool:
        """`_take`, where that neither waits nor overtakes calls that were started before."""
        with self._news:
            if self.stopped or self._caller is not None or self._thread_has_it or self._started:
                return False
            self._caller = threading.get_ident()
        self._take_turn(interrupt=False)
        return True

    def _check(self, call: Coroutine[Any, Any, Any]) -> None:
        if self.stopped:
            call.close()
            raise CommunicatorClosedError(_CLOSED)
        if asyncio._get_running_loop() is self._loop:
            call.close()
            raise RuntimeError(_ON_ITS_OWN_LOOP)

    def _submit(
        self, call: Coroutine[Any, Any, R], *, may_not_begin: bool = False
    ) -> concurrent.futures.Future[R]:
        future: Handed[R] | None = None
        try:
            # A call is handed over and counted, or neither: one that is counted for good makes every later
            # call wait for a turn.
            with deferred_interrupt():
                with self._news:
                    if self.stopped:  # since `_check`: nobody would run it
                        raise CommunicatorClosedError(_CLOSED)
                    self._started += 1
                    self._news.notify_all()
                try:
                    context = contextvars.copy_context()
                    context.run(note_streams)
                    future = context.run(
                        hand_over, call, self._loop, self._finished, may_not_begin=may_not_begin
                    )
                except BaseException:
                    self._finished()
                    raise
        except BaseException:
            if future is None:
                call.close()
            else:
                future.cancel()  # the interrupt came meanwhile, and nobody will hear of the call
            raise
        return future

    def _finished(self) -> None:
        with self._news:
            self._started -= 1

    def stop(self) -> None:
        """Cancel what is left and end the loop and its thread. Harmless twice."""
        with self._news:
            if self.stopped:
                return
            self.stopped = True
            if self._thread_has_it:
                self._loop.call_soon_threadsafe(self._loop.stop)
            self._news.notify_all()
        self._thread.join(5)


async def _turns() -> None:
    """A few turns of the loop: enough for a cancelled call to withdraw what it posted."""
    for _ in range(5):
        await asyncio.sleep(0)


async def _after_started(call: Coroutine[Any, Any, R]) -> R:
    """Make `call` after those that were started before it: each of them needs a turn to become a task."""
    try:
        await asyncio.sleep(0)
    except BaseException:
        call.close()
        raise
    return await call
