"""What somebody at the terminal sees while the benchmark runs."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from .plan import Group, format_size
from .results import Row

__all__ = ["BarProgress", "LineProgress", "Progress", "terminal_progress"]


class Progress:
    """Shows nothing. Called from several threads, one at a time; a context manager around the run."""

    def begin(self, total: int) -> None:
        """There will be `total` calls of `step`."""

    def group(self, group: Group) -> None:
        """The ranks of `group` are about to start."""

    def step(self, operation: str, nbytes: int) -> None:
        """A case begins."""

    def row(self, row: Row) -> None:
        """A result is there."""

    def note(self, text: str) -> None:
        """Something was left out."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The run is over."""


def _words(operation: str, nbytes: int) -> str:
    return f"{operation} {format_size(nbytes)}" if nbytes else operation


class LineProgress(Progress):
    """A line for each step on standard error."""

    def __init__(self) -> None:
        self._total = self._done = 0
        self._where = ""

    def begin(self, total: int) -> None:
        """As `Progress.begin`."""
        self._total = total

    def group(self, group: Group) -> None:
        """As `Progress.group`."""
        self._where = f"{group.world} ranks as {group.placement}"

    def step(self, operation: str, nbytes: int) -> None:
        """As `Progress.step`."""
        self._done += 1
        print(
            f"[{self._done}/{self._total}] {_words(operation, nbytes)}, {self._where}",
            file=sys.stderr,
            flush=True,
        )

    def note(self, text: str) -> None:
        """As `Progress.note`."""
        print(text, file=sys.stderr, flush=True)


class BarProgress(Progress):
    """A bar, by rich."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars: Any = Bars(*columns, console=Console(stderr=True), transient=True)
        self._task: Any = None
        self._where = ""
        self._running = False

    def begin(self, total: int) -> None:
        """As `Progress.begin`."""
        self._task = self._bars.add_task("starting", total=total)

    def group(self, group: Group) -> None:
        """As `Progress.group`."""
        self._where = f"{group.world} ranks as {group.placement}"
        self._bars.update(self._task, description=f"starting {self._where}")

    def step(self, operation: str, nbytes: int) -> None:
        """As `Progress.step`."""
        if self._running:
            self._bars.advance(self._task)
        self._running = True
        self._bars.update(self._task, description=f"{_words(operation, nbytes)}, {self._where}")

    def note(self, text: str) -> None:
        """As `Progress.note`."""
        self._bars.console.print(text, style="yellow", markup=False, highlight=False)

    def __enter__(self) -> BarProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()


def terminal_progress() -> Progress:
    """A bar where somebody looks and rich is installed, else lines."""
    if sys.stderr.isatty():
        try:
            return BarProgress()
        except ImportError:
            pass
    return LineProgress()
