"""One transport made of several, each of which has links to some of the ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, fields, replace
from typing import Any

import msgpack

from ruda_async.transport import (
    Buffer,
    Capabilities,
    Envelope,
    Job,
    ProtocolError,
    Transport,
    never_stale,
    no_peer,
)

from .plan import Plan

__all__ = ["AutoTransport", "merged"]

#: Ranks tell each other their capabilities on it, before the transport is anybody else's.
_TAG = (1 << 64) - 1
_MAX_TOLD = 4096


class AutoTransport:
    """See `ruda_async.transport.Transport`. Ranks have the same numbers in the parts as in the whole.

    Args:
        job: the job that was joined.
        parts: the linked transports by scheme.
        plan: which of them has the link to each rank.
    """

    def __init__(self, job: Job, parts: Mapping[str, Transport], plan: Plan) -> None:
        self.rank = job.rank
        self.world_size = job.world_size
        self.capabilities = merged(part.capabilities for part in parts.values())
        self._job_name = job.name
        self._parts = dict(parts)
        self._plan = plan
        self._is_stale: Callable[[int], bool] = never_stale
        self._closing: asyncio.Task[None] | None = None
        routes = {peer: parts[scheme] for peer, scheme in plan.routes.items()}
        self._sends = {peer: part.send for peer, part in routes.items()}
        self._receives = {peer: part.recv_into for peer, part in routes.items()}
        self._probes = {peer: part.probe for peer, part in routes.items()}
        #: The part that has all links of the job, if one has.
        self._whole = next(iter(parts.values())) if plan.uniform else None
        if len(parts) == 1:  # the one part may as well be called itself
            (only,) = parts.values()
            self.send = only.send  # type: ignore[method-assign]
            self.recv_into = only.recv_into  # type: ignore[method-assign]
            self.probe = only.probe  # type: ignore[method-assign]

    async def agree(self, job: Job) -> None:
        """Tell every rank this one's capabilities, so that all have the same afterwards, and the hosts.

        The algorithms rest on that. It is the first use of every link, too.

        Raises:
            CollectiveTimeoutError, PeerLostError: some rank did not take part.
            ProtocolError: a rank told nonsense.
        """
        told = memoryview(msgpack.packb(astuple(self.capabilities)))
        sends = [self.send(peer, _TAG, (told,)) for peer in self._plan.routes]
        all_told = [self.capabilities]
        silent = job.rank
        try:
            async with asyncio.timeout(job.remaining()):
                for peer in self._plan.routes:
                    silent = peer
                    envelope = await self.probe(peer, _TAG)
                    if envelope.nbytes > _MAX_TOLD:
                        raise ProtocolError(f"rank {peer} told {envelope.nbytes} bytes of itself", rank=peer)
                    data = bytearray(envelope.nbytes)
                    await self.recv_into(peer, _TAG, (memoryview(data),))
                    all_told.append(_unpack(data, peer))
                for peer, sending in zip(self._plan.routes, sends, strict=True):
                    silent = peer
                    await sending
        except TimeoutError:
            raise job.silent(silent, "then said nothing") from None
        self.capabilities = replace(merged(all_told), hosts=self._plan.hosts)

    # ------------------------------------------------------------------ messages

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        """See `Transport.send`."""
        try:
            send = self._sends[peer]
        except KeyError:
            raise no_peer(peer, self.rank, self.world_size) from None
        return send(peer, tag, buffers, head)

    def recv_into(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        """See `Transport.recv_into`."""
        try:
            recv_into = self._receives[peer]
        except KeyError:
            raise no_peer(peer, self.rank, self.world_size) from None
        return recv_into(peer, tag, buffers, head)

    def probe(self, peer: int, tag: int) -> Awaitable[Envelope]:
        """See `Transport.probe`."""
        try:
            probe = self._probes[peer]
        except KeyError:
            raise no_peer(peer, self.rank, self.world_size) from None
        return probe(peer, tag)

    def fail(self, tag: int, error: BaseException) -> list[asyncio.Future[None]]:
        """See `Transport.fail`."""
        return [busy for part in self._parts.values() for busy in part.fail(tag, error) or ()]

    @property
    def is_stale(self) -> Callable[[int], bool]:
        """See `Transport.is_stale`."""
        return self._is_stale

    @is_stale.setter
    def is_stale(self, ask: Callable[[int], bool]) -> None:
        self._is_stale = ask
        for part in self._parts.values():
            part.is_stale = ask

    def __getattr__(self, name: str) -> Any:
        """What a transport may offer beyond the protocol, where one part has all links of the job.

        Else some ranks might see what others do not.
        """
        if name.startswith("_") or self._whole is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._whole, name)

    # ------------------------------------------------------------------ life

    def describe(self) -> dict[str, object]:
        """See `Transport.describe`."""
        routes = self._plan.routes
        return {
            "scheme": "auto",
            "job": self._job_name,
            "rank": self.rank,
            "world_size": self.world_size,
            "links": {
                scheme: [p for p, route in routes.items() if route == scheme] for scheme in self._parts
            },
            "hosts": self.capabilities.hosts,
            "unused": dict(self._plan.unused),
            "transports": {scheme: part.describe() for scheme, part in self._parts.items()},
        }

    def stats(self) -> dict[int, dict[str, int]]:
        """See `Transport.stats`."""
        counters = {peer: found for part in self._parts.values() for peer, found in part.stats().items()}
        return dict(sorted(counters.items()))

    async def close(self) -> None:
        """See `Transport.close`."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(part.close() for part in self._parts.values()))

    def abort(self, reason: str) -> None:
        """See `Transport.abort`."""
        for part in self._parts.values():
            part.abort(reason)


def merged(capabilities: Iterable[Capabilities]) -> Capabilities:
    """What can be said of links that are of several kinds: what holds for each, and the slowest's pace."""
    every = list(capabilities) or [Capabilities()]
    limits = [one.max_message for one in every if one.max_message is not None]
    return Capabilities(
        ordered=all(one.ordered for one in every),
        shared_memory=all(one.shared_memory for one in every),
        device_memory=all(one.device_memory for one in every),
        secure=all(one.secure for one in every),
        notices_loss=all(one.notices_loss for one in every),
        grows=all(one.grows for one in every),
        max_message=min(limits, default=None),
        eager_bytes=min(one.eager_bytes for one in every),
        segment_bytes=max(one.segment_bytes for one in every),
        latency=max(one.latency for one in every),
        bandwidth=min(one.bandwidth for one in every),
    )


def _unpack(data: bytes | bytearray, rank: int) -> Capabilities:
    """The capabilities that rank `rank` told.

    Raises:
        ProtocolError: they are none.
    """
    defaults = Capabilities()
    try:
        values: list[Any] = msgpack.unpackb(data, max_array_len=64)
        told = Capabilities(*values)
        for declared in fields(Capabilities):
            value, usual = getattr(told, declared.name), getattr(defaults, declared.name)
            kind = int if usual is None and value is not None else type(usual)
            if type(value) is not kind:
                raise ValueError(declared.name)
        if told.segment_bytes < 1 or told.eager_bytes < 0 or told.latency <= 0 or told.bandwidth <= 0:
            raise ValueError
        if told.max_message is not None and told.max_message < 1:
            raise ValueError
    except (ValueError, TypeError, msgpack.UnpackException):
        raise ProtocolError(
            f"rank {rank} told nothing of its links; see that all ranks run the same version", rank=rank
        ) from None
    return told
