"""A channel: where operations are numbered, matched, bounded in time and failed together.

Ranks match operations by call order. Each call takes the channel's next sequence number, and every
message of the call carries it in its tag; so two calls can only meet if they are the same call. When one
rank cannot go on (bad input, another operation than its peers, its deadline, a cancelled task, a lost
peer) it tells every rank of the channel, and the same call ends there with the same kind of error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from time import monotonic
from typing import TYPE_CHECKING, NoReturn, TypeVar

from . import notices
from .collectives.request import Request
from .errors import (
    CollectiveTimeoutError,
    CommunicatorClosedError,
    PeerLostError,
    RudaError,
    TensorContractError,
)
from .tags import LANES, SEQUENCES, is_past, tag_of
from .transport.base import Buffer, Capabilities, Envelope, Ready, UnexpectedMessage

if TYPE_CHECKING:
    from .collectives.operation import Settings
    from .node import Node

__all__ = ["Channel", "Operation"]

R = TypeVar("R")


class Operation:
    """One call in flight on this rank; the `collectives.operation.Link` that its algorithm runs over.

    Attributes:
        rank, size: this rank's number in the group, and how many there are.
        sequence: the call's number on its channel.
        head: the encoded fingerprint, once the input was checked.
        error: why the call has to end, once something decided that.
        present: the group ranks that are known to have entered this call.
        started, deadline: `time.monotonic` seconds.
    """

    __slots__ = (
        "_greeted",
        "_heard",
        "_members",
        "_tag",
        "_transport",
        "capabilities",
        "channel",
        "deadline",
        "error",
        "head",
        "name",
        "present",
        "rank",
        "reported",
        "sequence",
        "settings",
        "size",
        "started",
    )

    def __init__(
        self, channel: Channel, name: str, sequence: int, timeout: float, settings: Settings
    ) -> None:
        node = channel.node
        self.channel = channel
        self.name = name
        self.sequence = sequence
        self.settings = settings
        self.rank = channel.rank
        self.size = channel.size
        self.capabilities: Capabilities = node.capabilities
        self.head = b""
        self.error: RudaError | None = None
        self.started = monotonic()
        self.deadline = self.started + timeout
        self.reported = False
        self.present: set[int] = {channel.rank}
        self._transport = node.transport
        self._members = channel.members
        self._tag = tag_of(channel.id, sequence)
        self._greeted: set[int] = set()
        self._heard: set[int] = set()

    # ------------------------------------------------------------------ what algorithms use

    def send(self, peer: int, *buffers: Buffer, lane: int = 0) -> Awaitable[None]:
        """Start one message to `peer`; see `collectives.operation.Link`."""
        if self.error is not None:
            raise self.error
        stream = peer << 4 | lane
        if stream in self._greeted:
            head = b""
        else:
            self._greeted.add(stream)
            head = self.head
        return self._transport.send(self._members[peer], self._tag | lane, buffers, head)

    def recv_into(self, peer: int, *buffers: Buffer, lane: int = 0) -> Awaitable[None]:
        """Start to receive the next message from `peer`; see `collectives.operation.Link`."""
        if self.error is not None:
            raise self.error
        stream = peer << 4 | lane
        if stream in self._heard:
            head = b""
        else:
            self._heard.add(stream)
            head = self.head
        return self._transport.recv_into(self._members[peer], self._tag | lane, buffers, head)

    def probe(self, peer: int, lane: int = 0) -> Awaitable[Envelope]:
        """Wait for the next message from `peer` and check its head; see `collectives.operation.Link`."""
        if self.error is not None:
            raise self.error
        member, tag = self._members[peer], self._tag | lane
        expected = b"" if (peer << 4 | lane) in self._heard else self.head
        waiting = self._transport.probe(member, tag)
        if type(waiting) is Ready:
            envelope: Envelope = waiting.value
            if envelope.head != expected:
                raise UnexpectedMessage(member, tag, envelope, expected, envelope.nbytes)
            return waiting
        return self._checked(waiting, member, tag, expected)

    async def _checked(
        self, waiting: Awaitable[Envelope], member: int, tag: int, expected: bytes
    ) -> Envelope:
        envelope = await waiting
        if envelope.head != expected:
            raise UnexpectedMessage(member, tag, envelope, expected, envelope.nbytes)
        return envelope

    async def turn(self) -> None:
        """Let the event loop run other work."""
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error

    # ------------------------------------------------------------------ ending early

    def fail(self, error: RudaError) -> None:
        """End this call with `error`: what waits on the transport fails now, later steps at once."""
        if self.error is None:
            self.error = error
            self.withdraw(error)

    def withdraw(self, error: BaseException) -> None:
        """Take back all that this call has posted, and drop what came for it."""
        for lane in range(LANES):
            self._transport.fail(self._tag | lane, error)

    def __str__(self) -> str:
        channel = self.channel
        return f"rank {self.rank} of {self.size}, channel {channel.name!r}, {self.name} #{self.sequence}"


class Channel:
    """One tag space over a group of ranks.

    Attributes:
        id: the number in tags (see `tags`).
        name: for people; the same on all ranks.
        members: the job's rank of each group rank.
        rank, size: this rank's place in `members`, and their number.
    """

    def __init__(self, node: Node, id: int, name: str, members: tuple[int, ...], sequence: int = 0) -> None:
        self.node = node
        self.id = id
        self.name = name
        self.members = members
        self.rank = members.index(node.transport.rank)
        self.size = len(members)
        self.next = sequence
        self.active: dict[int, Operation] = {}
        #: Failures that peers announced for calls this rank has not reached: sequence → error.
        self.announced: dict[int, notices.Failure] = {}
        #: Set when a member died: every later call fails with it.
        self.lost: PeerLostError | None = None
        self.closed = False
        #: Whether an `autograd.CollectiveScope` records this channel's calls.
        self.recorded = False
        self.completed = 0
        self.failed = 0

    # ------------------------------------------------------------------ running a call

    async def run(self, request: Request[R], timeout: float, settings: Settings) -> R:
        """Run one collective call to its end; the errors are those of `Communicator`'s methods."""
        operation = self._start(request.operation, timeout, settings)
        try:
            operation.head = request.prepare(operation.rank, operation.size, settings)
            self._enter(operation)
            result = await request.run(operation)
            node = self.node
            node.unturned += 1
            if node.unturned >= 32:  # calls that never had to wait must not starve the loop
                node.unturned = 0
                await asyncio.sleep(0)
            self.completed += 1
            return result
        except BaseException as error:
            self._give_up(operation, error)
        finally:
            del self.active[operation.sequence % SEQUENCES]
            if self.announced:
                self.announced.pop(operation.sequence % SEQUENCES, None)

    def _start(self, name: str, timeout: float, settings: Settings) -> Operation:
        """Take the next sequence number."""
        node = self.node
        if node.closed is not None:
            raise node.closed
        if self.closed:
            raise CommunicatorClosedError(
                f"channel {self.name!r} is closed on rank {self.rank}; {name} refused"
            )
        node.check_loop()
        sequence = self.next
        self.next = sequence + 1
        operation = Operation(self, name, sequence, timeout, settings)
        self.active[sequence % SEQUENCES] = operation
        return operation

    def _enter(self, operation: Operation) -> None:
        """The input is good: join the others, unless the call has failed already."""
        if self.announced:
            failure = self.announced.get(operation.sequence % SEQUENCES)
            if failure is not None:
                operation.fail(self._from_peer(operation, failure))
        if self.lost is not None:
            operation.fail(PeerLostError(f"{operation}: {self.lost}", rank=self.lost.rank))
        if operation.error is not None:
            raise operation.error
        self.node.watch(operation)

    def _give_up(self, operation: Operation, error: BaseException) -> NoReturn:
        """Tell the other ranks why this call ends here, and raise what the caller should see."""
        self.failed += 1
        if operation.error is not None:
            # Whatever came up here is that failure or a consequence of it; only a cancelled task stays one.
            if error is operation.error or isinstance(error, asyncio.CancelledError):
                raise error
            raise operation.error from None
        final, failure = self._diagnose(operation, error)
        operation.fail(failure.as_error(str(operation), self.rank))
        self.node.announce(self, operation.sequence, failure)
        if final is error:
            raise error
        raise final from None

    def _diagnose(self, operation: Operation, error: BaseException) -> tuple[BaseException, notices.Failure]:
        """The error for the caller here, and what to tell the others."""
        me = self.rank
        if isinstance(error, asyncio.CancelledError):
            return error, notices.Failure("cancelled", me, "its task was cancelled")
        if isinstance(error, TensorContractError):
            return error.at(operation, me), notices.Failure("contract", me, error.reason)
        if isinstance(error, UnexpectedMessage):
            peer = self.members.index(error.peer)
            failure = notices.mismatch(me, peer, error)
            return failure.as_error(str(operation), me), failure
        if isinstance(error, PeerLostError):
            job_rank = error.rank if error.rank is not None else -1
            peer = self.members.index(job_rank) if job_rank in self.members else me
            failure = notices.Failure("left" if error.orderly else "lost", peer, str(error))
            return failure.as_error(str(operation), me), failure
        if isinstance(error, RudaError):
            return error, notices.Failure("error", me, str(error))
        return error, notices.Failure("error", me, f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------ what others decide

    def on_failure(self, sequence: int, failure: notices.Failure) -> None:
        """A peer announced that call `sequence` (modulo `SEQUENCES`) has failed."""
        operation = self.active.get(sequence)
        if operation is not None:
            if operation.error is None:
                operation.fail(self._from_peer(operation, failure))
        elif not is_past(sequence, self.next) and len(self.announced) < 4096:
            self.announced[sequence] = failure

    def on_report(self, peer: int, sequence: int, head: bytes) -> None:
        """A peer waits in call `sequence` and says what it called; find out if that differs from ours.

        An empty head says that the peer has finished the call.
        """
        operation = self.active.get(sequence)
        if operation is None:
            if head and is_past(sequence, self.next):
                self.node.report(self, (self.members[peer],), sequence, b"")
            return
        if not operation.head or operation.error is not None:
            return
        operation.present.add(peer)
        if not head:
            return
        if operation.head == head:
            if not operation.reported:
                self.node.report(self, (self.members[peer],), sequence, head)
            return
        error = UnexpectedMessage(self.members[peer], 0, Envelope(head, 0), operation.head, 0)
        failure = notices.mismatch(self.rank, peer, error)
        operation.fail(failure.as_error(str(operation), self.rank))
        self.node.announce(self, operation.sequence, failure)

    def on_lost(self, member: int, error: PeerLostError) -> None:
        """The job's rank `member` died; if it is one of ours, nothing can finish any more."""
        if member not in self.members:
            return
        rank = self.members.index(member)
        self.lost = self.lost or PeerLostError(str(error), rank=rank)
        for operation in list(self.active.values()):
            operation.fail(PeerLostError(f"{operation}: {error}", rank=rank))

    def on_deadline(self, operation: Operation) -> None:
        """The call's time is up."""
        timeout = operation.deadline - operation.started
        text = f"not finished within timeout={timeout:g} s"
        failure = notices.Failure("timeout", self.rank, text)
        silent = tuple(r for r in range(self.size) if r not in operation.present)
        operation.fail(
            CollectiveTimeoutError(
                f"{operation}: {text}; see that every rank makes this call, or raise timeout=",
                rank=self.rank,
                missing=silent,
            )
        )
        self.node.announce(self, operation.sequence, failure)

    def _from_peer(self, operation: Operation, failure: notices.Failure) -> RudaError:
        return failure.as_error(str(operation), self.rank)

    def is_stale(self, sequence: int) -> bool:
        """Whether a message of call `sequence` that nobody waits for can be dropped."""
        operation = self.active.get(sequence)
        if operation is not None:
            return operation.error is not None
        return is_past(sequence, self.next)

    def close(self, error: RudaError) -> None:
        """End this channel here: calls in flight fail with `error`, later ones are refused."""
        if self.closed:
            return
        self.closed = True
        for operation in list(self.active.values()):
            operation.fail(error)
            self.node.announce(
                self, operation.sequence, notices.Failure("cancelled", self.rank, "its channel was closed")
            )
        self.node.forget(self)
