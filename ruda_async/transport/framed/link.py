"""One link to one peer: a sender, a receiver, and how both end.

Small messages leave with one write and are copied once on arrival. Large ones are offered; the receiver
says when it is ready (or has said so already, when it posted its receive first) and their payload then
moves in parts between the two callers' memories, interleaved with whatever else the pair sends. A
receiver therefore never has to stop reading, and no message can hold up another.

Small messages that come before their receive count against a budget that the receiver grants; when it is
used up, they too are offered first. So early messages take bounded memory, without a way to deadlock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ...errors import PeerLostError, ProtocolError
from ..pulse import Pulse
from .activity import Activity
from .receiver import Receiver
from .sender import Sender
from .stream import ByteStream, Terms

__all__ = ["Link"]


class Link:
    """The link to `peer`.

    Attributes:
        over: done when the link has ended, in whatever way.
        missed: heartbeats in a row without a sign of life.
    """

    def __init__(
        self,
        peer: int,
        stream: ByteStream,
        ours: Terms,
        theirs: Terms,
        loop: asyncio.AbstractEventLoop,
        activity: Activity,
        is_stale: Callable[[int], bool],
        pulse: Pulse,
        checksum: bool = False,
    ) -> None:
        self.peer = peer
        self._pulse = pulse
        self.stream = stream
        self.sender = Sender(stream, theirs, loop, activity, self._broken, checksum)
        self.receiver = Receiver(
            peer, stream, ours, self.sender, loop, activity, is_stale, self._said_bye, self._ended, checksum
        )
        self.sender.look = self.receiver.look
        self.inbox = self.receiver.inbox
        self.over: asyncio.Future[None] = loop.create_future()
        self.missed = 0
        self._bye = False
        stream.on_readable(self.receiver.read)

    def fail_tag(self, tag: int, error: BaseException) -> None:
        """See `Transport.fail`."""
        self.receiver.fail(tag, error)
        self.sender.fail(tag, error)

    def _said_bye(self, reason: str) -> None:
        """The peer sends no more, and takes no more; answer in kind."""
        self._bye = True
        gone = self._left()
        self.inbox.close(gone)
        self.sender.on_bye(gone)
        self.sender.say_bye("")

    def _left(self) -> PeerLostError:
        return PeerLostError(f"rank {self.peer} has closed its communicator", rank=self.peer, orderly=True)

    def _ended(self, error: Exception | None) -> None:
        """The incoming bytes are over."""
        peer = self.peer
        if isinstance(error, ProtocolError):
            self.end(PeerLostError(f"rank {peer} broke the protocol: {error}", rank=peer))
        elif isinstance(error, OSError):
            self._broken(error)
        elif self._bye:
            self.end(self._left())
        else:
            self.end(PeerLostError(f"rank {peer} is lost: {self._pulse.no_goodbye()}", rank=peer))

    def _broken(self, error: OSError) -> BaseException:
        """The stream failed; why, for who asked."""
        peer = self.peer
        # A peer that dies with bytes unread resets the connection: the same death, so in the same words.
        died = isinstance(error, ConnectionError)
        reason = self._pulse.no_goodbye() if died else error.strerror or str(error)
        lost = PeerLostError(f"rank {peer} is lost: {reason}", rank=peer)
        why = self._left() if self._bye else lost
        self.end(why)
        return self.sender.refusal or why

    def end(self, error: BaseException) -> None:
        """The link is over: fail what waits on it. Messages that are here stay readable."""
        if self.over.done():
            return
        self.over.set_result(None)
        self.sender.end(error)
        self.stream.close()
        self.receiver.end(error)
