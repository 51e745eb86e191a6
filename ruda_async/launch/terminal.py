"""The launcher's own standard streams, whatever they are."""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import sys
import time
from typing import IO, BinaryIO, TextIO, cast

__all__ = ["binary_stream", "is_terminal", "relay_terminal"]


def binary_stream(stream: object) -> BinaryIO:
    """The bytes under a text stream (or what stands in for one, as in a notebook)."""
    buffer = getattr(stream, "buffer", None)
    return cast("BinaryIO", _Decoding(cast("TextIO", stream)) if buffer is None else buffer)


class _Decoding:
    """Bytes to a stream that takes only text."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, data: bytes) -> None:
        if self._stream is not None:
            self._stream.write(self._decoder.decode(data))

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody types into this stream."""
    try:
        return stream is not None and os.isatty(stream.fileno())
    except (OSError, ValueError):
        return False


def relay_terminal(target: IO[bytes]) -> None:
    """Type what is typed here to rank 0, which is not in the terminal's foreground and cannot read it.

    A launcher in the background leaves the terminal to whoever is in front.
    """
    fd = sys.stdin.fileno()
    with contextlib.suppress(OSError, ValueError):
        while True:
            select.select((fd,), (), ())
            if os.tcgetpgrp(fd) != os.getpgrp():
                time.sleep(0.2)
                continue
            data = os.read(fd, 4096)
            if not data:
                break
            target.write(data)
            target.flush()
    with contextlib.suppress(OSError):
        target.close()
