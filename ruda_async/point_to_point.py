"""Sends and receives between two ranks, matched by peer and tag.

A message says its dtype and shape in its head, so a receiver need not know them. Messages of one
``(peer, tag)`` keep their order. A receive that is cancelled, times out, or is refused for its `out` leaves
the message for the next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from .collectives.request import decode_fingerprint, fingerprint
from .errors import (
    CollectiveTimeoutError,
    CommunicatorClosedError,
    PeerLostError,
    ProtocolError,
    RudaError,
    TensorContractError,
)
from .fresh import allocate
from .notices import left_in_call, lost_in_call
from .observe.recorder import Transfer
from .tags import channel_id, tag_of
from .tensors import TensorSpec, adapter_for_call, dtype_of
from .transport.base import TakenBack
from .unclaimed import Unclaimed
from .within import Within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .channel import Channel
    from .tensors import Target, TensorAdapter
    from .transport.base import Envelope

__all__ = ["PointToPoint"]

#: So many tags are kept with their wire tags: a server may use each tag for one request alone.
_TAGS = 1024


class _Turn:
    """Receives of one peer and tag take turns, in the order in which they were called."""

    __slots__ = ("_next", "taken")

    def __init__(self) -> None:
        self.taken = False
        self._next: deque[asyncio.Future[None]] = deque()

    async def take(self, deadline: float, transfer: Transfer) -> None:
        """Wait for the turn.

        Raises:
            TimeoutError, PeerLostError
        """
        if not self.taken:
            self.taken = True
            return
        while self._next and self._next[-1].done():
            self._next.pop()  # receives that timed out one after the other must not pile up
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._next.append(turn)
        try:
            await Within(turn, deadline, transfer)
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.give_back()  # it came, but too late
            raise

    def give_back(self) -> None:
        """The turn is over."""
        while self._next:
            turn = self._next.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.taken = False


class PointToPoint:
    """The point-to-point side of one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._tags: dict[int, int] = {}
        self._turns: dict[tuple[int, int], _Turn] = {}
        self._unclaimed = Unclaimed(channel.node.transport)
        #: Whose message `recv_any` took last: the next of those that are ready has its turn.
        self._last = channel.size - 1

    async def send(self, value: Any, dest: int, tag: int, timeout: float) -> None:
        """Send a tensor to group rank `dest`."""
        channel = self._channel
        member, wire_tag = self._address("send", dest, tag)
        transfer = Transfer(channel, "send", dest, tag)
        try:
            adapter = self._find(value)
            spec = adapter.spec(value)
        except TensorContractError as error:
            raise error.at(self._where(transfer), channel.rank) from None
        transfer.head = head = fingerprint("send", spec.dtype, spec.shape)
        self._begin(transfer)
        try:
            data = adapter.read(value)
            transfer.sent = data.nbytes
            deadline = transfer.started + timeout
            await Within(channel.node.transport.send(member, wire_tag, (data,), head), deadline, transfer)
        except BaseException as error:
            self._failed(transfer, error, timeout, (dest,))
        self._succeeded(transfer)
        if channel.node.is_due():
            await asyncio.sleep(0)

    async def recv(self, source: int, tag: int, like: Any, out: Any, timeout: float) -> Any:
        """Receive the next tensor that group rank `source` sent with `tag`."""
        channel = self._channel
        member, wire_tag = self._address("recv", source, tag)
        transfer = Transfer(channel, "recv", source, tag)
        adapter = self._adapter(like, out, transfer)
        self._begin(transfer)
        try:
            deadline = transfer.started + timeout
            turn = self._turn(member, wire_tag)
            await turn.take(deadline, transfer)
            target = None
            try:
                if channel.node.is_due():  # before there is a result, which a cancelled task would lose
                    await asyncio.sleep(0)
                while target is None:
                    probing = self._unclaimed.probe(member, wire_tag)
                    envelope = await Within(probing, deadline, transfer)
                    target = await self._take(transfer, wire_tag, envelope, adapter, like, out, deadline)
            finally:
                self._give_back(turn, member, wire_tag)
            result = target.finish()
        except BaseException as error:
            self._failed(transfer, error, timeout, (source,))
        self._succeeded(transfer)
        return result

    async def recv_any(self, tag: int, like: Any, out: Any, timeout: float) -> tuple[Any, int]:
        """Receive the next tensor that any other group rank sent with `tag`; it and its source."""
        channel = self._channel
        transfer = Transfer(channel, "recv", -1, tag)
        peers = [rank for rank in range(channel.size) if rank != channel.rank]
        if not peers:
            raise TensorContractError(f"{self._where(transfer)}: there is no other rank", rank=channel.rank)
        for peer in peers:
            _, wire_tag = self._address("recv", peer, tag)
        adapter = self._adapter(like, out, transfer)
        deadline = transfer.started + timeout
        self._begin(transfer)
        target = None
        try:
            while target is None:
                transfer.sequence = (-1, tag)
                async with self._first(peers, wire_tag, deadline, transfer) as (source, envelope):
                    transfer.sequence = (source, tag)
                    target = await self._take(transfer, wire_tag, envelope, adapter, like, out, deadline)
            result = target.finish()
        except BaseException as error:
            self._failed(transfer, error, timeout, tuple(peers))
        self._succeeded(transfer)
        return result, source

    @asynccontextmanager
    async def _first(
        self, peers: list[int], wire_tag: int, deadline: float, transfer: Transfer
    ) -> AsyncIterator[tuple[int, Envelope]]:
        """The first of `peers` whose message is there, inside its turn; the others' turns are given back."""
        channel = self._channel
        start = asyncio.ensure_future
        probes = {start(self._turn_and_probe(peer, wire_tag, deadline, transfer)): peer for peer in peers}
        try:
            pending = set(probes)
            found: asyncio.Task[Envelope] | None = None
            while found is None:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                good = [task for task in done if task.exception() is None]
                if not good and not pending:
                    done.pop().result()  # every peer is lost
                found = min(
                    good, key=lambda task: (probes[task] - self._last - 1) % channel.size, default=None
                )
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            self._last = probes[found]
            yield probes[found], found.result()
        finally:
            for task in probes:
                task.cancel()
            try:
                # Once a message is taken they all have ended, and nothing is waited for any more.
                if unended := [task for task in probes if not task.done()]:
                    await asyncio.gather(*unended, return_exceptions=True)
            finally:  # though this is cancelled again; those that have not ended give theirs back themselves
                for task, peer in probes.items():
                    if task.done() and not task.cancelled() and task.exception() is None:
                        member = channel.members[peer]
                        self._give_back(self._turn(member, wire_tag), member, wire_tag)

    async def _turn_and_probe(
        self, peer: int, wire_tag: int, deadline: float, transfer: Transfer
    ) -> Envelope:
        """Wait for the next message from `peer`, and keep the turn to take it."""
        member = self._channel.members[peer]
        turn = self._turn(member, wire_tag)
        await turn.take(deadline, transfer)
        try:
            probing = self._unclaimed.probe(member, wire_tag)
            return await Within(probing, deadline, transfer)
        except BaseException:
            self._give_back(turn, member, wire_tag)
            raise

    def _find(self, value: object) -> TensorAdapter[Any]:
        """The adapter for a tensor, for this call."""
        return adapter_for_call(value, self._channel.node.device_memory)

    def _turn(self, member: int, wire_tag: int) -> _Turn:
        turn = self._turns.get((member, wire_tag))
        if turn is None:
            turn = self._turns[member, wire_tag] = _Turn()
        return turn

    def _give_back(self, turn: _Turn, member: int, wire_tag: int) -> None:
        turn.give_back()
        if not turn.taken:  # tags come and go
            self._turns.pop((member, wire_tag), None)

    def _adapter(self, like: Any, out: Any, transfer: Transfer) -> TensorAdapter[Any]:
        pattern = out if out is not None else like
        try:
            return self._find(np.empty(0) if pattern is None else pattern)
        except TensorContractError as error:
            raise error.at(self._where(transfer), self._channel.rank) from None

    async def _take(
        self,
        transfer: Transfer,
        wire_tag: int,
        envelope: Envelope,
        adapter: TensorAdapter[Any],
        like: Any,
        out: Any,
        deadline: float,
    ) -> Target[Any] | None:
        """Receive the message that `envelope` announces; None where its sender takes it back."""
        channel = self._channel
        source, _ = transfer.sequence
        transfer.head = envelope.head
        transfer.received = envelope.nbytes
        spec = self._spec_of(envelope.head, envelope.nbytes, source)
        member = channel.members[source]
        like = np.empty(0) if like is None else like
        try:
            target = self._unclaimed.take(member, wire_tag, spec, like, out)
            if target is not None:
                return target
            if out is not None:
                target = adapter.into(out, spec)
            else:
                target = await allocate(
                    adapter, like, spec.shape, spec.dtype, lambda wait: Within(wait, deadline, transfer)
                )
        except TensorContractError as error:
            raise error.at(self._where(transfer), channel.rank) from None
        transport = channel.node.transport
        # Memory took its time, and another message may be the next by now; or be so when this task goes on.
        again = Within(transport.probe(member, wire_tag), deadline, transfer)
        if await again != envelope or again.waited:
            return None
        receiving = Within(
            transport.recv_into(member, wire_tag, (target.buffer,), envelope.head), deadline, transfer
        )
        try:
            await receiving
        except TakenBack:
            return None
        except asyncio.CancelledError:
            if receiving.came:
                self._unclaimed.leave(member, wire_tag, envelope, adapter, target, spec, out)
            raise
        return target

    def _address(self, name: str, peer: int, tag: int) -> tuple[int, int]:
        channel = self._channel
        node = channel.node
        if node.closed is not None:
            raise node.closed
        if channel.closed:
            raise CommunicatorClosedError(
                f"channel {channel.name!r} is closed on rank {channel.rank}; {_call(name, peer, tag)} refused"
            )
        node.check_loop()
        wrong = ""
        if isinstance(peer, bool) or not isinstance(peer, int) or not 0 <= peer < channel.size:
            wrong = f"there are ranks 0 to {channel.size - 1}"
        elif peer == channel.rank:
            wrong = "a rank does not send to itself; use the tensor"
        elif isinstance(tag, bool) or not isinstance(tag, int) or tag < 0:
            wrong = "a tag is an integer from 0 on"
        if wrong:
            where = f"rank {channel.rank}, {_call(name, peer, tag)}"
            raise TensorContractError(f"{where}: {wrong}", rank=channel.rank)
        wire_tag = self._tags.get(tag)
        if wire_tag is None:
            if len(self._tags) >= _TAGS:
                self._tags.clear()
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

    # ------------------------------------------------------------------ beginning and ending

    def _where(self, transfer: Transfer) -> str:
        """The rank and the call, for error texts."""
        return f"rank {self._channel.rank}, {_call(transfer.name, *transfer.sequence)}"

    def _begin(self, transfer: Transfer) -> None:
        node = self._channel.node
        node.recorder.transfers.add(transfer)
        if node.spans is not None:
            node.spans.begin(transfer)

    def _succeeded(self, transfer: Transfer) -> None:
        node = self._channel.node
        node.recorder.transfers.discard(transfer)
        node.recorder.succeeded(transfer)
        if node.spans is not None:
            node.spans.end(transfer, None)

    def _failed(
        self, transfer: Transfer, error: BaseException, timeout: float, peers: tuple[int, ...]
    ) -> NoReturn:
        """Keep record of a transfer that ends with `error`, and raise what the caller is to see."""
        channel, node = self._channel, self._channel.node
        call = _call(transfer.name, *transfer.sequence)
        where = f"rank {channel.rank} of {channel.size}, channel {channel.name!r}, {call}"
        final = error
        if isinstance(error, PeerLostError):
            rank = self._group_rank(error.rank)
            if rank is None and len(peers) == 1:
                rank = peers[0]
            final = left_in_call(where, error, rank) if error.orderly else lost_in_call(where, error, rank)
        elif isinstance(error, TimeoutError) and not isinstance(error, RudaError):
            text = f"{where}: not finished within timeout={timeout:g} s"
            node.flight.trigger(text)
            other = "receives what is sent to it" if transfer.name == "send" else "sends"
            final = CollectiveTimeoutError(
                f"{text}; see that {_peer(transfer.sequence[0])} {other} with this tag, or raise timeout=",
                rank=channel.rank,
                missing=peers,
            )
        node.recorder.transfers.discard(transfer)
        node.recorder.failed(transfer, final)
        if node.spans is not None:
            node.spans.end(transfer, final)
        if final is error:
            raise error
        raise final from None

    def _group_rank(self, member: int | None) -> int | None:
        members = self._channel.members
        return members.index(member) if member in members else None


def _call(name: str, peer: int, tag: int) -> str:
    """A call in words: ``send to rank 1 (tag 0)``."""
    way = "to" if name == "send" else "from"
    return f"{name} {way} {_peer(peer)} (tag {tag})"


def _peer(peer: int) -> str:
    return "any rank" if peer == -1 else f"rank {peer}"
