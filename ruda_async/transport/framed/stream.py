"""What a plugin provides per peer: a stream of bytes that never blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..base import Buffer

__all__ = ["ByteStream", "Terms"]


class ByteStream(Protocol):
    """Ordered bytes to and from one peer. Used from one event loop.

    A stream may have ``await_either()`` too: as `await_bytes` in a thread that may block, but room to write
    will do as well. Without it a blocking call that has more to write than the stream takes goes on on its
    loop.
    """

    #: Take some bytes off the front of the buffers, joined; returns how many. Raises `BlockingIOError`
    #: when none can be taken now, another `OSError` when the peer cannot be reached any more.
    write: Callable[[Sequence[Buffer | bytes]], int]

    #: Fill the front of a buffer that is not empty; returns how many bytes came, 0 at the end of the
    #: stream. Fewer than asked for means that no more is there now. Raises as `write` does.
    read_into: Callable[[memoryview], int]

    def await_bytes(self) -> bool:
        """Whether a read is worth while: wait for bytes, but for microseconds at most.

        A stream that can look without a system call may spin a little here; one that cannot says True.
        """
        ...

    def on_readable(self, callback: Callable[[], None]) -> None:
        """Call `callback` from the loop whenever there is something to read, or the stream has ended."""
        ...

    def on_writable(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` from the loop whenever bytes can be written; None to stop."""
        ...

    def end(self) -> None:
        """Nothing more is written: the peer reads to the end. May raise `OSError`."""
        ...

    def close(self) -> None:
        """Release everything, at once; no callback is called any more. Harmless twice."""
        ...

    def describe(self) -> str:
        """The peer's address, for people."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What both ends of a stream have to know of each other; exchanged at set-up.

    Attributes:
        eager_bytes: messages beyond this many payload bytes wait until this rank asks for them.
        early_bytes: the budget this rank grants for messages that come before their receive.
    """

    eager_bytes: int
    early_bytes: int
