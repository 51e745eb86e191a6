"""How ranks find each other: rank 0 listens, the others dial it, and all learn what each had to say.

Ranks start in any order. A rank proves the job secret (`transport.handshake`), then sends a JOIN record.
Once all are in, rank 0 sends every rank a WELCOME with all payloads, each confirms it, and GO ends the
meeting: until GO nobody has left, so a rank that dies before it frees its place and may be started again.
What comes after the proof, as records (`transport.wire`)::

    JOIN     rank → 0   {protocol, job, rank, world_size, payload}
    WELCOME  0 → rank   {kind: "welcome", session, payloads}
    GO       0 → rank   {kind: "go"}
    REFUSED  0 → rank   {kind: "refused", code, text, ranks}

and two single bytes from rank to 0: ``+`` confirms a WELCOME; ``?`` says that this rank's own time is up and
asks who is missing. Strangers hold nothing up: what has not joined is bounded in number and in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import random
import socket
import stat
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from .errors import AuthenticationError, CollectiveTimeoutError, ConfigError, ProtocolError, RudaError
from .transport import wire
from .transport.handshake import address_text, prove, read_exactly, read_into, write_all
from .transport.job import Job, Meeting

__all__ = ["MAX_PAYLOAD", "Meeting", "exchange", "meet"]

#: The largest payload of one rank, in bytes.
MAX_PAYLOAD = 64 * 1024
PROTOCOL = 1

Address: TypeAlias = "tuple[str, int] | str"
#: An address family and an address of it, as `socket` takes them.
_Endpoint: TypeAlias = "tuple[int, Any]"

_CONTEXT = b"ruda-async rendezvous"
_MAX_NAME = 1024
#: Room for a record's keys and numbers and a job name, beyond payloads.
_OVERHEAD = 4096
_CONFIRM, _ASK = b"+", b"?"
#: Connections that have not joined yet, at most, beyond one for each rank.
_MAX_STRANGERS = 64
#: How long a stranger may take to join; and, on other ranks, a connection to be made or a port to answer
#: where there are more ports to try.
_PATIENCE = 5.0
#: For the last steps once the deadline has come: the final answer, and who is missing.
_GRACE = 1.0
_FIRST_RETRY, _LAST_RETRY = 0.005, 0.2


async def exchange(job: Job, payload: bytes, address: Address) -> list[bytes]:
    """Give every rank this rank's payload; all payloads, in rank order. See `meet`."""
    return (await meet(job, payload, address)).payloads


async def meet(job: Job, payload: bytes, address: Address) -> Meeting:
    """Meet all ranks of the job at `address` by ``job.deadline``; collective, once on every rank.

    Args:
        payload: up to `MAX_PAYLOAD` bytes for the other ranks.
        address: ``(host, port)``, or the path of a Unix socket (``"\\0name"`` for an abstract one). Rank 0
            listens there, at the first free one of ``job.ports`` where there are any, or at
            ``job.listen_fd``, which is borrowed and stays open, so that the next meeting finds it again.

    Raises:
        CollectiveTimeoutError: not all ranks came in time; ``missing`` names them. A rank that asks rank 0
            who is missing waits up to a second beyond the deadline for the answer.
        ConfigError: ranks disagree on the world size, two have one number, another job meets at this
            address, the address cannot be used, or a network address is used without a secret.
        AuthenticationError: rank 0 has another secret.
        ProtocolError: what answers at the address is not a rank 0 of this version.
        ValueError: the payload is too large.
    """
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(
            f"rank {job.rank}: a payload of {len(payload)} bytes is over the limit of {MAX_PAYLOAD}"
        )
    _check_name(job)
    if job.world_size == 1:
        return Meeting([payload], os.urandom(16))
    if job.rank:
        return await _Guest(job, payload, address).meet()
    return await _Host(job, payload).meet(address)


def _check_name(job: Job) -> None:
    try:
        size = len(job.name.encode())
    except UnicodeEncodeError:
        raise ConfigError(f"the job name {job.name!a} has characters outside Unicode; rename it") from None
    if size > _MAX_NAME:
        raise ConfigError(f"a job name of {size} bytes is over the limit of {_MAX_NAME}; shorten it")


# ---------------------------------------------------------------------- records


class _Join(NamedTuple):
    """What a rank says of itself."""

    job: str
    rank: int
    world_size: int
    payload: bytes

    def pack(self) -> bytes:
        return wire.pack_record({"protocol": PROTOCOL, **self._asdict()})

    @classmethod
    def of(cls, record: dict[str, Any]) -> _Join:
        """Check a record that came from the network.

        Raises:
            ProtocolError: another version, or fields that no JOIN has.
        """
        protocol = record.pop("protocol", None)
        if protocol != PROTOCOL:
            raise ProtocolError(
                f"this rank speaks version {protocol!r:.40} of the rendezvous and rank 0 version {PROTOCOL}; "
                "install the same ruda-async on all ranks"
            )
        if set(record) != set(cls._fields):
            raise ProtocolError(f"a JOIN has the fields {', '.join(cls._fields)}")
        join = cls(**record)
        if (
            type(join.job) is not str
            or type(join.payload) is not bytes
            or type(join.rank) is not int
            or type(join.world_size) is not int
            or len(join.payload) > MAX_PAYLOAD
            or not 0 <= join.rank < join.world_size
        ):
            raise ProtocolError("a JOIN holds values that no rank sends")
        return join


class _OtherJobError(ConfigError):
    """Another job meets here. Among several ports to try it means: try the next."""


#: How errors travel; any other code is a `ProtocolError`.
_CODES: dict[str, type[RudaError]] = {
    "config": ConfigError,
    "job": _OtherJobError,
    "timeout": CollectiveTimeoutError,
}


def _refusal(error: RudaError) -> bytes:
    ranks = error.missing if isinstance(error, CollectiveTimeoutError) else (error.rank,)
    code = next((code for code, kind in _CODES.items() if type(error) is kind), "protocol")
    return wire.pack_record(
        {"kind": "refused", "code": code, "text": str(error), "ranks": [r for r in ranks if r is not None]}
    )


def _refused(record: dict[str, Any], where: str) -> RudaError:
    """The error that a REFUSED record tells of; text from the peer is text, whatever it says."""
    code, text, ranks = record.get("code"), record.get("text"), record.get("ranks")
    if type(text) is not str or type(ranks) is not list or not all(type(rank) is int for rank in ranks):
        return ProtocolError(f"{where} sent a malformed refusal")
    kind = _CODES.get(code, ProtocolError) if type(code) is str else ProtocolError
    if kind is CollectiveTimeoutError:
        return CollectiveTimeoutError(text, missing=tuple(ranks))
    if kind is ProtocolError:
        text = f"{where} refused this rank: {text}"
    return kind(text, rank=ranks[0] if ranks else None)


async def _read_record(sock: socket.socket, limit: int) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    prefix = await read_exactly(loop, sock, wire.RECORD_PREFIX_BYTES)
    record = bytearray(len(prefix) + wire.record_bytes(prefix, limit))
    record[: len(prefix)] = prefix
    await read_into(loop, sock, memoryview(record)[len(prefix) :])
    return wire.unpack_record(record, limit)


# ---------------------------------------------------------------------- rank 0


class _Member:
    """A rank that has joined, while its connection lives."""

    def __init__(self, join: _Join, sock: socket.socket, address: str) -> None:
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


class _Host:
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
        self._refused: deque[str] = deque(maxlen=4)
        self._dropped = 0
        self._last_drop = ""
        self._paused: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._connections: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], None] = {}  # oldest first

    async def meet(self, address: Address) -> Meeting:
        """Listen at `address` until all are in and have confirmed."""
        listener = await _listen(self.job, address)
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
            async with asyncio.timeout(_GRACE):
                await self._tell(_refusal(error))
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
            limit.reschedule(max(deadline, self._loop.time() + _GRACE))
            members, changes = list(self.members.values()), self.changes
            payloads = [self.payload, *(self.members[r].join.payload for r in range(1, self.job.world_size))]
            meeting = Meeting(payloads, os.urandom(16))
            for member in members:
                member.unconfirmed += 1
            await self._tell(wire.pack_record({"kind": "welcome", **meeting._asdict()}))
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
        missing = [
            rank
            for rank in range(1, self.job.world_size)
            if rank != asked_by
            and ((member := self.members.get(rank)) is None or (all_in and member.unconfirmed))
        ]
        text = f"{_ranks_text(missing)} of {self.job.world_size} did not come to {self.where} {when}"
        for refused in self._refused:
            text += f"; {refused}"
        if self._dropped:
            text += f"; connections dropped: {self._dropped}, the last because {self._last_drop}"
        text += "; see why they did not come, start the ranks closer together, or raise timeout="
        return CollectiveTimeoutError(text, missing=tuple(missing))

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
        if len(self._strangers) > self.job.world_size + _MAX_STRANGERS:
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
        _prepare(sock)
        deadline = min(self.job.deadline, time.monotonic() + _PATIENCE)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await prove(sock, self.job.secret, server=True, context=_CONTEXT, deadline=deadline)
                record = await _read_record(sock, MAX_PAYLOAD + _OVERHEAD)
        except OSError as error:  # and, by inheritance, all that `prove` and `wire` raise
            self._drop(str(error) or f"{address} did not join in time")
            return
        self._strangers.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        try:
            member = self._admit(_Join.of(record), sock, address)
        except RudaError as error:
            self._refused.append(str(error))
            with contextlib.suppress(OSError):
                await write_all(self._loop, sock, _refusal(error))
            return
        try:
            await self._follow(member)
        except OSError:
            pass
        finally:
            self._leave(member)

    def _admit(self, join: _Join, sock: socket.socket, address: str) -> _Member:
        """Give a rank its place.

        Raises:
            ConfigError: there is none for it; of another world size, it ends the meeting for all.
        """
        job, rank = self.job, join.rank
        if join.job != job.name:
            raise _OtherJobError(
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
            if said == _CONFIRM and member.unconfirmed:
                member.unconfirmed -= 1
                self._changed.set()
            elif said == _ASK and self._all_in():
                continue  # it is about to have its answer
            else:
                self._leave(member)
                if said == _ASK:
                    rank = member.join.rank
                    late = self._too_late(f"before the deadline of rank {rank}", asked_by=rank)
                    await member.write(_refusal(late))
                return


# ---------------------------------------------------------------------- other ranks


class _Guest:
    """Any other rank of one meeting."""

    def __init__(self, job: Job, payload: bytes, address: Address) -> None:
        self.job = job
        self.payload = payload
        self.address = address
        #: What came of the last try, by address.
        self._failures: dict[str, str] = {}

    async def meet(self) -> Meeting:
        """Dial until rank 0 answers and the meeting is over."""
        endpoints: list[_Endpoint] = []
        delay = _FIRST_RETRY
        while True:
            try:
                if not endpoints:
                    endpoints = await _resolve(self.job, self.address)
                    self._failures.clear()
            except socket.gaierror as error:  # names may come later than ranks
                self._failures[str(self.address[0])] = f"host not found: {error.strerror}"
            for endpoint in endpoints:
                meeting = await self._try(endpoint)
                if meeting is not None:
                    return meeting
            pause = delay * random.uniform(0.75, 1.25)
            delay = min(2 * delay, _LAST_RETRY)
            await asyncio.sleep(min(pause, self.job.deadline - time.monotonic()))
            if time.monotonic() >= self.job.deadline:
                raise self._unreached()

    async def _try(self, endpoint: _Endpoint) -> Meeting | None:
        """One connection; None where another try may do better."""
        family, address = endpoint
        where = address_text(address)
        loop = asyncio.get_running_loop()
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            _prepare(sock)
            try:
                async with asyncio.timeout(min(_PATIENCE, self.job.deadline - time.monotonic())):
                    await loop.sock_connect(sock, address)
                return await self._converse(sock, where)
            except (AuthenticationError, ProtocolError, _OtherJobError) as error:
                if len(self.job.ports) < 2:
                    raise (ConfigError(str(error)) if isinstance(error, _OtherJobError) else error) from None
                self._failures[where] = str(error)
            except RudaError:
                raise
            except OSError as error:
                reason = os.strerror(error.errno) if error.errno else str(error)
                if reason or where not in self._failures:
                    self._failures[where] = reason or "no answer"
        return None

    async def _converse(self, sock: socket.socket, where: str) -> Meeting:
        job, loop = self.job, asyncio.get_running_loop()
        # Without other ports to try, a connection that waits to be accepted waits as long as it takes.
        patience = time.monotonic() + _PATIENCE if len(job.ports) > 1 else job.deadline
        try:
            await prove(
                sock, job.secret, server=False, context=_CONTEXT, deadline=min(patience, job.deadline)
            )
        except CollectiveTimeoutError:
            raise ConnectionError("it took the connection and did not answer") from None
        ask = None
        try:
            async with asyncio.timeout(job.deadline - time.monotonic() + 2 * _GRACE) as limit:
                join = _Join(job.name, job.rank, job.world_size, self.payload)
                await write_all(loop, sock, join.pack())
                ask = loop.call_later(job.deadline - time.monotonic(), _ask, sock)
                return await self._hear(loop, sock, where)
        except TimeoutError:
            if not limit.expired():  # told so by rank 0, or by the network
                raise
            raise CollectiveTimeoutError(
                f"rank {job.rank} of {job.world_size}: rank 0 at {where} took this rank in and then did not "
                f"answer within timeout={job.timeout:g} s; it hangs, or its host is gone",
                missing=(0,),
            ) from None
        finally:
            if ask is not None:
                ask.cancel()

    async def _hear(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, where: str) -> Meeting:
        """Take rank 0's records until it says go."""
        size = self.job.world_size
        meeting: Meeting | None = None
        while True:
            record = await _read_record(sock, size * (MAX_PAYLOAD + 8) + _OVERHEAD)
            kind = record.get("kind")
            if kind == "go" and meeting is not None:
                return meeting
            if kind == "refused":
                raise _refused(record, where)
            payloads, session = record.get("payloads"), record.get("session")
            if (
                kind != "welcome"
                or type(session) is not bytes
                or type(payloads) is not list
                or len(payloads) != size
                or not all(type(payload) is bytes for payload in payloads)
            ):
                raise ProtocolError(f"rank 0 at {where} sent a malformed answer of the kind {kind!r:.40}")
            meeting = Meeting(payloads, session)
            await write_all(loop, sock, _CONFIRM)

    def _unreached(self) -> CollectiveTimeoutError:
        job = self.job
        tried = "; ".join(f"{where}: {failure}" for where, failure in self._failures.items())
        return CollectiveTimeoutError(
            f"rank {job.rank} of {job.world_size}: rank 0 was not reached within timeout={job.timeout:g} s "
            f"({tried}); see that rank 0 runs there, check host and port, or raise timeout=",
            missing=(0,),
        )


def _ask(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.send(_ASK)


# ---------------------------------------------------------------------- sockets


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def _resolve(job: Job, address: Address) -> list[_Endpoint]:
    """All that `address` may mean: for each port, each address of the host.

    Raises:
        ConfigError: no usable port or name, or a network address without a secret.
        socket.gaierror: the name is not known.
    """
    if isinstance(address, str):
        return [(socket.AF_UNIX, address)]
    host, port = address
    ports = job.ports or (port,)
    if 0 in ports:
        raise ConfigError(
            f"rank {job.rank} of {job.world_size} cannot meet the others at {host!r} port 0; name a port, or "
            "start the ranks with `ruda-async run`, which hands one out"
        )
    try:
        try:  # a number needs no look-up, and so no thread
            found = socket.getaddrinfo(host, ports[0], type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        except socket.gaierror:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(job.deadline - time.monotonic()):
                found = await loop.getaddrinfo(host, ports[0], type=socket.SOCK_STREAM)
    except TimeoutError:
        raise socket.gaierror(socket.EAI_AGAIN, "no answer in time") from None
    except UnicodeError:
        raise ConfigError(f"{host!a} is not a host name; check the URL") from None
    for _, _, _, _, name in found:
        _check_secret(job, name)
    return [(family, (name[0], port, *name[2:])) for port in ports for family, _, _, _, name in found]


def _check_secret(job: Job, name: Any) -> None:
    """Without a secret there is no meeting where others than this host can reach it."""
    if job.secret or not isinstance(name, tuple):
        return
    ip = ipaddress.ip_address(name[0])
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    if not mapped.is_loopback:
        raise ConfigError(
            f"rank {job.rank}: {name[0]} can be reached from the network, and this job has no secret; set "
            "RUDA_SECRET (or secret_file=) to the same long random value on all ranks"
        )


async def _listen(job: Job, address: Address) -> socket.socket:
    """Rank 0's listening socket.

    Raises:
        ConfigError: there is none to be had; the text says why.
    """
    if job.listen_fd is not None:
        return _borrow(job, job.listen_fd)
    try:
        endpoints = await _resolve(job, address)
    except socket.gaierror as error:
        raise ConfigError(
            f"rank 0: the host {address[0]!r} is not found ({error.strerror}); check the URL"
        ) from None
    failures = {}
    busy = set()
    for family, name in endpoints:
        port = name if isinstance(name, str) else name[1]
        if port in busy:  # at another address of this host; the other ranks might meet what is there
            continue
        try:
            return _bind(family, name, job.world_size + _MAX_STRANGERS)
        except OSError as error:
            failures[address_text(name)] = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                busy.add(port)
    reasons = "; ".join(f"{where}: {reason}" for where, reason in failures.items())
    if busy:
        remedy = (
            "another program or another rank 0 listens there; choose another port, or let `ruda-async run` "
            "choose one (port 0)"
        )
    else:
        remedy = "check the URL; rank 0 listens at an address of its own machine, where it is allowed to"
    raise ConfigError(f"rank 0 of {job.world_size} cannot listen ({reasons}): {remedy}")


def _bind(family: int, name: Any, backlog: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family == socket.AF_UNIX:
            _remove_stale(name)
            sock.bind(name)
            if not name.startswith("\0"):
                os.chmod(name, 0o600)  # nobody connects before `listen`, so nobody is let in earlier
        else:
            # A port whose last connections are still in TIME_WAIT is free; one with a listener is not.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(name)
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def _remove_stale(path: str) -> None:
    """Remove the socket file of a rank 0 that died."""
    if path.startswith("\0"):
        return
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except BlockingIOError:  # its backlog is full: somebody is there
                pass


def _borrow(job: Job, fd: int) -> socket.socket:
    """A duplicate of the launcher's listening socket, which stays open for the next meeting."""
    try:
        duplicate = os.dup(fd)
        try:
            sock = socket.socket(fileno=duplicate)
        except BaseException:
            os.close(duplicate)
            raise
        if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            sock.close()
            raise OSError(errno.EINVAL, "it does not listen")
    except OSError as error:
        raise ConfigError(
            f"rank 0: descriptor {fd} (RUDA_LISTEN_FD) is no listening socket ({error.strerror}); "
            "unset it, or start the ranks with `ruda-async run`"
        ) from None
    try:
        _check_secret(job, sock.getsockname())
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
