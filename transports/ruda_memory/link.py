"""The transport itself: one object per rank, delivering straight into its peers' inboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ruda_async.transport import (
    DONE,
    Arrived,
    Buffer,
    Capabilities,
    CommunicatorClosedError,
    Envelope,
    Inbox,
    PeerLostError,
    Receive,
    awaitable,
    copy,
    fail_future,
    gather_bytes,
    never_stale,
    scatter,
)

from .calls import call
from .regions import ProcessRegions

__all__ = ["MemoryTransport"]

#: Bytes copied per turn of the loop: well under a millisecond.
_SLICE = 1024 * 1024


class _Counters:
    """Counters about one peer. Each is written by one side alone, so threads need no lock."""

    __slots__ = (
        "bytes_received",
        "bytes_sent",
        "eager_consumed",
        "eager_sent",
        "messages_received",
        "messages_sent",
    )

    def __init__(self) -> None:
        self.messages_sent = self.bytes_sent = self.messages_received = self.bytes_received = 0
        #: Payload copied ahead of its receive: sent by us, and consumed by us.
        self.eager_sent = self.eager_consumed = 0

    def consume(self, nbytes: int) -> None:
        """An eager payload has found its receive, or was dropped."""
        self.eager_consumed += nbytes


class _Lent:
    """A large message that stays in its sender's memory until the receiver has copied it."""

    __slots__ = ("_home", "_peer", "buffers", "done", "head", "nbytes", "sender_loop")

    def __init__(
        self,
        head: bytes,
        nbytes: int,
        buffers: Sequence[Buffer],
        done: asyncio.Future[None],
        sender_loop: asyncio.AbstractEventLoop,
        home: MemoryTransport,
        peer: int,
    ) -> None:
        self.head = head
        self.nbytes = nbytes
        self.buffers = buffers
        self.done = done
        self.sender_loop = sender_loop
        self._home = home
        self._peer = peer

    @property
    def live(self) -> bool:
        return not self.done.done()

    def deliver(self, receive: Receive) -> None:
        _Transfer(self, receive, self._home, self._peer).step()

    def drop(self) -> None:
        self.release()

    def release(self) -> None:
        """Let the sender go on: its memory is not read any more."""
        call(self.sender_loop, _succeed, self.done)


class _Transfer:
    """Copies a lent message slice by slice on the receiver's loop."""

    def __init__(self, message: _Lent, receive: Receive, home: MemoryTransport, peer: int) -> None:
        self._message = message
        self.receive = receive
        self._home = home
        self._peer = peer
        home.transfers.add(self)
        self._slices = _pairs(message.buffers, receive.buffers)

    def step(self) -> None:
        """Copy one slice and come again, until done or either side gave up."""
        message, receive = self._message, self.receive
        if not receive.live:
            self._home.transfers.discard(self)
            # Withdrawn in the middle: the sender still holds all of it, so the next receive gets it.
            if message.live and receive.future.cancelled() and not self._home.is_stale(receive.tag):
                self._home.inboxes[self._peer].put_back(receive.tag, message)
            else:
                message.drop()
            return
        if not message.live:
            self._home.transfers.discard(self)
            receive.give_up(self._peer)
            return
        for destination, source in self._slices:
            copy(destination, source)
            self._home.loop.call_soon(self.step)
            return
        self._home.transfers.discard(self)
        message.release()
        receive.finish()


def _pairs(sources: Sequence[Buffer], destinations: Sequence[Buffer]) -> Any:
    """Pairs of equally long slices, at most `_SLICE` each, that cover both sides."""
    targets = [memoryview(d) for d in destinations]  # type: ignore[arg-type]
    index = offset = 0
    for source in sources:
        view = memoryview(source)  # type: ignore[arg-type]
        at = 0
        while at < len(view):
            target = targets[index]
            size = min(_SLICE, len(view) - at, len(target) - offset)
            yield target[offset : offset + size], view[at : at + size]
            at += size
            offset += size
            if offset == len(target):
                index, offset = index + 1, 0


def _succeed(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class MemoryTransport:
    """One rank of a job that lives in one process. See `ruda_async.transport.Transport`."""

    def __init__(
        self, rank: int, world_size: int, name: str, capabilities: Capabilities, early_bytes: int
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.capabilities = capabilities
        self.is_stale: Callable[[int], bool] = never_stale
        self.loop = asyncio.get_running_loop()
        self.inboxes = {peer: Inbox(peer, self.loop) for peer in range(world_size) if peer != rank}
        self._name = name
        self._early_limit = early_bytes
        self._eager = capabilities.eager_bytes
        self.peers: Mapping[int, MemoryTransport] = {}
        self.regions = ProcessRegions(self)
        self._counters = {peer: _Counters() for peer in self.inboxes}
        #: Messages of ours that peers have not copied yet: future → (peer, tag).
        self._lent: dict[asyncio.Future[None], tuple[int, int]] = {}
        #: Large messages that are being copied to receives of ours.
        self.transfers: set[_Transfer] = set()
        self._closed: BaseException | None = None

    def link(self, peers: Mapping[int, MemoryTransport]) -> None:
        """All ranks are here; called once, before anybody sends."""
        self.peers = peers

    # ------------------------------------------------------------------ messages

    def send(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        inbox = self.inboxes[peer]
        if self._closed is not None:
            raise self._closed
        if inbox.closed is not None:
            raise inbox.closed
        nbytes = buffers[0].nbytes if len(buffers) == 1 else sum(b.nbytes for b in buffers)
        counters = self._counters[peer]
        counters.messages_sent += 1
        counters.bytes_sent += nbytes
        target = self.peers[peer]
        here = target.loop is self.loop
        waiting = counters.eager_sent - target._counters[self.rank].eager_consumed
        if nbytes <= self._eager and (nbytes == 0 or waiting + nbytes <= self._early_limit):
            counters.eager_sent += nbytes
            if here:
                target._accept_bytes(self.rank, tag, head, buffers, nbytes)
            else:
                data = gather_bytes(buffers) if nbytes else b""
                call(target.loop, target._accept_bytes, self.rank, tag, head, (memoryview(data),), nbytes)
            return DONE
        done: asyncio.Future[None] = self.loop.create_future()
        self._lent[done] = (peer, tag)
        done.add_done_callback(self._lent.pop)
        message = _Lent(head, nbytes, buffers, done, self.loop, target, self.rank)
        call(target.loop, target._accept_lent, self.rank, tag, message)
        return done

    def recv_into(self, peer: int, tag: int, buffers: Sequence[Buffer], head: bytes = b"") -> Awaitable[None]:
        if self._closed is not None:
            raise self._closed
        return awaitable(self.inboxes[peer].post(tag, buffers, head))

    def probe(self, peer: int, tag: int) -> Awaitable[Envelope]:
        if self._closed is not None:
            raise self._closed
        return self.inboxes[peer].probe(tag)

    def fail(self, tag: int, error: BaseException) -> None:
        for inbox in self.inboxes.values():
            inbox.fail(tag, error)
        for transfer in self.transfers:
            if transfer.receive.tag == tag:
                fail_future(transfer.receive.future, error)
        self._take_back(error, lambda _, its_tag: its_tag == tag)

    def _accept_bytes(self, peer: int, tag: int, head: bytes, buffers: Sequence[Buffer], nbytes: int) -> None:
        """A small message from `peer`; runs on this rank's loop."""
        inbox = self.inboxes[peer]
        if inbox.closed is not None:
            return
        counters = self._counters[peer]
        counters.messages_received += 1
        counters.bytes_received += nbytes
        receive = inbox.claim(tag)
        if receive is not None:
            counters.consume(nbytes)
            if not receive.accepts(head, nbytes):
                receive.refuse(peer, head, nbytes)
                return
            if len(buffers) == 1:
                scatter(buffers[0], receive.buffers)  # type: ignore[arg-type]
            elif nbytes:
                scatter(memoryview(gather_bytes(buffers)), receive.buffers)
            receive.finish()
        elif self.is_stale(tag):
            counters.consume(nbytes)
        else:
            inbox.keep(tag, Arrived(head, gather_bytes(buffers), counters.consume))

    def _accept_lent(self, peer: int, tag: int, message: _Lent) -> None:
        """A large message from `peer`; runs on this rank's loop."""
        inbox = self.inboxes[peer]
        if inbox.closed is not None or not message.live:
            return
        counters = self._counters[peer]
        counters.messages_received += 1
        counters.bytes_received += message.nbytes
        receive = inbox.claim(tag)
        if receive is not None:
            if receive.accepts(message.head, message.nbytes):
                message.deliver(receive)
            else:
                receive.refuse(peer, message.head, message.nbytes)
                message.drop()
        elif self.is_stale(tag):
            message.drop()
        else:
            inbox.keep(tag, message)

    # ------------------------------------------------------------------ life

    def describe(self) -> dict[str, object]:
        return {
            "scheme": "memory",
            "job": self._name,
            "rank": self.rank,
            "world_size": self.world_size,
            "threads": len({id(t.loop) for t in self.peers.values()}) > 1,
        }

    def stats(self) -> dict[int, dict[str, int]]:
        return {
            peer: {
                "messages_sent": counters.messages_sent,
                "bytes_sent": counters.bytes_sent,
                "messages_received": counters.messages_received,
                "bytes_received": counters.bytes_received,
                "early_bytes": self.peers[peer]._counters[self.rank].eager_sent - counters.eager_consumed,
            }
            for peer, counters in self._counters.items()
        }

    async def close(self) -> None:
        ours = CommunicatorClosedError(f"rank {self.rank} closed this communicator")
        self._leave(ours, f"rank {self.rank} has closed its communicator", True)

    def abort(self, reason: str) -> None:
        text = f"rank {self.rank} aborted: {reason}"
        self._leave(CommunicatorClosedError(text), text, False)

    def _leave(self, ours: BaseException, theirs: str, orderly: bool) -> None:
        if self._closed is not None:
            return
        self._closed = ours
        for inbox in self.inboxes.values():
            inbox.close(ours)
            inbox.drop_all()
        for transfer in self.transfers:
            fail_future(transfer.receive.future, ours)
        self.regions.close()
        self._take_back(ours, lambda *_: True)
        for peer, transport in self.peers.items():
            if peer != self.rank:
                lost = PeerLostError(theirs, rank=self.rank, orderly=orderly)
                call(transport.loop, transport._peer_left, self.rank, lost)

    def _peer_left(self, peer: int, error: PeerLostError) -> None:
        self.inboxes[peer].close(error)
        self.regions.lose(peer, error)
        self._take_back(error, lambda its_peer, _: its_peer == peer)

    def _take_back(self, error: BaseException, which: Callable[[int, int], bool]) -> None:
        """Fail our sends that nobody has copied yet."""
        for done, (peer, tag) in list(self._lent.items()):
            if which(peer, tag):
                fail_future(done, error)

    def __del__(self) -> None:
        if self._closed is None and self.peers:
            self.abort("its communicator was dropped without close()")
