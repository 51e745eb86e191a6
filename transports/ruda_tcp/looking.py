"""Waiting for a socket in a thread that may block."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

from ruda_async.transport import Spin

__all__ = ["Lookout", "spin_of"]


def spin_of(asked: float, sockets: Mapping[int, socket.socket]) -> float:
    """Seconds to look before sleeping in a blocking call; -1 asks for what suits the ranks of this host."""
    local = sum(sock.getsockname()[0] == sock.getpeername()[0] for sock in sockets.values())
    return Spin.of(asked, 1 + local).blocking


class Lookout:
    """Looks whether a socket has something to read.

    Args:
        spin: seconds to look before sleeping.
    """

    def __init__(self, sock: socket.socket, spin: float) -> None:
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        self._poll = poller.poll
        either = select.poll()
        either.register(sock, select.POLLIN | select.POLLOUT)
        self._either = either.poll
        self._spin = spin

    def wait(self, seconds: float) -> bool:
        """Wait so long at most; whether there is something to read, or the end."""
        return self._look(self._poll, seconds)

    def wait_either(self, seconds: float) -> bool:
        """As `wait`, but room to write will do as well."""
        return self._look(self._either, seconds)

    def _look(self, poll: Callable[[float], Sequence[object]], seconds: float) -> bool:
        if poll(0):
            return True
        if self._spin:
            end = perf_counter() + self._spin
            while perf_counter() < end:
                if poll(0):
                    return True
        return bool(poll(seconds * 1000))
