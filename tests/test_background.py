"""The loop of blocking calls: who runs it when, at the moments where two threads could disagree."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from ruda_async import CommunicatorClosedError, background, sync
from ruda_async.background import BackgroundLoop
from ruda_async.handover import hand_over

#: Seconds: for what has to happen, and for what must not.
LONG = 10.0
SHORT = 0.2


class WatchedLock:
    """A lock that calls `before` when it is about to be acquired, and `after` when it was released."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.before: Callable[[], object] = bool
        self.after: Callable[[], object] = bool

    def acquire(self) -> bool:
        self.before()
        return bool(self._lock.acquire())

    def release(self) -> None:
        self._lock.release()
        self.after()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.stop()
    assert not loop._thread.is_alive()


@pytest.fixture
def turn(loop: BackgroundLoop) -> WatchedLock:
    """The lock of the thread that runs `loop`, from before its own thread has it."""
    with loop._news:
        lock = WatchedLock(loop._turn)
        loop._turn = lock  # type: ignore[assignment]
    return lock


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT does what it does in a program started from a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def turns() -> str:
    """Needs the loop to turn a few times."""
    for _ in range(3):
        await asyncio.sleep(0)
    return "done"


def in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def body() -> None:
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, outcome


@pytest.mark.timeout(30)
def test_a_call_comes_while_the_loops_thread_takes_its_turn(loop: BackgroundLoop, turn: WatchedLock) -> None:
    reached, go = threading.Event(), threading.Event()

    def hold() -> None:
        if threading.current_thread() is loop._thread and not go.is_set():
            reached.set()
            assert go.wait(LONG)

    turn.before = hold
    assert reached.wait(LONG)  # idle for a few milliseconds, it wants to run the loop
    thread, outcome = in_thread(lambda: loop.run(turns()))
    thread.join(SHORT)
    go.set()
    thread.join(LONG)
    assert outcome == ["done"]


@pytest.mark.timeout(30)
def test_calls_come_while_the_loops_thread_gives_its_turn_back(
    loop: BackgroundLoop, turn: WatchedLock
) -> None:
    runs, go = threading.Event(), threading.Event()
    turn.after = lambda: threading.current_thread() is not loop._thread or go.wait(LONG)

    async def who() -> threading.Thread:
        runs.set()
        return threading.current_thread()

    while loop.start(who(), "who").wait(LONG) is not loop._thread:
        pass
    try:
        for _ in range(3):
            assert loop.run(turns()) == "done"
    finally:
        go.set()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("way", ["run", "start"])
def test_ctrl_c_at_the_edge_of_a_call_leaves_the_loop_usable(
    way: str, moment: str, loop: BackgroundLoop, turn: WatchedLock, ctrl_c: None
) -> None:
    main = threading.current_thread()

    def strike() -> None:
        if threading.current_thread() is main:
            setattr(turn, moment, bool)
            signal.raise_signal(signal.SIGINT)

    loop._news.acquire()
    while loop._thread_has_it:  # until `start` may run its call itself
        loop._news.release()
        loop.run(turns())
        loop._news.acquire()
    try:
        setattr(turn, moment, strike)
        with pytest.raises(KeyboardInterrupt):
            loop.run(turns()) if way == "run" else loop.start(turns(), "turns", by_hand=True)
    finally:
        loop._news.release()
    thread, outcome = in_thread(lambda: loop.run(turns()))
    thread.join(LONG)
    assert outcome == ["done"]
    assert loop.run(turns()) == "done"
    assert loop.start(turns(), "turns").wait(LONG) == "done"


async def blocking(loop: BackgroundLoop) -> None:
    """A blocking call on the thread of another loop."""
    loop.run(turns())


ended: dict[str, Callable[[BackgroundLoop], object]] = {
    "run": lambda loop: loop.run(turns()),
    "by hand": lambda loop: loop.run(turns(), by_hand=True),
    "start": lambda loop: loop.start(turns(), "turns").wait(LONG),
    "start by hand": lambda loop: loop.start(turns(), "turns", by_hand=True).wait(LONG),
    "elsewhere": lambda loop: asyncio.run(blocking(loop)),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("way", ended)
def test_a_call_that_meets_the_end_of_the_loop_is_refused(
    way: str, loop: BackgroundLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes between the call's look at `stopped` and what it does then."""
    check = loop._check

    def late(call: Any) -> None:
        check(call)
        loop.stop()

    monkeypatch.setattr(loop, "_check", late)
    with pytest.raises(CommunicatorClosedError, match="closed"):
        ended[way](loop)


@pytest.mark.timeout(30)
def test_what_was_submitted_last_ends_with_the_loop(loop: BackgroundLoop) -> None:
    """A call that is not a task yet when the loop ends is cancelled all the same."""
    # It is counted before the loop is asked to end, and reaches the loop while that ends.
    with loop._news:
        loop._started += 1
    ending, outcome = in_thread(loop.stop)
    while not loop.stopped:
        pass
    with loop._news:  # as a thread that looked at `stopped` in time
        loop.stopped = False
        future = loop._submit(turns())
        loop.stopped = True
        loop._started -= 1
    ending.join(LONG)
    assert outcome == [None]
    assert future.cancelled() or future.result(LONG) == "done"


@pytest.mark.parametrize("way", ["send", "all_reduce"])
def test_a_call_cancelled_before_its_task_begins(way: str) -> None:
    """A transfer takes no message then; a collective has to begin, for the other ranks' sake."""
    loop, steps = asyncio.new_event_loop(), list[str]()

    async def call() -> None:
        try:
            steps.append("begun")
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            steps.append("cancelled")
            raise

    future = hand_over(call(), loop, lambda: steps.append("ended"), may_not_begin=way == "send")
    assert future.cancel()
    for _ in range(5):
        loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert steps == (["ended"] if way == "send" else ["begun", "cancelled", "ended"])


def test_what_a_transfer_took_before_it_heard_of_its_cancellation_is_not_lost() -> None:
    loop, call = asyncio.new_event_loop(), asyncio.sleep(0, "a message")
    future = hand_over(call, loop, bool, may_not_begin=True)
    loop.run_until_complete(asyncio.sleep(0))  # it becomes a task, and makes its first step
    assert future.cancel()
    assert not future.done()
    loop.run_until_complete(asyncio.sleep(0))
    assert future.done()
    assert future.cancelled() or future.result() == "a message"
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert not future.cancel()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("way", ["all_reduce", "send"])
@pytest.mark.parametrize("place", ["made", "checked", "before", "after"])
def test_ctrl_c_while_a_call_is_started(
    way: str, place: str, ctrl_c: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is over, or it was never made: nobody has a handle on it."""
    struck = []

    def strike() -> None:
        if not struck and threading.current_thread() is threading.main_thread():
            struck.append(place)
            signal.raise_signal(signal.SIGINT)

    def striking(function: Any, first: bool) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if first:
                strike()
            result = function(*args, **options)
            strike()
            return result

        return call

    with (
        sync.connect("memory://struck", rank=0, world_size=1) as comm,
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")
        given = (np.ones(3),) if way == "all_reduce" else (np.ones(3), 0)
        with monkeypatch.context() as patch:
            if place == "made":
                patch.setattr(comm._inner, way, striking(getattr(comm._inner, way), False), raising=False)
            elif place == "checked":
                patch.setattr(comm, "_check", striking(comm._check, True))
            else:
                patch.setattr(background, "hand_over", striking(hand_over, place == "before"))
                patch.setattr(comm._loop, "_take_at_once", lambda: False)
            with pytest.raises(KeyboardInterrupt):
                getattr(comm.start, way)(*given)
        assert struck == [place]
        assert comm.start.all_reduce(np.ones(3)).wait(LONG).tolist() == [1, 1, 1]
        while comm._loop._started:
            comm.all_reduce(np.ones(3))
        gc.collect()
        assert comm._loop._started == 0
        assert [str(one.message) for one in seen] == []


def test_what_calls_by_hand_leave_to_the_loop_is_done_before_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Done-callbacks hold results; calls that all end by hand would pile them up, and take fresh memory."""
    monkeypatch.setattr(background, "_LINGER", LONG)
    monkeypatch.setattr(background, "_AT_REST", SHORT)
    loop = BackgroundLoop()
    left: list[int] = []

    async def call(number: int) -> int:
        asyncio.get_running_loop().call_soon(left.append, number)
        return number

    assert loop.run(call(1), by_hand=True) == 1
    loop._last_turn -= SHORT
    assert loop.run(call(2), by_hand=True) == 2
    assert left == [1, 2]
    loop._last_turn += LONG  # not at every call: a turn costs as much as a small collective
    assert loop.run(call(3), by_hand=True) == 3
    assert left == [1, 2]
    loop.stop()
    assert left == [1, 2, 3]
