"""A channel: where operations are numbered, matched, bounded in time and failed together.

Ranks match operations by call order. Each call takes the channel's next sequence number, and every
message of the call carries it in its tag; so two calls can only meet if they are the same call. When one
rank cannot go on (bad input, another operation than its peers, its deadline, a cancelled task, a lost
peer) it tells every rank of the channel, and the same call ends there with the same kind of error.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn, TypeVar

from . import notices
from .call import Operation
from .collectives.layout import narrowed
from .collectives.native import Natives
from .collectives.request import Request
from .errors import (
    CollectiveTimeoutError,
    CommunicatorClosedError,
    PeerLostError,
    RudaError,
    TensorContractError,
)
from .observe.logs import log, operation_fields
from .point_to_point import PointToPoint
from .tags import SEQUENCES, is_past
from .transport.base import Capabilities, Envelope, UnexpectedMessage

if TYPE_CHECKING:
    from .collectives.operation import Settings
    from .node import Node

__all__ = ["Channel"]

R = TypeVar("R")

#: Turns of the loop that the listener needs for what a peer announced just before its goodbye.
_LAST_WORDS = 4
T = TypeVar("T")


class Channel:
    """One tag space over a group of ranks.

    Attributes:
        id: the number in tags (see `tags`).
        name: for people; the same on all ranks.
        members: the job's rank of each group rank.
        label: the three of them, as records of calls have it.
        rank, size: this rank's place in `members`, and their number.
        capabilities: the transport's, with the hosts of `members` alone.
    """

    def __init__(self, node: Node, id: int, name: str, members: tuple[int, ...], sequence: int = 0) -> None:
        self.node = node
        self.id = id
        self.name = name
        self.members = members
        self.label = (id, name, members)
        self.rank = members.index(node.transport.rank)
        self.size = len(members)
        self.capabilities: Capabilities = narrowed(node.capabilities, members)
        self.next = sequence
        #: Shared by all communicators of this channel, as their receives take turns.
        self.point_to_point = PointToPoint(self)
        self.natives = Natives(node.providers, id, self.rank, members, sequence)
        self.active: dict[int, Operation] = {}
        #: Failures that peers announced for calls this rank has not reached: sequence → error.
        self.announced: dict[int, notices.Failure] = {}
        #: Set when a member died: every later call fails with it.
        self.lost: PeerLostError | None = None
        self.closed = False
        self._closed_by: RudaError | None = None
        #: Whether an `autograd.CollectiveScope` records this channel's calls.
        self.recorded = False

    # ------------------------------------------------------------------ running a call

    async def run(self, request: Request[R], timeout: float, settings: Settings) -> R:
        """Run one collective call to its end; the errors are those of `Communicator`'s methods."""
        operation = self._start(request.operation, timeout, settings)
        try:
            operation.head = request.prepare(operation.rank, operation.size, settings)
            self._enter(operation)
            result = await request.run(operation)
            node = self.node
            if node.is_due():
                await asyncio.sleep(0)
            # Nothing is waited for from here on: a call that counts as done is not cancelled as well.
            node.recorder.succeeded(operation)
            if node.spans is not None:
                node.spans.end(operation, None)
            return result
        except BaseException as error:
            final = await self._last_words(operation, error)
            try:
                self._give_up(operation, final)
            finally:
                await operation.settled()
        finally:
            operation.end()
            del self.active[operation.sequence % SEQUENCES]
            if self.announced:
                self.announced.pop(operation.sequence % SEQUENCES, None)

    async def _last_words(self, operation: Operation, error: BaseException) -> BaseException:
        """Let a peer that left in order, or gave up, be heard first: it says why."""
        try:
            member = operation.given_up_by(error)
            if member is not None:
                if member in self.node.left:
                    return notices.left_without_a_word(member)
                await operation.reason(member)
            elif isinstance(error, PeerLostError) and error.orderly:
                for _ in range(_LAST_WORDS):
                    if operation.error is None:
                        await asyncio.sleep(0)
        except asyncio.CancelledError as cancelled:
            return cancelled
        return error

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
        if node.spans is not None:
            node.spans.begin(operation)
        return operation

    def _enter(self, operation: Operation) -> None:
        """The input is good: join the others, unless the call has failed already."""
        if self.announced:
            failure = self.announced.get(operation.sequence % SEQUENCES)
            if failure is not None:
                operation.fail(self._as_seen_here(operation, failure))
        if self.lost is not None:
            assert self.lost.rank is not None
            operation.fail(notices.lost_in_call(operation, self.lost, self.lost.rank))
        if operation.error is not None:
            raise operation.error
        self.node.watch(operation)

    def _give_up(self, operation: Operation, error: BaseException) -> NoReturn:
        """Tell the other ranks why this call ends here, and raise what the caller should see."""
        node = self.node
        if operation.error is None:
            final, failure = self._diagnose(operation, error)
            self._fail_everywhere(operation, failure)
        # Whatever came up here is that failure or a consequence of it; only a cancelled task stays one.
        elif isinstance(error, asyncio.CancelledError):
            final = error
        else:
            final = operation.error
        node.recorder.failed(operation, final)
        if node.spans is not None:
            node.spans.end(operation, final)
        log.info(
            "%s: %s", operation, type(final).__name__, extra=operation_fields(operation, type(final).__name__)
        )
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
            if not error.orderly:  # before the node hears of it: who catches the error finds its record
                self.node.flight.trigger(str(error))
            return failure.as_error(str(operation), me), failure
        if isinstance(error, RudaError):
            return error, notices.Failure("error", me, str(error))
        return error, notices.Failure("error", me, f"{type(error).__name__}: {error}")

    # ------------------------------------------------------------------ what others decide

    def on_failure(self, sequence: int, failure: notices.Failure) -> None:
        """A peer announced that call `sequence` (modulo `SEQUENCES`) has failed."""
        operation = self.active.get(sequence)
        if failure.code == "timeout" and (operation is None or operation.error is None):
            self.node.flight.trigger(f"rank {failure.culprit} gave up on a call: {failure.text}")
        if operation is not None:
            if operation.error is None:
                operation.fail(self._as_seen_here(operation, failure), here=False)
        elif not is_past(sequence, self.next) and len(self.announced) < 4096:
            self.announced.setdefault(sequence, failure)

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
        self._fail_everywhere(operation, failure)

    def on_lost(self, member: int, error: PeerLostError) -> None:
        """The job's rank `member` died; if it is one of ours, nothing can finish any more."""
        if member not in self.members:
            return
        rank = self.members.index(member)
        self.lost = self.lost or PeerLostError(str(error), rank=rank)
        for operation in list(self.active.values()):
            operation.fail(notices.lost_in_call(operation, error, rank))
        self._fail_transfers()

    def on_left(self, member: int) -> None:
        """The job's rank `member` closed its communicator: calls that wait for its reason hear none."""
        for operation in list(self.active.values()):
            if operation.error is None and operation.silent == member:
                _, failure = self._diagnose(operation, notices.left_without_a_word(member))
                self._fail_everywhere(operation, failure)

    def _fail_transfers(self) -> None:
        """End sends and receives in flight, for the reason that `ended` gives."""
        for transfer in tuple(self.node.recorder.transfers):
            if transfer.channel is self:
                transfer.fail()

    def ended(self) -> RudaError | None:
        """For a transfer to raise: this channel was closed here, or a member, by its job rank, was lost."""
        if self._closed_by is not None:
            return self._closed_by
        if self.lost is None or self.lost.rank is None:
            return None
        return PeerLostError(str(self.lost), rank=self.members[self.lost.rank])

    def on_deadline(self, operation: Operation) -> None:
        """The call's time is up."""
        timeout = operation.deadline - operation.started
        text = f"not finished within timeout={timeout:g} s"
        failure = notices.Failure("timeout", self.rank, text)
        silent = tuple(r for r in range(self.size) if r not in operation.present)
        self.node.flight.trigger(f"{operation}: {text}")
        heard = f" (no word of it from rank {', '.join(map(str, silent[:8]))})" if silent else ""
        operation.fail(
            CollectiveTimeoutError(
                f"{operation}: {text}{heard}; see that every rank makes this call, or raise timeout=",
                rank=self.rank,
                missing=silent,
            )
        )
        self.node.announce(self, operation.sequence, failure)

    def _fail_everywhere(self, operation: Operation, failure: notices.Failure) -> None:
        """End a call, here and, by a notice, on the other ranks."""
        operation.fail(self._as_seen_here(operation, failure))
        self.node.announce(self, operation.sequence, failure)

    def _as_seen_here(self, operation: Operation, failure: notices.Failure) -> RudaError:
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
        self._closed_by = error
        for operation in list(self.active.values()):
            operation.fail(error)
            self.node.announce(
                self, operation.sequence, notices.Failure("cancelled", self.rank, "its channel was closed")
            )
        self._fail_transfers()
        self.natives.close()
        self.node.forget(self)
