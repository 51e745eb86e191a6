"""Many programs' output on one terminal: whole lines, each with its rank in front."""

from __future__ import annotations

import os
from typing import BinaryIO

__all__ = ["Lines", "Screen", "Source"]

#: A line that grows beyond this is shown in pieces, so that output without line ends stays bounded.
_MAX_LINE = 64 * 1024
#: Seconds after which an unfinished line (a prompt) is shown as it is.
_PROMPT = 0.2
#: Seconds between two states shown of a line that rewrites itself (a progress bar).
_PROGRESS = 5.0


class Lines:
    """Cuts one stream into what may be shown.

    With ``plain`` all bytes are kept as they are. Otherwise a line that rewrites itself with carriage
    returns is reduced to its last state, as a terminal would show it.
    """

    def __init__(self, plain: bool = False) -> None:
        self._plain = plain
        self._rest = b""
        self._last_progress = 0.0

    def feed(self, data: bytes, now: float) -> bytes:
        """Take what has come; returns the finished lines (or a piece of one that is too long)."""
        if not self._rest:
            self._last_progress = now
        data = self._rest + data
        end = data.rfind(b"\n") + 1
        if len(data) - end > _MAX_LINE:
            end = len(data)
        lines, self._rest = data[:end], data[end:]
        self._forget_states()
        if self._plain or b"\r" not in lines:
            return lines
        return b"\n".join(_last_state(line) for line in lines.split(b"\n"))

    def _forget_states(self) -> None:
        """Forget the states of a rewritten line that nobody will see."""
        if not self._plain and b"\r" in self._rest:
            cursor = b"\r" if self._rest.endswith(b"\r") else b""
            self._rest = b"\r" + _last_state(self._rest) + cursor

    def patience(self, now: float) -> float | None:
        """Seconds until `overdue` should be asked; None while nothing is unfinished."""
        if not self._rest:
            return None
        if self._is_progress():
            return max(0.0, self._last_progress + _PROGRESS - now)
        return _PROMPT

    def overdue(self, now: float) -> bytes:
        """The unfinished line, when its time has come: a prompt as it is, a progress bar as a whole line."""
        if self._is_progress():
            if now < self._last_progress + _PROGRESS:
                return b""
            self._last_progress = now
            state = _last_state(self._rest)
            return state + b"\n" if state else b""
        return self.finish()

    def finish(self) -> bytes:
        """What is left at the end of the stream."""
        rest, self._rest = self._rest, b""
        return rest if self._plain else _last_state(rest)

    def _is_progress(self) -> bool:
        return not self._plain and b"\r" in self._rest


def _last_state(line: bytes) -> bytes:
    """What a terminal shows of a line: the text after the last carriage return that has any after it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class Source:
    """One stream of one rank: where it goes, and what stands before its lines."""

    def __init__(self, sink: BinaryIO, prefix: bytes) -> None:
        self.sink = sink
        self.prefix = prefix
        #: The same for sinks that are one file or terminal.
        self.place = _identity(sink)


class Screen:
    """Writes sources' lines so that none is cut by another. Not thread-safe: call from one thread."""

    def __init__(self) -> None:
        #: By place, the source whose line is not ended yet.
        self._open: dict[object, Source] = {}

    def show(self, source: Source, data: bytes) -> None:
        """Write `data`; an unfinished line of another source is ended first."""
        if not data:
            return
        prefix = source.prefix
        unfinished = self._open.pop(source.place, None)
        if unfinished is not None and unfinished is not source:
            _write(unfinished.sink, b"\n")
        first = b"" if unfinished is source else prefix
        finished = data.endswith(b"\n")
        body = data[:-1] if finished else data
        if not finished:
            self._open[source.place] = source
        _write(source.sink, first + body.replace(b"\n", b"\n" + prefix) + (b"\n" if finished else b""))

    def end_line(self, source: Source) -> None:
        """End the source's line if it is open, as its stream is over. Without a prefix nothing is added."""
        if self._open.get(source.place) is source and source.prefix:
            del self._open[source.place]
            _write(source.sink, b"\n")


def _write(sink: BinaryIO, data: bytes) -> None:
    sink.write(data)
    sink.flush()


def _identity(sink: BinaryIO) -> object:
    try:
        status = os.fstat(sink.fileno())
    except (OSError, ValueError, AttributeError):
        return id(sink)
    return status.st_dev, status.st_ino
