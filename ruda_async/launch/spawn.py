"""Call a function on every rank, in fresh processes or in threads of this one."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, TypeVar

from ..config import environment
from ..errors import CollectiveTimeoutError, ConfigError, RudaError
from .plan import Plan, prepare

__all__ = ["SpawnError", "spawn"]

R = TypeVar("R")

#: Seconds between asking a rank to end and killing it.
_GRACE = 3.0
#: Seconds that a failure which blames another rank waits for that rank's own account of it.
_BLAME = 1.0


class SpawnError(RudaError, RuntimeError):
    """A rank of `spawn` failed. Where it raised, that is the ``__cause__``, and its traceback a note.

    Attributes:
        rank: the rank that failed.
        exitcode: its process's exit code, negative for a signal; None where it raised.
    """

    def __init__(self, message: str = "", *, rank: int | None = None, exitcode: int | None = None) -> None:
        super().__init__(message, rank=rank)
        self.exitcode = exitcode


def spawn(
    fn: Callable[..., Any],
    world_size: int,
    url: str | None = None,
    *,
    args: Sequence[Any] = (),
    timeout: float | None = None,
    threads: bool = False,
) -> list[Any]:
    """Call ``fn(*args)`` on every rank and return what each returned, in rank order.

    Inside, ``ruda_async.connect()`` and ``ruda_async.sync.connect()`` without arguments join. When a rank
    fails, the others are ended; so they are on Ctrl-C, and when this process dies. For processes, `fn`,
    `args` and the results are pickled: `fn` is a function of an importable module, and a script calls
    `spawn` under ``if __name__ == "__main__":``.

    Args:
        fn: a function, or a coroutine function, which is run by `asyncio.run`.
        world_size: the number of ranks.
        url: where they meet; by default ``RUDA_URL``, else the most preferred transport that fits.
        timeout: seconds until all have to have returned; None for no limit.
        threads: run ranks as threads of this process instead. Threads cannot be ended from outside: after
            a failure those that still run are left to themselves.

    Raises:
        SpawnError: a rank raised or was killed; of several failures, the one that the others name.
        CollectiveTimeoutError: the seconds passed; ``missing`` has the ranks that had not returned.
        ConfigError: the URL, the number of ranks or `fn` cannot be used.
    """
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"timeout={timeout:g} is out of range; give seconds above 0, or None")
    deadline = None if timeout is None else time.monotonic() + timeout
    with prepare(url, world_size, rank_per="task" if threads else "process") as plan:
        ranks = _Threads(plan) if threads else _Processes(plan)
        try:
            ranks.start(fn, tuple(args))
            return _collect(ranks, world_size, deadline, timeout)
        finally:
            ranks.end()


class _Outcome(NamedTuple):
    """What became of one rank."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    exitcode: int | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or self.exitcode is not None

    @property
    def blames(self) -> int | None:
        """The other rank that this failure is about, if any."""
        blamed = getattr(self.error, "rank", None)
        return blamed if isinstance(blamed, int) and blamed != self.rank else None

    def raised(self) -> SpawnError:
        """The error for the caller."""
        if self.error is None:
            assert self.exitcode is not None
            how = _how_ended(self.exitcode)
            return SpawnError(f"rank {self.rank} {how}", rank=self.rank, exitcode=self.exitcode)
        summary = "".join(traceback.format_exception_only(self.error)).strip().splitlines()[0]
        failure = SpawnError(f"rank {self.rank} failed: {summary}", rank=self.rank)
        failure.__cause__ = self.error
        if self.trace:
            failure.add_note(f"The traceback of rank {self.rank}:\n{self.trace.rstrip()}")
        return failure


class _Ranks:
    """Running ranks; `next` gives outcomes as they come."""

    def start(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        raise NotImplementedError

    def next(self, seconds: float | None) -> list[_Outcome]:
        """Outcomes that are there, waiting up to `seconds` for the first."""
        raise NotImplementedError

    def end(self) -> None:
        """End those that still run."""
        raise NotImplementedError


def _collect(ranks: _Ranks, world_size: int, deadline: float | None, timeout: float | None) -> list[Any]:
    """All results, in rank order.

    Raises:
        SpawnError, CollectiveTimeoutError
    """
    done: dict[int, _Outcome] = {}
    while len(done) < world_size:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        for outcome in ranks.next(left):
            done[outcome.rank] = outcome
        failed = [outcome for outcome in done.values() if outcome.failed]
        if failed:
            raise _culprit(ranks, done, failed[0]).raised()
        if deadline is not None and len(done) < world_size and time.monotonic() >= deadline:
            missing = tuple(rank for rank in range(world_size) if rank not in done)
            raise CollectiveTimeoutError(
                f"ranks {', '.join(map(str, missing))} of {world_size} had not returned after "
                f"timeout={timeout:g} s and were ended; raise timeout=, or look for what they wait for",
                missing=missing,
            )
    return [done[rank].value for rank in range(world_size)]


def _culprit(ranks: _Ranks, done: dict[int, _Outcome], failure: _Outcome) -> _Outcome:
    """Follow the blame: a rank that lost its peer is not the one to report, if the peer has its own story."""
    patience = time.monotonic() + _BLAME
    seen = {failure.rank}
    while failure.blames is not None and failure.blames not in seen:
        blamed = failure.blames
        while blamed not in done and (left := patience - time.monotonic()) > 0:
            for outcome in ranks.next(left):
                done[outcome.rank] = outcome
        if blamed not in done or not done[blamed].failed:
            break
        failure = done[blamed]
        seen.add(blamed)
    return failure


def _call(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    result = fn(*args)
    return asyncio.run(result) if inspect.iscoroutine(result) else result


# ---------------------------------------------------------------------- processes


class _Processes(_Ranks):
    """A fresh interpreter per rank."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._processes: list[SpawnProcess] = []
        self._pipes: dict[int, connection.Connection] = {}
        #: What becomes readable when a rank dies.
        self._deaths: dict[int, int] = {}

    def start(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            call = pickle.dumps((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"spawn() cannot hand {getattr(fn, '__qualname__', fn)!r} and its arguments to another "
                f"process ({error}); use a function of a module, or threads=True"
            ) from error
        context = multiprocessing.get_context("spawn")
        with _interrupts_held():
            for rank in range(self._plan.world_size):
                ours, theirs = context.Pipe(duplex=False)
                listener = self._plan.listener if rank == 0 else None
                process = context.Process(
                    target=_process_main,
                    args=(call, self._plan.variables(rank), listener, theirs),
                    name=f"ruda-async rank {rank}",
                )
                self._pipes[rank] = ours
                with theirs:
                    process.start()
                self._processes.append(process)
                self._deaths[rank] = _death_of(process)

    def next(self, seconds: float | None) -> list[_Outcome]:
        ready = set(
            connection.wait([*self._pipes.values(), *(self._deaths[r] for r in self._pipes)], seconds)
        )
        found = [r for r, pipe in self._pipes.items() if pipe in ready or self._deaths[r] in ready]
        return [self._receive(rank, self._pipes.pop(rank)) for rank in found]

    def _receive(self, rank: int, pipe: connection.Connection) -> _Outcome:
        """The outcome that a rank sent; or, where it died without a word, how."""
        process = self._processes[rank]
        with pipe:
            try:
                if not pipe.poll():
                    raise EOFError
                value, error, trace = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                self._wait(rank, time.monotonic() + _GRACE)
                return _Outcome(rank, exitcode=1 if process.exitcode is None else process.exitcode)
            except Exception as failure:
                text = f"what it returned cannot be unpickled here: {failure}"
                return _Outcome(rank, error=TypeError(text))
        return _Outcome(rank, value, error, trace)

    def end(self) -> None:
        patience = time.monotonic() + _GRACE
        if not self._pipes:  # all have answered, and are on their way out
            for rank in range(len(self._processes)):
                self._wait(rank, patience)
        for step in (SpawnProcess.terminate, SpawnProcess.kill):
            patience = time.monotonic() + _GRACE
            for process in self._processes:
                if process.is_alive():
                    step(process)
            for rank in range(len(self._processes)):
                self._wait(rank, patience)
        for rank, process in enumerate(self._processes):
            if self._deaths[rank] != process.sentinel:
                os.close(self._deaths[rank])
            with contextlib.suppress(ValueError):
                process.close()
        for pipe in self._pipes.values():
            pipe.close()

    def _wait(self, rank: int, until: float) -> None:
        """Wait until the rank's process is gone. (`join` would also wait for children that it forked.)"""
        if self._processes[rank].exitcode is None:
            connection.wait([self._deaths[rank]], max(0.0, until - time.monotonic()))


def _death_of(process: SpawnProcess) -> int:
    """A descriptor that is readable once the process is gone, even while children that it forked live."""
    if hasattr(os, "pidfd_open") and process.pid is not None:
        with contextlib.suppress(OSError):
            return os.pidfd_open(process.pid)
    return process.sentinel


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits meanwhile, and processes that start inherit that, until they can deal with it."""
    resource_tracker.ensure_running()  # or it would be started inside, and let interrupts through
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _process_main(
    call: bytes, variables: Mapping[str, str], listener: socket.socket | None, pipe: connection.Connection
) -> None:
    """One rank's process."""
    # The parent decides what Ctrl-C means, and ends this process then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_die_with_parent, name="ruda-async watch", daemon=True).start()
    os.environ.update(variables)
    if listener is not None:
        listener.set_inheritable(False)
        os.environ["RUDA_LISTEN_FD"] = str(listener.detach())
    try:
        fn, args = pickle.loads(call)
        message = _packed(_call(fn, args))
    except Exception as error:
        trace = traceback.format_exc()
        try:
            message = pickle.dumps((None, error, trace))
            pickle.loads(message)
        except Exception:
            text = type(error).__qualname__
            with contextlib.suppress(Exception):  # it may have no text either
                text = f"{text}: {error}"
            stand_in = RuntimeError(text)
            message = pickle.dumps((None, stand_in, trace))
    with pipe, contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(message)


def _packed(value: Any) -> bytes:
    try:
        return pickle.dumps((value, None, ""))
    except Exception as error:
        raise TypeError(
            f"what it returned ({type(value).__qualname__}) cannot be pickled: {error}; return plain data"
        ) from error


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _how_ended(exitcode: int) -> str:
    if exitcode >= 0:
        return f"exited with code {exitcode} before it returned"
    try:
        return f"was ended by {signal.Signals(-exitcode).name}"
    except ValueError:
        return f"was ended by signal {-exitcode}"


# ---------------------------------------------------------------------- threads


class _Threads(_Ranks):
    """A thread of this process per rank."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._threads: list[threading.Thread] = []
        self._outcomes: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        self._answered = 0

    def start(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        for rank in range(self._plan.world_size):
            thread = threading.Thread(
                target=self._main, args=(rank, fn, args), name=f"ruda-async rank {rank}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _main(self, rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        listener = self._plan.listener if rank == 0 else None
        try:
            with environment(self._plan.variables(rank, None if listener is None else listener.fileno())):
                outcome = _Outcome(rank, _call(fn, args))
        except BaseException as error:
            outcome = _Outcome(rank, error=error)
        self._outcomes.put(outcome)

    def next(self, seconds: float | None) -> list[_Outcome]:
        try:
            outcome = self._outcomes.get(timeout=seconds)
        except queue.Empty:
            return []
        self._answered += 1
        return [outcome]

    def end(self) -> None:
        if self._answered == len(self._threads):
            for thread in self._threads:
                thread.join()
