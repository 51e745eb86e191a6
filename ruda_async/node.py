"""This rank's place in the job: its transport, its channels, and what it knows of its peers.

A node listens to every peer on the control tag. That is how announced failures arrive, and how a lost
peer is noticed: the transport fails the pending receive.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from . import notices
from .call import Operation
from .channel import Channel
from .closed_channels import ClosedChannels
from .errors import (
    CollectiveTimeoutError,
    CommunicatorClosedError,
    ConfigError,
    PeerLostError,
    ProtocolError,
    RudaError,
)
from .heap import Heap
from .observe.flight import FlightRecords
from .observe.logs import log
from .observe.recorder import Recorder, Stats, Transfer
from .patrol import Patrol
from .tags import CONTROL_TAG, SEQUENCES, split_tag
from .transport.base import DONE, Capabilities, TakenBack, Transport
from .transport.regions import Regions
from .tuning.numbers import Numbers, numbers_of, with_numbers

if TYPE_CHECKING:
    from .config import Config
    from .observe.spans import Spans
    from .transport.provider import Provider

__all__ = ["Node", "live_nodes"]

_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


def live_nodes() -> list[Node]:
    """The nodes of this process that are not closed."""
    return [node for node in list(_nodes) if node.closed is None]


class Node:
    """One rank's end of a job. Bound to one event loop and one process."""

    def __init__(self, transport: Transport, config: Config, home: Config) -> None:
        self.transport = transport
        self.config = config
        #: As the user gave it: where new ranks come to. A grown job meets elsewhere.
        self.home = home
        regions: Regions | None = getattr(transport, "regions", None)
        #: Memory that all ranks see, where the transport has such.
        self.heap = None if regions is None else Heap(regions)
        self.capabilities: Capabilities = replace(transport.capabilities, shared_memory=self.heap is not None)
        #: Who runs whole collectives natively; most transports have none.
        self.providers: tuple[Provider, ...] = tuple(getattr(transport, "providers", ()))
        #: Whether tensors in device memory go down as they are. Memory that ranks share is the host's, and a
        #: provider that does not say otherwise takes the host's alone.
        self.device_memory = (
            self.capabilities.device_memory
            and self.heap is None
            and all(getattr(provider, "device_memory", False) for provider in self.providers)
        )
        self.loop = asyncio.get_running_loop()
        self.recorder = Recorder()
        self.flight = FlightRecords(self)
        #: Told of every call where spans are wanted: see `observe.opentelemetry`.
        self.spans: Spans | None = None
        #: Done when rank 0's costs are known here, which `capabilities` then has.
        self.settled: asyncio.Future[None] = self.loop.create_future()
        self.channels: dict[int, Channel] = {}
        #: Peers that died, and why; job ranks.
        self.lost: dict[int, PeerLostError] = {}
        #: Peers that closed their communicators. Calls in flight that need nothing more of them go on.
        self.left: set[int] = set()
        #: Why this node can do no more.
        self.closed: RudaError | None = None
        #: Calls finished since one of them last let the loop turn.
        self._unturned = 0
        #: Called with every ``survivors`` notice: see `recovery`.
        self.on_survivors: Callable[[int, int, int, list[int], bool], None] | None = None
        self._not_open = ClosedChannels()
        self._patrol = Patrol(self)
        #: See to it that a call reports when it waits long, and ends at its deadline.
        self.watch: Callable[[Operation], None] = self._patrol.watch
        self._listeners: list[asyncio.Task[None]] = []
        self._unsent: set[asyncio.Future[None]] = set()
        self._closing: asyncio.Task[None] | None = None
        transport.is_stale = self._is_stale
        _nodes.add(self)

    def start(self, measured: Numbers | None = None) -> None:
        """Begin to listen to the peers; on rank 0, tell them what messages cost.

        Args:
            measured: on rank 0, the costs to go by instead of the transport's declaration.
        """
        for peer in range(self.transport.world_size):
            if peer != self.transport.rank:
                name = f"ruda rank {self.transport.rank} hears {peer}"
                self._listeners.append(self.loop.create_task(self._listen(peer), name=name))
        if self.transport.rank == 0:
            numbers, segment = measured or numbers_of(self.capabilities), self.capabilities.segment_bytes
            self._settle(numbers, segment)
            others = range(1, self.transport.world_size)
            self._tell(others, notices.encode("costs", segment, *numbers))

    def _settle(self, numbers: Numbers, segment_bytes: int) -> None:
        """Go by rank 0's numbers, as all ranks do: they have to choose alike, and to cut alike."""
        self.capabilities = with_numbers(self.capabilities, numbers, segment_bytes)
        if not self.settled.done():
            self.settled.set_result(None)

    async def agree(self, seconds: float) -> None:
        """Wait until rank 0's costs are known here.

        Raises:
            PeerLostError: rank 0 is gone.
            CollectiveTimeoutError: it said nothing in time.
        """
        if not self.settled.done():
            try:
                async with asyncio.timeout(seconds):
                    await self.settled
            except TimeoutError:
                raise CollectiveTimeoutError(
                    f"rank {self.transport.rank} of {self.transport.world_size}: rank 0 linked up and then "
                    "said nothing; its event loop stands still, or it runs another version of ruda-async",
                    missing=(0,),
                ) from None
        self.settled.result()

    def check_loop(self) -> None:
        """Refuse to be used from another event loop than the one that connected.

        Raises:
            CommunicatorClosedError
        """
        if asyncio.get_running_loop() is not self.loop:
            raise CommunicatorClosedError(
                f"rank {self.transport.rank}: this communicator belongs to another event loop; connect on "
                "the loop that uses it, or use ruda_async.sync from other threads"
            )

    # ------------------------------------------------------------------ channels

    def open_channel(self, id: int, name: str, members: tuple[int, ...]) -> Channel:
        """The channel of this number, made when it is not open yet.

        Raises:
            ConfigError: another live channel has the same number.
        """
        if self.closed is not None:
            raise self.closed
        channel = self.channels.get(id)
        if channel is not None:
            if channel.name != name or channel.members != members:
                raise ConfigError(
                    f"the channel names {name!r} and {channel.name!r} hash alike; choose another name"
                )
            return channel
        sequence, failures = self._not_open.open(id)
        channel = Channel(self, id, name, members, sequence)
        channel.announced.update(failures)
        for peer, error in self.lost.items():
            channel.on_lost(peer, error)
        self.channels[id] = channel
        return channel

    def forget(self, channel: Channel) -> None:
        """A channel was closed here."""
        self.channels.pop(channel.id, None)
        self._not_open.close(channel.id, channel.next)

    def _is_stale(self, tag: int) -> bool:
        id, sequence = split_tag(tag)
        channel = self.channels.get(id)
        if channel is not None:
            return channel.is_stale(sequence)
        return self._not_open.is_past(id, sequence)

    def is_due(self) -> bool:
        """Whether it is time to let the loop turn: calls that never have to wait must not starve it."""
        self._unturned += 1
        if self._unturned < 32:
            return False
        self._unturned = 0
        return True

    def report(self, channel: Channel, members: Iterable[int], sequence: int, head: bytes) -> None:
        """Tell `members` that this rank is in call `sequence` of `channel`, or past it (an empty head)."""
        self._tell(members, notices.encode("report", channel.id, sequence, head))

    # ------------------------------------------------------------------ talking to peers

    def announce(self, channel: Channel, sequence: int, failure: notices.Failure) -> None:
        """Tell every rank of `channel` that its call `sequence` has failed."""
        self._tell(channel.members, notices.encode("fail", channel.id, sequence, *failure))

    def tell_survivors(self, peer: int, channel: int, round: int, lost: Iterable[int], final: bool) -> None:
        """One message of the agreement on survivors; see `recovery`."""
        self._tell((peer,), notices.encode("survivors", channel, round, sorted(lost), final))

    def _tell(self, members: Iterable[int], notice: bytes) -> None:
        view = memoryview(notice)
        for peer in members:
            if peer == self.transport.rank or peer in self.lost:
                continue
            try:
                self._keep(self.transport.send(peer, CONTROL_TAG, (view,)))
            except RudaError:
                pass  # that peer is going; its listener will say so

    def _keep(self, sending: Awaitable[None]) -> None:
        """Hold on to a send that could not leave at once."""
        if sending is not DONE:
            task = asyncio.ensure_future(sending, loop=self.loop)
            self._unsent.add(task)
            task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Future[None]) -> None:
        self._unsent.discard(task)
        if not task.cancelled():
            task.exception()

    async def _listen(self, peer: int) -> None:
        """Hear one peer's notices until it is gone."""
        transport = self.transport
        try:
            while True:
                envelope = await transport.probe(peer, CONTROL_TAG)
                if envelope.nbytes > notices.MAX_NOTICE:
                    raise ProtocolError(f"a control message of {envelope.nbytes} bytes", rank=peer)
                data = bytearray(envelope.nbytes)
                with suppress(TakenBack):
                    await transport.recv_into(peer, CONTROL_TAG, (memoryview(data),), envelope.head)
                    self._hear(peer, data)
        except PeerLostError as error:
            if peer == 0 and not self.settled.done():
                self.settled.set_exception(error)
            if error.orderly:
                # What it still owes fails in the transport; calls that it has done its part of go on.
                fields = {"ruda_rank": transport.rank, "ruda_peer": peer}
                log.debug("rank %d: rank %d has left", transport.rank, peer, extra=fields)
                self.left.add(peer)
                for channel in list(self.channels.values()):
                    channel.on_left(peer)
                if self.on_survivors is not None:
                    self.on_survivors(peer, -1, 0, [], False)
            else:
                self._on_lost(peer, error)
        except CommunicatorClosedError:
            pass
        except Exception as error:
            fields = {"ruda_rank": transport.rank, "ruda_peer": peer}
            log.error("rank %d: cannot hear rank %d any more: %s", transport.rank, peer, error, extra=fields)
            lost = PeerLostError(f"rank {peer} is lost: it cannot be heard any more: {error}", rank=peer)
            if peer == 0 and not self.settled.done():
                self.settled.set_exception(lost)
            self._on_lost(peer, lost)

    def _hear(self, peer: int, data: bytearray) -> None:
        kind, fields = notices.decode(data, notices.OF_NODES)
        if kind == "fail":
            id, sequence, *rest = fields
            channel = self.channels.get(id)
            if channel is not None and peer in channel.members:
                channel.on_failure(sequence % SEQUENCES, notices.Failure(*rest))
            elif channel is None:
                failure = notices.Failure(*rest)
                self._not_open.fail(id, sequence % SEQUENCES, failure)
                if failure.code == "timeout":
                    self.flight.trigger(f"rank {peer} gave up on a call of a channel that is not open here")
        elif kind == "report":
            id, sequence, head = fields
            channel = self.channels.get(id)
            if channel is not None and peer in channel.members:
                channel.on_report(channel.members.index(peer), sequence % SEQUENCES, head)
        elif kind == "lost":
            rank, text = fields
            # One that was dropped while it stood still takes the others for lost once it goes on.
            if (
                peer not in self.lost
                and rank != self.transport.rank
                and 0 <= rank < self.transport.world_size
            ):
                self._on_lost(rank, PeerLostError(text, rank=rank))
        elif kind == "costs":
            segment_bytes, *numbers = fields
            if peer == 0 and not self.settled.done():
                self._settle(Numbers(*numbers), segment_bytes)
        elif self.on_survivors is not None:
            id, round, lost, final = fields
            if not all(type(r) is int and 0 <= r < self.transport.world_size for r in lost):
                raise ProtocolError("a survivors notice names ranks that do not exist")
            self.on_survivors(peer, id, round, lost, final)

    # ------------------------------------------------------------------ losing peers

    def _on_lost(self, peer: int, error: PeerLostError) -> None:
        if peer in self.lost or self.closed is not None:
            return
        me = self.transport.rank
        fields = {"ruda_rank": me, "ruda_peer": peer}
        log.warning("rank %d: %s", me, error, extra=fields)
        self.lost[peer] = error
        self.flight.trigger(str(error))
        self._tell(range(self.transport.world_size), notices.encode("lost", peer, str(error)))
        for channel in list(self.channels.values()):
            channel.on_lost(peer, error)
        if self.on_survivors is not None:
            self.on_survivors(peer, -1, 0, [], False)

    # ------------------------------------------------------------------ the end

    async def close(self) -> None:
        """Fail what is in flight, then close the transport in an orderly way. Harmless twice."""
        if self._closing is None:
            self._closing = self.loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        error = CommunicatorClosedError(f"rank {self.transport.rank} closed this communicator")
        self._shut(error)
        try:
            if self._unsent:
                await asyncio.wait(list(self._unsent), timeout=1)
        finally:
            await self.transport.close()
            await self._end_listeners()

    def abort(self, reason: str) -> None:
        """Drop everything at once. Harmless twice."""
        # The links first: peers are to see a lost peer, not one that has cancelled its calls.
        self.transport.abort(reason)
        if self.closed is None:
            self._shut(CommunicatorClosedError(f"rank {self.transport.rank} aborted: {reason}"))

    def _shut(self, error: RudaError) -> None:
        self._patrol.end()
        self.flight.flush()
        for channel in list(self.channels.values()):
            channel.close(error)
        self.closed = error

    async def _end_listeners(self) -> None:
        for task in self._listeners:
            task.cancel()
        if self._listeners:
            await asyncio.gather(*self._listeners, return_exceptions=True)

    # ------------------------------------------------------------------ facts

    def stats(self) -> Stats:
        """Counters of this node and its links; may be called from any thread."""
        operations = self.recorder.operations()
        started = [call.started for call in self.calls_in_flight()]
        return {
            "rank": self.transport.rank,
            "world_size": self.transport.world_size,
            "lost": sorted(self.lost.copy()),
            "channels": len(self.channels),
            "in_flight": len(started),
            "oldest_seconds": monotonic() - min(started) if started else 0.0,
            "completed": sum(o["count"] for o in operations.values()),
            "failed": sum(o["failed"] for o in operations.values()),
            "operations": operations,
            "peers": self.transport.stats(),
        }

    def calls_in_flight(self) -> list[Operation | Transfer]:
        """Collectives, sends and receives that have begun and not ended; from any thread."""
        calls: list[Operation | Transfer] = list(self.recorder.transfers.copy())
        for channel in self.channels.copy().values():
            calls += channel.active.copy().values()
        return calls


def _after_fork() -> None:
    for node in list(_nodes):
        node.closed = CommunicatorClosedError(
            f"this communicator was made in process {os.getppid()} and does not survive a fork; "
            "connect again in the child, or start it with the 'spawn' method"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
