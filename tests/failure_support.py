"""Ranks as processes that may be killed and stopped. Those that outlive a test serve the next one too."""

from __future__ import annotations

import atexit
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIGCONT, SIGSTOP
from time import monotonic
from typing import Any

PROGRAM = str(Path(__file__).with_name("failure_ranks.py"))
#: Ranks between two jobs: starting a process takes longer than most jobs.
_idle: list[Rank] = []


class Rank:
    """A process that does one rank's part of a job; see `failure_ranks`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self._read = b""
        self._lost = self._stopped = False

    def begin(self, url: str, rank: int, world: int, options: dict[str, Any]) -> None:
        """Give it a job."""
        self._write(repr((url, rank, world, options)))

    def words(self, limit: float = 50) -> list[str]:
        """The next line that it prints; nothing where it has ended, or says nothing for `limit` seconds."""
        assert self._process.stdout is not None
        end = monotonic() + limit
        while b"\n" not in self._read:
            if not select.select([self._process.stdout], [], [], max(end - monotonic(), 0))[0]:
                return []
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                return []
            self._read += read
        line, self._read = self._read.split(b"\n", 1)
        return line.decode().split()

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()
        self._lost = True

    def stop(self) -> None:
        """Let it stand still."""
        self._process.send_signal(SIGSTOP)
        self._stopped = True

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(SIGCONT)
        self._stopped = False

    def leave(self) -> int:
        """Tell it to end after its job; its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.wait()

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        self._lost = True
        return self._process.wait(30)

    def end(self) -> None:
        """Begin to give up its job."""
        if not self._lost:
            self._write("end")

    def is_idle(self, limit: float = 10) -> bool:
        """Whether it has given up its job and can take another one. Waits for that, if need be."""
        if self._lost or self._stopped:
            return False
        while said := self.words(limit):
            if said == ["idle"]:
                return True
        return False

    def discard(self) -> None:
        """Leave no trace of it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            self._lost = True


@contextmanager
def rank_processes(
    url: str,
    world: int,
    options: Sequence[dict[str, Any]] | dict[str, Any] = (),
    *,
    ready: bool = True,
    keep: bool = True,
) -> Iterator[list[Rank]]:
    """Give a job to so many ranks, with options for all or for each; with `ready`, wait until all are linked.

    Options are `connect`'s, and ``before`` and ``inside``: code that runs before it connects and after, and
    ``size``, the elements that it sums. Without `keep` the processes serve this job alone.
    """
    each = [options] * world if isinstance(options, dict) else [*options, *({} for _ in range(world))][:world]
    ranks = [_idle.pop() for _ in range(world if keep else 0) if _idle]
    fresh = [Rank() for _ in range(world - len(ranks))]
    ranks += fresh
    try:
        for rank in fresh:  # a job's deadline is not for what a process imports
            assert rank.is_idle(50)
        for number, rank in enumerate(ranks):
            rank.begin(url, number, world, each[number])
        for rank in ranks if ready else ():
            said = rank.words()
            assert said[:1] == ["ready"], said
        yield ranks
    finally:
        for rank in ranks:
            rank.end()
        for rank in ranks:
            if keep and rank.is_idle():
                _idle.append(rank)
            else:
                rank.discard()


@atexit.register
def _end() -> None:
    for rank in _idle:
        rank.discard()
