"""What the peer was told of large receives that wait, so that it need not offer their messages first.

The peer may use an announcement for the next large message of its tag. Announcements are counted, and not
bound to the receives that caused them: those may be withdrawn or refused, or take a message whose payload
is here already, and the peer still holds the announcement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .. import wire
from ..matching import Inbox
from .payloads import Inbound

__all__ = ["Announcements"]


class Announcements:
    """The announcements that the peer has not used yet, by tag.

    Args:
        beyond: receives of more bytes than this are announced.
        inbox: where they wait.
        control: sends a frame to the peer.
        flags: that mark the frame as an announcement.
    """

    def __init__(self, beyond: int, inbox: Inbox, control: Callable[[bytes], None], flags: int) -> None:
        self._beyond = beyond
        self._inbox = inbox
        self._control = control
        self._flags = flags
        self._held: dict[int, int] = {}

    def announce(self, tag: int) -> None:
        """A receive of `tag` has begun to wait."""
        held = self._held.get(tag, 0)
        if held < self._inbox.waiting(tag, self._beyond):
            self._held[tag] = held + 1
            self._control(wire.encode(wire.READY, tag, flags=self._flags))

    def take(self, tag: int) -> bool:
        """A message of the peer's uses one up, if the peer holds any."""
        held = self._held.get(tag, 0)
        if held > 1:
            self._held[tag] = held - 1
        elif held:
            del self._held[tag]
        return held > 0

    def give_back(self, tag: int, offered: Iterable[Inbound]) -> None:
        """The peer took back an offer before an announcement reached it: what will it use that for?

        Args:
            offered: messages that the peer has offered and not sent, oldest first.
        """
        for inbound in offered:
            if inbound.tag == tag and not inbound.asked and inbound.nbytes > self._beyond:
                inbound.asked = inbound.presumed = True
                return
        self._held[tag] = self._held.get(tag, 0) + 1

    def forget(self, tag: int) -> None:
        """No message of `tag` is sent any more."""
        self._held.pop(tag, None)
