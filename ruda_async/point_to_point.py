"""Sends and receives between two ranks, matched by peer and tag.

A message says its dtype and shape in its head, so a receiver need not know them. Messages of one
``(peer, tag)`` keep their order. A receive that is cancelled or times out leaves the message for the next.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .collectives.request import decode_fingerprint, fingerprint
from .errors import (
    CollectiveTimeoutError,
    CommunicatorClosedError,
    PeerLostError,
    ProtocolError,
    TensorContractError,
)
from .observe.recorder import Transfer
from .tags import channel_id, tag_of
from .tensors import TensorSpec, adapter_for_call, dtype_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .channel import Channel
    from .tensors import Target, TensorAdapter
    from .transport.base import Envelope

__all__ = ["PointToPoint"]


class PointToPoint:
    """The point-to-point side of one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._tags: dict[int, int] = {}
        self._turns: dict[tuple[int, int], asyncio.Lock] = {}

    async def send(self, value: Any, dest: int, tag: int, timeout: float) -> None:
        """Send a tensor to group rank `dest`."""
        channel = self._channel
        call = f"send to rank {dest} (tag {tag})"
        member, wire_tag = self._address(dest, tag, call)
        try:
            adapter = self._find(value)
            spec = adapter.spec(value)
        except TensorContractError as error:
            raise error.at(f"rank {channel.rank}, {call}", channel.rank) from None
        head = fingerprint("send", spec.dtype, spec.shape)
        transfer = Transfer(channel, "send", dest, tag)
        async with self._bounded(call, (dest,), timeout, transfer):
            data = adapter.read(value)
            transfer.head = head
            transfer.sent = data.nbytes
            await channel.node.transport.send(member, wire_tag, (data,), head)

    async def recv(self, source: int, tag: int, like: Any, out: Any, timeout: float) -> Any:
        """Receive the next tensor that group rank `source` sent with `tag`."""
        channel = self._channel
        call = f"recv from rank {source} (tag {tag})"
        member, wire_tag = self._address(source, tag, call)
        adapter = self._adapter(like, out, call)
        # Receives of one tag are served in the order in which they were called.
        transfer = Transfer(channel, "recv", source, tag)
        async with self._bounded(call, (source,), timeout, transfer), self._turn(member, wire_tag):
            envelope = await channel.node.transport.probe(member, wire_tag)
            transfer.head = envelope.head
            transfer.received = envelope.nbytes
            target = await self._take(source, wire_tag, envelope, adapter, like, out, call)
        return target.finish()

    async def recv_any(self, tag: int, like: Any, out: Any, timeout: float) -> tuple[Any, int]:
        """Receive the next tensor that any other group rank sent with `tag`; it and its source."""
        channel = self._channel
        call = f"recv from any rank (tag {tag})"
        peers = [rank for rank in range(channel.size) if rank != channel.rank]
        if not peers:
            raise TensorContractError(
                f"rank {channel.rank}, {call}: there is no other rank", rank=channel.rank
            )
        for peer in peers:
            _, wire_tag = self._address(peer, tag, call)
        adapter = self._adapter(like, out, call)
        transfer = Transfer(channel, "recv", -1, tag)
        async with (
            self._bounded(call, tuple(peers), timeout, transfer),
            self._first(peers, wire_tag) as (source, envelope),
        ):
            transfer.sequence = (source, tag)
            transfer.head = envelope.head
            transfer.received = envelope.nbytes
            target = await self._take(source, wire_tag, envelope, adapter, like, out, call)
        return target.finish(), source

    @asynccontextmanager
    async def _first(self, peers: list[int], wire_tag: int) -> AsyncIterator[tuple[int, Envelope]]:
        """The first of `peers` whose message is there, inside its turn; the others' turns are given back."""
        channel = self._channel
        probes = {asyncio.ensure_future(self._turn_and_probe(peer, wire_tag)): peer for peer in peers}
        try:
            pending = set(probes)
            found: asyncio.Task[Envelope] | None = None
            while found is None:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                good = [task for task in done if task.exception() is None]
                if not good and not pending:
                    done.pop().result()  # every peer is lost
                found = min(good, key=lambda task: probes[task], default=None)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            yield probes[found], found.result()
        finally:
            for task in probes:
                task.cancel()
            await asyncio.gather(*probes, return_exceptions=True)
            for task, peer in probes.items():
                if not task.cancelled() and task.exception() is None:
                    self._turn(channel.members[peer], wire_tag).release()

    async def _turn_and_probe(self, peer: int, wire_tag: int) -> Envelope:
        """Wait for the next message from `peer`, and keep the turn to take it."""
        member = self._channel.members[peer]
        turn = self._turn(member, wire_tag)
        await turn.acquire()
        try:
            return await self._channel.node.transport.probe(member, wire_tag)
        except BaseException:
            turn.release()
            raise

    def _find(self, value: object) -> TensorAdapter[Any]:
        """The adapter for a tensor, for this call."""
        return adapter_for_call(value, self._channel.node.device_memory)

    def _turn(self, member: int, wire_tag: int) -> asyncio.Lock:
        return self._turns.setdefault((member, wire_tag), asyncio.Lock())

    def _adapter(self, like: Any, out: Any, call: str) -> TensorAdapter[Any]:
        pattern = out if out is not None else like
        try:
            return self._find(np.empty(0) if pattern is None else pattern)
        except TensorContractError as error:
            raise error.at(f"rank {self._channel.rank}, {call}", self._channel.rank) from None

    async def _take(
        self,
        source: int,
        wire_tag: int,
        envelope: Envelope,
        adapter: TensorAdapter[Any],
        like: Any,
        out: Any,
        call: str,
    ) -> Target[Any]:
        """Receive the message that `envelope` announces."""
        channel = self._channel
        spec = self._spec_of(envelope.head, envelope.nbytes, source)
        try:
            if out is not None:
                target = adapter.into(out, spec)
            else:
                target = adapter.allocate(np.empty(0) if like is None else like, spec.shape, spec.dtype)
        except TensorContractError as error:
            raise error.at(f"rank {channel.rank}, {call}", channel.rank) from None
        member = channel.members[source]
        await channel.node.transport.recv_into(member, wire_tag, (target.buffer,), envelope.head)
        return target

    def _address(self, peer: int, tag: int, call: str) -> tuple[int, int]:
        channel = self._channel
        node = channel.node
        if node.closed is not None:
            raise node.closed
        if channel.closed:
            raise CommunicatorClosedError(
                f"channel {channel.name!r} is closed on rank {channel.rank}; {call} refused"
            )
        node.check_loop()
        if isinstance(peer, bool) or not isinstance(peer, int) or not 0 <= peer < channel.size:
            raise TensorContractError(
                f"rank {channel.rank}, {call}: there are ranks 0 to {channel.size - 1}", rank=channel.rank
            )
        if peer == channel.rank:
            raise TensorContractError(
                f"rank {channel.rank}, {call}: a rank does not send to itself; use the tensor",
                rank=channel.rank,
            )
        if isinstance(tag, bool) or not isinstance(tag, int) or tag < 0:
            raise TensorContractError(
                f"rank {channel.rank}, {call}: a tag is an integer from 0 on", rank=channel.rank
            )
        wire_tag = self._tags.get(tag)
        if wire_tag is None:
            wire_tag = self._tags[tag] = tag_of(channel_id(channel.id, "point to point", tag), 0)
        return channel.members[peer], wire_tag

    def _spec_of(self, head: bytes, nbytes: int, source: int) -> TensorSpec:
        said = decode_fingerprint(head)
        if said is None or said.operation != "send" or said.shape is None:
            raise ProtocolError(f"rank {source} sent a message that is no tensor", rank=source)
        size = dtype_of(said.dtype).itemsize
        for n in said.shape:
            size *= n
        if size != nbytes or any(n < 0 for n in said.shape):
            raise ProtocolError(
                f"rank {source} sent {nbytes} bytes as {said.dtype}{list(said.shape)}", rank=source
            )
        return TensorSpec(said.dtype, said.shape)

    @asynccontextmanager
    async def _bounded(
        self, call: str, peers: tuple[int, ...], timeout: float, transfer: Transfer
    ) -> AsyncIterator[None]:
        """Bound a transfer in time, and keep record of it."""
        node = self._channel.node
        recorder, spans = node.recorder, node.spans
        recorder.transfers.add(transfer)
        if spans is not None:
            spans.begin(transfer)
        error: BaseException | None = None
        try:
            async with self._limited(call, timeout, peers):
                yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            recorder.transfers.discard(transfer)
            if error is None:
                recorder.succeeded(transfer)
            else:
                recorder.failed(transfer, error)
            if spans is not None:
                spans.end(transfer, error)

    @asynccontextmanager
    async def _limited(self, call: str, timeout: float, peers: tuple[int, ...]) -> AsyncIterator[None]:
        channel = self._channel
        where = f"rank {channel.rank} of {channel.size}, channel {channel.name!r}, {call}"
        try:
            async with asyncio.timeout(timeout):
                yield
        except PeerLostError as error:
            rank = peers[0] if len(peers) == 1 else self._group_rank(error.rank)
            raise PeerLostError(f"{where}: {error}", rank=rank, orderly=error.orderly) from None
        except TimeoutError:
            text = f"{where}: not finished within timeout={timeout:g} s"
            channel.node.flight.trigger(text)
            raise CollectiveTimeoutError(text, rank=channel.rank, missing=peers) from None

    def _group_rank(self, member: int | None) -> int | None:
        members = self._channel.members
        return members.index(member) if member in members else None
