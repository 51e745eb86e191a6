"""Rank 0 of a meeting: it lets ranks in, sends strangers away, and says who is missing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections import deque
from collections.abc import Sequence

from ..errors import CollectiveTimeoutError, ConfigError, RudaError
from ..transport import wire
from ..transport.handshake import Peer, address_text, authenticate, read_exactly, write_all
from ..transport.job import Job, Meeting
from . import limits
from .records import (
    ASK,
    CONFIRM,
    CONTEXT,
    MAX_PAYLOAD,
    OVERHEAD,
    Join,
    OtherJobError,
    read_record,
    refusal,
)
from .sockets import Address, listen, prepare

__all__ = ["Host"]


class _Member:
    """A rank that has joined, while its connection lives."""

    def __init__(self, join: Join, sock: Peer, address: str) -> None:
        self.join = join
        self.sock = sock
        self.address = address
        self.unconfirmed = 0
        self._writing = asyncio.Lock()

    async def write(self, data: bytes) -> None:
        """Send a whole record; a broken connection is for whoever reads it to notice."""
        with contextlib.suppress(OSError):
            async with self._writing:
                await write_all(asyncio.get_running_loop(), self.sock, data)


class Host:
    """Rank 0 of one meeting."""

    def __init__(self, job: Job, payload: bytes) -> None:
        self.job = job
        self.payload = payload
        self.where = ""
        self.members: dict[int, _Member] = {}
        #: Counts joins and losses: a WELCOME is out of date when this has moved on.
        self.changes = 0
        self._changed = asyncio.Event()
        self._fatal: BaseException | None = None
        self._gave_up: set[int] = set()
        self._refused: deque[str] = deque(maxlen=4)
        self._dropped = 0
        self._last_drop = ""
        self._paused: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}  # oldest first

    async def meet(self, address: Address) -> Meeting:
        """Listen at `address` until all are in and have confirmed."""
        listener = await listen(self.job, address)
        try:
            self.where = address_text(listener.getsockname())
            self._loop.add_reader(listener, self._accept, listener)
            return await self._run()
        finally:
            self._loop.remove_reader(listener)
            listener.close()
            if self._paused is not None:
                self._paused.cancel()
            if isinstance(address, str) and not address.startswith("\0") and self.job.listen_fd is None:
                with contextlib.suppress(OSError):
                    os.unlink(address)
            tasks = list(self._connections)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> Meeting:
        try:
            async with asyncio.timeout(self.job.deadline - time.monotonic()) as limit:
                return await self._assemble(limit)
        except TimeoutError:
            error: RudaError = self._too_late(f"within timeout={self.job.timeout:g} s")
        except RudaError as fatal:
            error = fatal
        self._fatal = error
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limits.GRACE):
                await self._tell(refusal(error))
                # Members hang up when they have read it, and those who are just coming in are told too.
                while self.members or self._strangers:
                    self._changed.clear()
                    await self._changed.wait()
        raise error

    async def _assemble(self, limit: asyncio.Timeout) -> Meeting:
        deadline = limit.when() or 0.0
        while True:
            while not self._all_in():
                await self._change()
            # Whoever came in time is not lost to a deadline that falls into the last steps.
            limit.reschedule(max(deadline, self._loop.time() + limits.GRACE))
            members, changes = list(self.members.values()), self.changes
            payloads = [self.payload, *(self.members[r].join.payload for r in range(1, self.job.world_size))]
            meeting = Meeting(payloads, os.urandom(16))
            for member in members:
                member.unconfirmed += 1
            await self._tell(
                wire.pack_record({"kind": "welcome", "session": meeting.session, "payloads": payloads})
            )
            while self.changes == changes and any(member.unconfirmed for member in members):
                await self._change()
            if self.changes == changes:
                await self._tell(wire.pack_record({"kind": "go"}))
                return meeting
            limit.reschedule(deadline)

    async def _tell(self, record: bytes) -> None:
        await asyncio.gather(*(member.write(record) for member in self.members.values()))

    def _all_in(self) -> bool:
        return len(self.members) == self.job.world_size - 1

    async def _change(self) -> None:
        """Wait for a rank to join, leave or confirm since the last time."""
        await self._changed.wait()
        self._changed.clear()
        if self._fatal is not None:
            raise self._fatal

    def _too_late(self, when: str, asked_by: int = 0) -> CollectiveTimeoutError:
        all_in = self._all_in()
        absent = {
            rank
            for rank in range(1, self.job.world_size)
            if (member := self.members.get(rank)) is None or (all_in and member.unconfirmed)
        } - {asked_by}
        # Deadlines are close together: who came and left at its own is not who was waited for.
        missing = sorted(absent - self._gave_up or absent)
        text = f"{_ranks_text(missing)} of {self.job.world_size} did not come to {self.where} {when}"
        if gave_up := sorted(absent.difference(missing)):
            text += f"; {_ranks_text(gave_up)} came and left at their own deadline"
        seen = list(self._refused)
        if self._dropped:
            seen.append(f"connections dropped: {self._dropped}, the last because {self._last_drop}")
        text = "; ".join([text, *seen])
        text += "; see why they did not come, start the ranks closer together, or raise timeout="
        return CollectiveTimeoutError(text, missing=tuple(missing), seen="; ".join(seen))

    # -- connections

    def _accept(self, listener: socket.socket) -> None:
        """Take one connection; called whenever there is one, so a flood leaves the loop its turns."""
        try:
            sock, address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:  # descriptors have run out: make room, and look again soon
            self._drop(f"it could not be accepted ({error.strerror})")
            self._evict()
            self._loop.remove_reader(listener)
            self._paused = self._loop.call_later(
                0.02, self._loop.add_reader, listener, self._accept, listener
            )
            return
        task = self._loop.create_task(self._serve(sock, address_text(address)))
        self._connections.add(task)
        self._strangers[task] = None
        task.add_done_callback(lambda task: self._ended(task, sock))
        if len(self._strangers) > self.job.world_size + limits.MAX_STRANGERS:
            self._evict()

    def _evict(self) -> None:
        """Send the oldest stranger away."""
        if self._strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()

    def _ended(self, task: asyncio.Task[None], sock: socket.socket) -> None:
        # Closed here, since a task that is cancelled before its first step never enters a `finally`.
        sock.close()
        self._connections.discard(task)
        self._strangers.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            self._fatal = self._fatal or task.exception()
        self._changed.set()

    def _drop(self, reason: str) -> None:
        self._dropped += 1
        self._last_drop = reason

    async def _serve(self, sock: socket.socket, address: str) -> None:
        """One connection, from its first byte to its last."""
        prepare(sock)
        deadline = min(self.job.deadline, time.monotonic() + limits.PATIENCE)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                link = await authenticate(self.job, sock, server=True, context=CONTEXT, deadline=deadline)
                record = await read_record(link, MAX_PAYLOAD + OVERHEAD)
        except OSError as error:  # and, by inheritance, all that `prove` and `wire` raise
            self._drop(str(error) or f"{address} did not join in time")
            return
        self._strangers.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        try:
            member = self._admit(Join.of(record), link, address)
        except RudaError as error:
            self._refused.append(str(error))
            with contextlib.suppress(OSError):
                await write_all(self._loop, link, refusal(error))
            return
        try:
            await self._follow(member)
        except OSError:
            pass
        finally:
            self._leave(member)

    def _admit(self, join: Join, sock: Peer, address: str) -> _Member:
        """Give a rank its place.

        Raises:
            ConfigError: there is none for it; of another world size, it ends the meeting for all.
        """
        job, rank = self.job, join.rank
        if join.job != job.name:
            raise OtherJobError(
                f"job {job.name!r} meets at {self.where}, and rank {rank} from {address} is of job "
                f"{join.job!r}; give all ranks of a job one name, or this job another port"
            )
        if self._fatal is not None:
            raise self._fatal
        if join.world_size != job.world_size:
            error = ConfigError(
                f"rank {rank} from {address} has world_size={join.world_size} and rank 0 has "
                f"world_size={job.world_size}; give all ranks the same",
                rank=rank,
            )
            self._fatal = error
            self._changed.set()
            raise error
        first = self.where if rank == 0 else self.members[rank].address if rank in self.members else None
        if first is not None:
            raise ConfigError(
                f"a second rank {rank} from {address} was refused, since the first came from {first}; "
                "give each rank a number of its own",
                rank=rank,
            )
        member = self.members[rank] = _Member(join, sock, address)
        self._gave_up.discard(rank)
        self.changes += 1
        self._changed.set()
        return member

    def _leave(self, member: _Member) -> None:
        """Free a rank's place, so that it may be started again."""
        if self.members.get(member.join.rank) is member:
            del self.members[member.join.rank]
            self.changes += 1
            self._changed.set()

    async def _follow(self, member: _Member) -> None:
        """Hear a member until its connection ends."""
        while True:
            said = await read_exactly(self._loop, member.sock, 1)
            if said == CONFIRM and member.unconfirmed:
                member.unconfirmed -= 1
                self._changed.set()
            elif said == ASK and self._all_in():
                continue  # it is about to have its answer
            else:
                self._leave(member)
                if said == ASK:
                    rank = member.join.rank
                    self._gave_up.add(rank)
                    late = self._too_late(f"before the deadline of rank {rank}", asked_by=rank)
                    await member.write(refusal(late))
                return


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
