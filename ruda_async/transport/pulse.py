"""When this rank last showed life: whoever stands still for long is dropped by its peers, and is to know."""

from __future__ import annotations

import asyncio

__all__ = ["NO_GOODBYE", "Pulse"]

#: How a peer's death looks, however the medium reports it: every rank is to say the same.
NO_GOODBYE = "its connection ended without a goodbye"


class Pulse:
    """The beats of one transport, each half a heartbeat after the last.

    Args:
        heartbeat: seconds, as in the transport's parameters; 0 where it has none.
        grows: whether a rank that was dropped may come again, as `Capabilities.grows` has it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, heartbeat: float, grows: bool = True) -> None:
        self._loop = loop
        self._heartbeat = heartbeat
        self._grows = grows
        #: Who was heard at its last beat is not given up sooner.
        self._patience = 1.5 * heartbeat
        self.start()
        #: The last time that this rank stood still for long: how many seconds, and when it went on.
        self._pause = self._resumed = 0.0

    def start(self) -> None:
        """The first beat is due half a heartbeat from now."""
        self._last = self._loop.time()

    def beat(self) -> bool:
        """This rank shows life; whether it does so late."""
        now = self._loop.time()
        pause, self._last = now - self._last, now
        if pause > self._patience:
            self._pause, self._resumed = pause, now
        return pause > 0.75 * self._heartbeat

    def no_goodbye(self) -> str:
        """What to say of a connection that ended without a goodbye, with what this rank did before it."""
        heartbeat = self._heartbeat
        now = self._loop.time()
        pause = now - self._last  # what was read first after a pause comes before the beat that is due
        if pause <= self._patience and now - self._resumed < 2 * heartbeat:
            pause = self._pause
        if not heartbeat or pause <= self._patience:
            return NO_GOODBYE
        if self._grows:
            again = "take it in again by grow() and connect(join=True) alone"
        else:
            again = "cannot take it in again: end it, and start all ranks anew where they need it"
        return (
            f"{NO_GOODBYE}, after this rank stood still for {pause:.3g} s: the others drop a rank that is "
            f"silent for {self._patience:g} s (heartbeat={heartbeat:g}), so they have likely gone on "
            f"without this one, and {again}"
        )
