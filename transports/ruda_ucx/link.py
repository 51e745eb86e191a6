"""One link to one peer: its two halves, what the frames mean, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ruda_async.transport import PeerLostError, ProtocolError, Pulse, Terms, wire

from .incoming import Incoming
from .memory import Accelerator
from .outgoing import DECLINED, Outgoing

if TYPE_CHECKING:
    from . import UcxParameters
    from .engine import Engine

__all__ = ["Link"]

#: What a rank writes on the lifeline before it leaves in order.
_LEAVING = b"bye"


class Link:
    """The link to `peer`.

    Attributes:
        over: done when the link has ended, in whatever way.
        met: done when the peer has been heard of over UCX.
        missed: heartbeats in a row without a sign of life.
    """

    def __init__(
        self,
        peer: int,
        engine: Engine,
        endpoint: Any,
        tag: Any,
        lifeline: socket.socket,
        parameters: UcxParameters,
        terms: Terms,
        accelerator: Accelerator,
        is_stale: Callable[[int], bool],
        pulse: Pulse,
    ) -> None:
        self.peer = peer
        self._pulse = pulse
        self._engine = engine
        self._lifeline = lifeline
        self._loop = asyncio.get_running_loop()
        self.outgoing = Outgoing(peer, engine, endpoint, tag, terms, accelerator, self._failed)
        self.incoming = Incoming(
            peer,
            engine,
            self.outgoing,
            parameters.early_bytes // 4,
            parameters.chunk_bytes,
            accelerator,
            is_stale,
            self._failed,
        )
        self.inbox = self.incoming.inbox
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.met: asyncio.Future[None] = self._loop.create_future()
        self.missed = 0
        self._bye_sent = self._bye = self._leaving = False
        self._loop.add_reader(lifeline.fileno(), self._on_lifeline)

    def fail_tag(self, tag: int, error: BaseException) -> list[asyncio.Future[None]]:
        """See `Transport.fail`."""
        return [*self.incoming.fail(tag, error), *self.outgoing.fail(tag, error)]

    # ------------------------------------------------------------------ frames

    def on_frame(self, data: bytearray) -> None:
        """A small message has come."""
        if self.over.done():
            return
        self.incoming.heard = True
        try:
            self._handle(memoryview(data))
        except ProtocolError as error:
            self.end(PeerLostError(f"rank {self.peer} broke the protocol: {error}", rank=self.peer))

    def _handle(self, view: memoryview) -> None:
        frame = wire.decode_prefix(view)
        body = wire.PREFIX_BYTES + frame.head_bytes
        if len(view) < body:
            raise ProtocolError(f"a frame of {len(view)} bytes says its head has {frame.head_bytes}")
        head = bytes(view[wire.PREFIX_BYTES : body])
        wire.check(frame, view[: wire.PREFIX_BYTES], head)
        kind, payload = frame.kind, view[body:]
        if len(payload) != (frame.payload_bytes if kind == wire.MESSAGE else 0):
            raise ProtocolError(f"a frame of kind {kind} has {len(payload)} bytes of payload")
        if kind == wire.MESSAGE:
            self.incoming.on_message(frame.tag, head, payload)
        elif kind == wire.OFFER:
            self.incoming.on_offer(frame, head)
        elif kind == wire.READY:
            self.outgoing.on_pull(frame.ident, frame.tag, head)
        elif kind == wire.DROP:
            if frame.flags & DECLINED:
                self.outgoing.on_release(frame.ident)
            else:
                self.incoming.on_drop(frame.ident, head)
        elif kind == wire.CREDIT:
            self.outgoing.on_credit(frame.payload_bytes)
        elif kind == wire.BYE:
            self._said_bye()
        elif kind == wire.PING:
            if not self.met.done():
                self.met.set_result(None)
        else:
            raise ProtocolError(f"a frame of kind {kind} is not expected here")

    # ------------------------------------------------------------------ ending

    def say_bye(self) -> None:
        """End this half: nothing more is sent."""
        if self._bye_sent or self.over.done():
            return
        self._bye_sent = True
        with contextlib.suppress(OSError):
            self._lifeline.send(_LEAVING)
        self.outgoing.control(wire.encode(wire.BYE))
        if self._bye:
            self.end(self._left())

    def _said_bye(self) -> None:
        """The peer sends no more, and takes no more; answer in kind."""
        self._bye = True
        gone = self._left()
        self.outgoing.refuse(gone)
        self.incoming.close(gone)
        if self._bye_sent:
            self.end(gone)
        else:
            self.say_bye()

    def _left(self) -> PeerLostError:
        return PeerLostError(f"rank {self.peer} has closed its communicator", rank=self.peer, orderly=True)

    def _on_lifeline(self) -> None:
        """The lifeline has something to tell: the peer leaves, or is gone."""
        try:
            said = self._lifeline.recv(64)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            said = b""
        if said:
            self._leaving = True
            return
        self._loop.remove_reader(self._lifeline.fileno())
        self._gone()

    def _gone(self) -> None:
        """The peer is gone; what had arrived before is read first."""
        if not self._engine.turn():
            self._loop.call_soon(self._gone)
        elif not self.over.done():
            lost = f"rank {self.peer} is lost: {self._pulse.no_goodbye()}"
            self.end(self._left() if self._leaving else PeerLostError(lost, rank=self.peer))

    def _failed(self, status: int) -> None:
        """UCX gave up an operation; an unreachable peer is the only reason that is left to it."""
        if self._leaving:
            self.end(self._left())
        else:
            self.end(PeerLostError(f"rank {self.peer} is lost: UCX status {status}", rank=self.peer))

    def end(self, error: BaseException) -> None:
        """The link is over: fail what waits on it. Small messages that are here stay readable."""
        if self.over.done():
            return
        self.over.set_result(None)
        self.outgoing.end(error)
        self.incoming.close(error)
        self._engine.forget(self.peer)
        if not self.met.done():
            self.met.set_exception(error)
            self.met.exception()
        self._loop.remove_reader(self._lifeline.fileno())
        self._lifeline.close()
