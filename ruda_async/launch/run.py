"""Run a program on every rank, on this host: what ``ruda-async run`` does.

All ranks are in one process group of their own, led by a *guard*: a tiny process that waits for this one to
go away, however it does, and then ends the group. So a killed launcher leaves nothing behind, whatever the
ranks had started, and the terminal's Ctrl-C reaches them through the launcher alone, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, cast

from ..errors import ConfigError
from .output import Lines, Screen, Source
from .plan import Plan, prepare
from .terminal import binary_stream, is_terminal, relay_terminal

__all__ = ["run"]

_GUARD = """\
import os, signal
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.write(1, b"+")
os.close(1)
os.read(0, 1)
os.killpg(0, signal.SIGKILL)
"""
_READ = 64 * 1024
#: Seconds for output that is still under way when all ranks have ended.
_DRAIN = 2.0


def run(
    world_size: int,
    argv: Sequence[str],
    url: str | None = None,
    *,
    prefix: bool = True,
    grace: float = 5.0,
    trace_dir: str | Path | None = None,
    keep_going: bool = False,
) -> int:
    """Run `argv` once per rank and wait for all; ``connect()`` without arguments joins them.

    When a rank fails, the others get SIGTERM, and SIGKILL when `grace` has passed; so do processes that they
    started. With `keep_going` only rank 0 ends the others, by failing. Ctrl-C (SIGINT) is passed on once,
    with the same sequel; a second one kills at once. Standard input goes to rank 0.

    Args:
        world_size: the number of ranks.
        argv: a Python file, or a folder with a ``__main__.py``, and arguments; or ``-m`` and a module; or
            ``--`` and any program.
        url: where they meet; by default ``RUDA_URL``, else the most preferred transport between processes.
        prefix: put ``[rank n]`` before each line of output. Without, output is passed on byte by byte, in
            whole lines.
        grace: seconds.
        trace_dir: the folder that ranks write flight records to; by default ``RUDA_TRACE_DIR``.
        keep_going: other ranks than 0 may fail, for programs that go on without them.

    Returns:
        0, or the exit code of the first rank that failed, as shells give it: 128 + n for a signal n. With
        `keep_going` that of rank 0.

    Raises:
        ConfigError: the program, the URL or a number cannot be used.
    """
    if not grace >= 0:
        raise ConfigError(f"grace={grace:g} is out of range; give seconds from 0 on")
    command = _command(argv)
    with prepare(url, world_size) as plan:
        folder = None if trace_dir is None else Path(trace_dir).absolute()
        return asyncio.run(_Launcher(plan, command, prefix, grace, folder, keep_going).run())


def _command(argv: Sequence[str]) -> list[str]:
    """The command line of every rank.

    Raises:
        ConfigError: there is no such program.
    """
    argv = list(argv)
    if not argv:
        raise ConfigError("nothing to run; give a script, -m and a module, or -- and a program")
    first = argv[0]
    if first == "-m":
        if len(argv) < 2:
            raise ConfigError("-m needs a module to run, as in -m package.module")
        return [sys.executable, *argv]
    explicit = first == "--"
    if explicit:
        argv = argv[1:]
        if not argv:
            raise ConfigError("nothing to run after --; give a program and its arguments")
    path = Path(argv[0])
    if not explicit:
        if path.suffix == ".py" and path.is_file():
            return [sys.executable, *argv]
        if path.is_dir():
            if (path / "__main__.py").is_file():
                return [sys.executable, *argv]
            raise ConfigError(f"the folder {argv[0]!r} has no __main__.py; name the file to run")
    if shutil.which(argv[0]) is None:
        raise ConfigError(
            f"{argv[0]!r} is neither a Python file, nor a folder with a __main__.py, nor a program on PATH; "
            "check the name, or use -m for a module"
        )
    return argv


def _start_guard() -> subprocess.Popen[bytes]:
    """The leader of the ranks' process group; says so on its standard output once it ignores signals."""
    return subprocess.Popen(
        (sys.executable, "-I", "-S", "-c", _GUARD),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )


class _Rank:
    """One running rank."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.rank = rank
        self.process = process


class _Launcher:
    """One run."""

    def __init__(
        self,
        plan: Plan,
        command: list[str],
        prefix: bool,
        grace: float,
        trace_dir: Path | None,
        keep_going: bool,
    ) -> None:
        self._plan = plan
        self._command = command
        self._prefix = prefix
        self._grace = grace
        self._trace_dir = trace_dir
        self._keep_going = keep_going
        self._screen = Screen()
        self._out = binary_stream(sys.stdout)
        self._err = binary_stream(sys.stderr)
        self._notes = Source(self._err, b"")
        self._ranks: list[_Rank] = []
        self._code = 0
        self._signal: signal.Signals | None = None
        self._signals_seen = 0
        self._ending: asyncio.Task[None] | None = None
        self._farewell: asyncio.Task[None] | None = None
        #: Since when a pump waits for output; those that are writing are not here.
        self._reading: dict[asyncio.Task[None] | None, float] = {}
        # One thread writes, so that a slow reader of our output holds up nothing else here.
        self._writer = ThreadPoolExecutor(1, "ruda-async output")
        self._waiters = ThreadPoolExecutor(plan.world_size + 1, "ruda-async wait")

    async def run(self) -> int:
        """Start, watch, end. Returns the exit code."""
        self._loop = asyncio.get_running_loop()
        self._guard = _start_guard()
        try:
            ready = cast("IO[bytes]", self._guard.stdout)
            await self._loop.run_in_executor(self._waiters, ready.read)
            with self._signals():
                await self._watch()
        finally:
            self._kill(signal.SIGKILL)
            self._guard.wait()
            for stream in (self._guard.stdin, self._guard.stdout):
                cast("IO[bytes]", stream).close()
            self._waiters.shutdown(wait=False)
            self._writer.shutdown(wait=False, cancel_futures=True)
        if self._code == 0 and self._signal is not None:
            return 128 + self._signal
        return self._code

    # ------------------------------------------------------------------ ranks

    async def _watch(self) -> None:
        """Start all ranks and wait until they and their output have ended."""
        ended: list[asyncio.Task[None]] = []
        pumps: list[asyncio.Task[None]] = []
        try:
            for rank in range(self._plan.world_size):
                process = self._start(rank)
                self._ranks.append(_Rank(rank, process))
                ended.append(self._loop.create_task(self._wait(self._ranks[-1])))
                for stream, sink in ((process.stdout, self._out), (process.stderr, self._err)):
                    source = Source(sink, b"[rank %d] " % rank if self._prefix else b"")
                    pump = self._pump(cast("IO[bytes]", stream), source)
                    pumps.append(self._loop.create_task(pump))
            await asyncio.gather(*ended)
        except BaseException:
            self._kill(signal.SIGKILL)
            raise
        finally:
            if self._ending is not None:
                self._ending.cancel()
        # What the ranks left running in their group would hold the output open.
        self._kill(signal.SIGKILL)
        await self._drain(pumps)

    async def _drain(self, pumps: list[asyncio.Task[None]]) -> None:
        """Let the last output through, at our reader's pace; silence beyond `_DRAIN` is the end."""
        pending = set(pumps)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=_DRAIN / 4)
            now = time.monotonic()
            for task in pending:
                if now - self._reading.get(task, now) > _DRAIN:
                    task.cancel()

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        listener = self._plan.listener if rank == 0 else None
        fd = None if listener is None else listener.fileno()
        environ = {**os.environ, **self._plan.variables(rank, fd), "PYTHONUNBUFFERED": "1"}
        environ["RUDA_TRACE_SIGNAL"] = "1"  # SIGUSR2 makes a rank write its flight record
        if self._trace_dir is not None:
            environ["RUDA_TRACE_DIR"] = str(self._trace_dir)
        relay = rank == 0 and is_terminal(sys.stdin)
        if rank or sys.stdin is None:
            stdin: int | None = subprocess.DEVNULL
        else:
            stdin = subprocess.PIPE if relay else None
        try:
            process = subprocess.Popen(
                self._command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environ,
                pass_fds=() if fd is None else (fd,),
                process_group=self._guard.pid,
            )
        except OSError as error:
            raise ConfigError(f"cannot start {self._command[0]!r}: {error.strerror or error}") from None
        if relay:
            target = cast("IO[bytes]", process.stdin)
            threading.Thread(target=relay_terminal, args=(target,), daemon=True).start()
        return process

    async def _wait(self, rank: _Rank) -> None:
        code = await self._loop.run_in_executor(self._waiters, rank.process.wait)
        if code == 0:
            return
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
        if self._keep_going and rank.rank:
            if self._ending is None and self._signal is None:
                await self._note(f"rank {rank.rank} {how}; the others go on")
            return
        if self._code == 0:
            self._code = 128 - code if code < 0 else code
        if self._ending is None:
            others = "" if self._plan.world_size == 1 else "; ending the other ranks"
            self._end(signal.SIGTERM)
            await self._note(f"rank {rank.rank} {how}{others}")

    def _end(self, first: signal.Signals) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._end_in_steps(first))

    async def _end_in_steps(self, first: signal.Signals) -> None:
        """Ask, then insist."""
        steps = (signal.SIGINT, signal.SIGTERM) if first == signal.SIGINT else (first,)
        for number in steps:
            self._kill(number)
            await asyncio.sleep(self._grace)
        late = ", ".join(str(rank.rank) for rank in self._ranks if rank.process.returncode is None)
        if late:
            # On its own: killing waits for nobody who reads us.
            text = f"rank {late} did not end within {self._grace:g} s of {steps[-1].name} and is killed"
            self._farewell = self._loop.create_task(self._note(text))
        self._kill(signal.SIGKILL)

    def _kill(self, number: signal.Signals) -> None:
        """Signal all ranks and what they started. SIGKILL also ends the guard."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._guard.pid, number)
        for rank in self._ranks:  # and those that left the group
            if rank.process.returncode is None and not self._in_group(rank):
                with contextlib.suppress(OSError):
                    rank.process.send_signal(number)

    def _in_group(self, rank: _Rank) -> bool:
        try:
            return os.getpgid(rank.process.pid) == self._guard.pid
        except OSError:
            return True

    # ------------------------------------------------------------------ signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass signals on while ranks run. Outside the main thread they are the program's own affair."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        former = {number: signal.getsignal(number) for number in numbers}
        former = {
            number: handler for number, handler in former.items() if handler not in (None, signal.SIG_IGN)
        }
        for number in former:
            self._loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number, handler in former.items():
                self._loop.remove_signal_handler(number)
                signal.signal(number, handler)

    def _on_signal(self, number: signal.Signals) -> None:
        """Once: pass it on. Again, or while ranks are being ended already: kill. A third time: be gone."""
        self._signals_seen += 1
        self._signal = self._signal or number
        if self._signals_seen > 2:
            self._kill(signal.SIGKILL)
            os._exit(128 + number)
        if self._ending is None:
            self._end(number)
        else:
            self._kill(signal.SIGKILL)

    # ------------------------------------------------------------------ output

    async def _pump(self, stream: IO[bytes], source: Source) -> None:
        """Pass on one stream of one rank."""
        reader = asyncio.StreamReader(limit=_READ)
        transport, _ = await self._loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), stream
        )
        lines = Lines(plain=not source.prefix)
        task = asyncio.current_task()
        try:
            while True:
                self._reading[task] = now = time.monotonic()
                data: bytes | None = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(lines.patience(now)):
                        data = await reader.read(_READ)
                del self._reading[task]
                if data == b"":
                    break
                now = time.monotonic()
                await self._show(source, lines.overdue(now) if data is None else lines.feed(data, now))
            await self._show(source, lines.finish(), last=True)
        finally:
            transport.close()

    async def _show(self, source: Source, data: bytes, last: bool = False) -> None:
        def write() -> None:
            self._screen.show(source, data)
            if last:
                self._screen.end_line(source)

        if not data and not last:
            return
        try:
            await self._loop.run_in_executor(self._writer, write)
        except OSError as error:
            # Nobody reads us any more (``| head``). What the sink still holds has to go somewhere at exit.
            with contextlib.suppress(OSError, AttributeError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), source.sink.fileno())
            if self._code == 0 and self._ending is None:
                self._code = 128 + signal.SIGPIPE
                self._end(signal.SIGTERM)
                if not isinstance(error, BrokenPipeError) and source.sink is not self._err:
                    await self._note(f"cannot write the output: {error.strerror}; ending the ranks")

    async def _note(self, text: str) -> None:
        await self._show(self._notes, f"ruda-async: {text}\n".encode())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
