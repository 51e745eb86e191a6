"""What the peer was told of large receives that wait, so that it need not offer their messages first.

The peer may use an announcement for the next large message of its tag: on its arrival for the oldest that it
has offered and not been asked for, later for the next to be sent. Announcements are not bound to the
receives that caused them: those may be withdrawn or refused, or take a message whose payload is here
already, and the peer still holds the announcement.

Each has a moment, as has every word about a single message, for what the peer does with an announcement
depends on what it heard before, not on what it heard since.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
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
        self._moment = 0
        #: Their moments, oldest first; the peer uses them in this order.
        self._held: dict[int, deque[int]] = {}

    def moment(self) -> int:
        """The moment of something that the peer is told now."""
        self._moment += 1
        return self._moment

    def announce(self, tag: int) -> None:
        """A receive of `tag` has begun to wait."""
        held = self._held.get(tag, ())
        if len(held) < self._inbox.waiting(tag, self._beyond):
            self._held.setdefault(tag, deque()).append(self.moment())
            self._control(wire.encode(wire.READY, tag, flags=self._flags))

    def take(self, tag: int) -> int:
        """A message of the peer's uses one up; its moment, or 0 if the peer holds none."""
        held = self._held.get(tag)
        if held is None:
            return 0
        token = held.popleft()
        if not held:
            del self._held[tag]
        return token

    def give_back(self, token: int, tag: int, offered: Iterable[Inbound]) -> None:
        """The peer took back an offer before the announcement `token` reached it: what will it use that for?

        Args:
            offered: messages that the peer has offered and not sent, oldest first.
        """
        for inbound in offered:
            if inbound.tag != tag or inbound.nbytes <= self._beyond:
                continue
            if inbound.token > token:  # for this one, and what was to be used for it for another
                token, inbound.token = inbound.token, token
            elif not inbound.token and (not inbound.asked or inbound.asked_at > token):
                # What it was asked since comes too late, and is not heard.
                inbound.asked = True
                inbound.token = token
                return
        insort(self._held.setdefault(tag, deque()), token)

    def forget(self, tag: int) -> None:
        """No message of `tag` is sent any more."""
        self._held.pop(tag, None)
