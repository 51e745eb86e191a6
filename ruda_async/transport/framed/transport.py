"""The transport: one `Link` per peer, and a heartbeat over all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from ...errors import CommunicatorClosedError, PeerLostError
from ..base import Buffer, Capabilities, Envelope, never_stale, no_peer
from ..job import Job
from ..pulse import Pulse
from ..regions import Regions
from .activity import activity_of
from .link import Link
from .parameters import FramedParameters
from .stream import ByteStream, Terms

__all__ = ["FramedTransport"]


class FramedTransport:
    """One rank of a job whose peers are reached by byte streams. See `ruda_async.transport.Transport`.

    Args:
        job: the job that was joined.
        streams: a stream to every other rank.
        parameters: this rank's; the others were told its `terms`.
        terms: what each other rank told.
        capabilities: with ``eager_bytes`` as in `parameters`.
        facts: what `describe` says beyond the common.
        regions: memory that the ranks share, where there is such.
    """

    def __init__(
        self,
        job: Job,
        streams: Mapping[int, ByteStream],
        parameters: FramedParameters,
        terms: Mapping[int, Terms],
        capabilities: Capabilities,
        *,
        facts: Mapping[str, object],
        regions: Regions | None = None,
    ) -> None:
        self.rank = job.rank
        self.world_size = job.world_size
        self.capabilities = replace(capabilities, grows=capabilities.grows and job.grows)
        self.regions = regions
        self.loop = asyncio.get_running_loop()
        self.is_stale: Callable[[int], bool] = never_stale
        self._facts = dict(facts)
        self._heartbeat = parameters.heartbeat
        self._linger = parameters.linger
        self._job_name = job.name
        self._closed: CommunicatorClosedError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._pulse = Pulse(self.loop, parameters.heartbeat, self.capabilities.grows)
        #: What to say of a peer that went without a goodbye; for a medium that notices it as well.
        self.no_goodbye = self._pulse.no_goodbye
        activity = activity_of(self.loop)
        wrap = job.wrap_stream
        self._links = {
            peer: Link(
                peer,
                stream if wrap is None else wrap(peer, stream),
                parameters.terms,
                terms[peer],
                self.loop,
                activity,
                self._stale,
                self._pulse,
                parameters.checksum,
            )
            for peer, stream in streams.items()
        }
        # The hot calls, by peer, without an object between.
        self._send = {peer: link.sender.send for peer, link in self._links.items()}
        self._recv_into = {peer: link.receiver.recv_into for peer, link in self._links.items()}
        self._beat: asyncio.TimerHandle | None = None
        if self._heartbeat and self._links:
            self._schedule_beat()

    def _stale(self, tag: int) -> bool:
        return self.is_stale(tag)

    # ------------------------------------------------------------------ messages

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        """See `Transport.send`."""
        try:
            send = self._send[peer]
        except KeyError:
            raise no_peer(peer, self.rank, self.world_size) from None
        return send(tag, buffers, head)

    def recv_into(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        """See `Transport.recv_into`."""
        try:
            recv_into = self._recv_into[peer]
        except KeyError:
            raise no_peer(peer, self.rank, self.world_size) from None
        return recv_into(tag, buffers, head)

    def probe(self, peer: int, tag: int) -> Awaitable[Envelope]:
        """See `Transport.probe`."""
        try:
            link = self._links[peer]
        except KeyError:
            raise no_peer(peer, self.rank, self.world_size) from None
        return link.receiver.probe(tag)

    def fail(self, tag: int, error: BaseException) -> None:
        """See `Transport.fail`."""
        for link in self._links.values():
            link.fail_tag(tag, error)

    # ------------------------------------------------------------------ heartbeat

    def _schedule_beat(self) -> None:
        self._beat = self.loop.call_later(self._heartbeat / 2, self._on_beat)

    def _on_beat(self) -> None:
        """Every half heartbeat: show life, and look who shows none."""
        heartbeat = self._heartbeat
        # If this loop was held up, what peers sent meanwhile is still unread: do not judge them by it.
        late = self._pulse.beat()
        for peer, link in self._links.items():
            if link.over.done():
                continue
            link.sender.ping()
            if link.receiver.heard or late:
                link.missed = 0
            else:
                link.missed += 1
            link.receiver.heard = False
            if link.missed >= 3:
                link.end(
                    PeerLostError(
                        f"rank {peer} is lost: silent for {1.5 * heartbeat:g} s (heartbeat={heartbeat:g}); "
                        "its host, its link or its event loop stands still",
                        rank=peer,
                    )
                )
        self._schedule_beat()

    # ------------------------------------------------------------------ life

    def describe(self) -> dict[str, object]:
        """See `Transport.describe`."""
        return {
            **self._facts,
            "job": self._job_name,
            "rank": self.rank,
            "world_size": self.world_size,
            "peers": {peer: link.stream.describe() for peer, link in self._links.items()},
            "heartbeat": self._heartbeat,
        }

    def stats(self) -> dict[int, dict[str, int]]:
        """See `Transport.stats`."""
        return {
            peer: {
                "messages_sent": link.sender.messages,
                "bytes_sent": link.sender.bytes,
                "messages_received": link.receiver.messages,
                "bytes_received": link.receiver.bytes,
                "early_bytes": link.receiver.early_bytes,
            }
            for peer, link in self._links.items()
        }

    async def close(self) -> None:
        """See `Transport.close`."""
        if self._closing is None:
            self._closing = self.loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        error = self._shut(f"rank {self.rank} closed this communicator")
        for link in self._links.values():
            link.sender.say_bye("closed")
            link.inbox.close(error)
        waiting = [link.over for link in self._links.values() if not link.over.done()]
        if waiting:
            await asyncio.wait(waiting, timeout=self._linger)
        self._drop(error)

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        self._drop(self._shut(f"rank {self.rank} aborted: {reason}"))

    def _shut(self, text: str) -> CommunicatorClosedError:
        if self._closed is None:
            self._closed = CommunicatorClosedError(text)
        if self._beat is not None:
            self._beat.cancel()
        for link in self._links.values():
            link.sender.refusal = link.sender.refusal or self._closed
        return self._closed

    def _drop(self, error: CommunicatorClosedError) -> None:
        for link in self._links.values():
            link.end(error)
            link.inbox.drop_all()
        if self.regions is not None:
            self.regions.close()
