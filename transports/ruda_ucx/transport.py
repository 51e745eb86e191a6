"""The transport: one `Link` per peer over one `Engine`, and a heartbeat over all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ruda_async.transport import (
    Buffer,
    Capabilities,
    CommunicatorClosedError,
    Envelope,
    Job,
    Looking,
    PeerLostError,
    Pulse,
    in_thread,
    never_stale,
    no_peer,
)

from .engine import Engine

if TYPE_CHECKING:
    from . import UcxParameters
    from .link import Link

__all__ = ["UcxTransport"]


class UcxTransport:
    """One rank of a job whose peers are reached over UCX. See `ruda_async.transport.Transport`.

    Args:
        job: the job that was joined.
        engine: its UCX worker; None where this rank is alone.
        capabilities: with ``eager_bytes`` as in the job's parameters.
        facts: what `describe` says beyond the common.
    """

    def __init__(
        self, job: Job, engine: Engine | None, capabilities: Capabilities, facts: Mapping[str, object]
    ) -> None:
        parameters: UcxParameters = job.parameters
        self.rank = job.rank
        self.world_size = job.world_size
        self.capabilities = capabilities
        self.loop = asyncio.get_running_loop()
        self.is_stale: Callable[[int], bool] = never_stale
        self._engine = engine
        self._facts = dict(facts)
        self._job_name = job.name
        self._heartbeat = parameters.heartbeat
        self._linger = parameters.linger
        self._closed: CommunicatorClosedError | None = None
        self._closing: asyncio.Task[None] | None = None
        self._released = False
        self._links: dict[int, Link] = {}
        self.pulse = Pulse(self.loop, parameters.heartbeat)
        self._beat: asyncio.TimerHandle | None = None

    def drive_instead(self, engine: Engine) -> None:
        """Give up the UCX worker, and take this one; before `link`."""
        assert self._engine is not None
        free, self._engine = self._engine.release([]), engine
        Engine.free_aside(free)

    def link(self, links: Mapping[int, Link]) -> None:
        """The links are made; called once, before the first message."""
        self._links = dict(links)
        if self._heartbeat and self._links:
            self.pulse.start()
            self._schedule_beat()

    def on_control(self, rank: int, data: bytearray) -> None:
        """A small message has come from `rank`."""
        link = self._links.get(rank)
        if link is not None:
            link.on_frame(data)

    def stale(self, tag: int) -> bool:
        """Whether messages of `tag` are of no use any more."""
        return self.is_stale(tag)

    # ------------------------------------------------------------------ messages

    def _to(self, peer: int) -> Link:
        try:
            return self._links[peer]
        except KeyError:
            raise no_peer(peer, self.rank, self.world_size) from None

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        """See `Transport.send`."""
        return self._to(peer).outgoing.send(tag, buffers, head)

    def recv_into(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        """See `Transport.recv_into`."""
        return self._to(peer).incoming.recv_into(tag, buffers, head)

    def probe(self, peer: int, tag: int) -> Awaitable[Envelope]:
        """See `Transport.probe`."""
        link = self._to(peer)
        return Looking.unless_ready(link.inbox.probe(tag), link.incoming.look)

    def fail(self, tag: int, error: BaseException) -> list[asyncio.Future[None]]:
        """See `Transport.fail`: UCX cannot be stopped in the middle of a part that it is copying."""
        return [busy for link in self._links.values() for busy in link.fail_tag(tag, error)]

    # ------------------------------------------------------------------ heartbeat

    def _schedule_beat(self) -> None:
        self._beat = self.loop.call_later(self._heartbeat / 2, self._on_beat)

    def _on_beat(self) -> None:
        """Every half heartbeat: show life, and look who shows none."""
        heartbeat, engine = self._heartbeat, self._engine
        assert engine is not None  # a rank without peers has no heartbeat
        # If this loop was held up, or what comes in is too much for it, what peers sent meanwhile is still
        # unread (UCX has one queue for all of them): do not judge them by it.
        late = self.pulse.beat() or not engine.caught_up
        engine.caught_up = False
        for peer, link in self._links.items():
            if link.over.done():
                continue
            link.outgoing.ping()
            if link.incoming.heard or late:
                link.missed = 0
            else:
                link.missed += 1
            link.incoming.heard = False
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
            "heartbeat": self._heartbeat,
        }

    def stats(self) -> dict[int, dict[str, int]]:
        """See `Transport.stats`."""
        return {
            peer: {
                "messages_sent": link.outgoing.messages,
                "bytes_sent": link.outgoing.bytes,
                "messages_received": link.incoming.messages,
                "bytes_received": link.incoming.bytes,
                "early_bytes": link.incoming.early_bytes,
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
        end = self.loop.time() + self._linger
        # A receiver in the middle of a message gets the rest of it.
        unfinished = [idle for link in self._links.values() if (idle := link.outgoing.idle()) is not None]
        await self._wait(unfinished, end)
        for link in self._links.values():
            link.outgoing.refuse(error)
            link.say_bye()
            link.inbox.close(error)
        await self._wait([link.over for link in self._links.values() if not link.over.done()], end)
        free = self._drop(error)
        if free is not None:
            await in_thread(free)

    async def _wait(self, futures: list[asyncio.Future[None]], end: float) -> None:
        if futures:
            await asyncio.wait(futures, timeout=max(end - self.loop.time(), 0))

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        free = self._drop(self._shut(f"rank {self.rank} aborted: {reason}"))
        if free is not None:
            Engine.free_aside(free)

    def _shut(self, text: str) -> CommunicatorClosedError:
        if self._closed is None:
            self._closed = CommunicatorClosedError(text)
        if self._beat is not None:
            self._beat.cancel()
        for link in self._links.values():
            link.outgoing.refusal = link.outgoing.refusal or self._closed
        return self._closed

    def _drop(self, error: CommunicatorClosedError) -> Callable[[], None] | None:
        """End all links and stop driving UCX; what is returned frees it, the first time."""
        endpoints = []
        for link in self._links.values():
            link.end(error)
            link.inbox.drop_all()
            endpoints.append(link.outgoing.release())
        if self._engine is None or self._released:
            return None
        self._released = True
        return self._engine.release(endpoints)

    # ------------------------------------------------------------------ set-up

    async def greet(self) -> None:
        """Be heard by every peer over UCX, and hear it.

        Raises:
            PeerLostError, ProtocolError: a rank died meanwhile, or speaks otherwise.
        """
        for link in self._links.values():
            link.outgoing.greet()
        for link in self._links.values():
            await link.met
