"""The other ranks of a meeting: each dials rank 0 until it answers, and hears it to the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import socket
import time

from ..errors import AuthenticationError, CollectiveTimeoutError, ProtocolError, RudaError
from ..transport.handshake import Peer, address_text, authenticate, write_all
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
    refused_error,
)
from .sockets import Address, Endpoint, prepare, resolve

__all__ = ["Guest"]

#: Seconds between tries, from the first on; doubled each time.
_FIRST_RETRY, _LAST_RETRY = 0.005, 0.2


class Guest:
    """Any other rank of one meeting."""

    def __init__(self, job: Job, payload: bytes, address: Address) -> None:
        self.job = job
        self.payload = payload
        self.address = address
        #: What came of the last try, by address.
        self._failures: dict[str, str] = {}

    async def meet(self) -> Meeting:
        """Dial until rank 0 answers and the meeting is over."""
        endpoints: list[Endpoint] = []
        delay = _FIRST_RETRY
        while True:
            try:
                if not endpoints:
                    endpoints = await resolve(self.job, self.address)
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

    async def _try(self, endpoint: Endpoint) -> Meeting | None:
        """One connection; None where another try may do better."""
        family, address = endpoint
        where = address_text(address)
        loop = asyncio.get_running_loop()
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            prepare(sock)
            try:
                async with asyncio.timeout(min(limits.PATIENCE, self.job.deadline - time.monotonic())):
                    await loop.sock_connect(sock, address)
                if family != socket.AF_UNIX and sock.getsockname() == sock.getpeername():
                    # TCP's simultaneous open: with nobody there, a port may happen to reach itself.
                    raise OSError(errno.ECONNREFUSED, "the connection is to itself")
                return await self._converse(sock, where)
            except (AuthenticationError, ProtocolError, OtherJobError) as error:
                if len(self.job.ports) < 2:
                    raise
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
        patience = time.monotonic() + limits.PATIENCE if len(job.ports) > 1 else job.deadline
        try:
            link = await authenticate(
                job,
                sock,
                server=False,
                context=CONTEXT,
                deadline=min(patience, job.deadline),
                name="" if isinstance(self.address, str) else self.address[0],
            )
        except CollectiveTimeoutError:
            raise ConnectionError("it took the connection and did not answer") from None
        ask = None
        try:
            async with asyncio.timeout(job.deadline - time.monotonic() + 2 * limits.GRACE) as limit:
                join = Join(job.name, job.rank, job.world_size, self.payload)
                await write_all(loop, link, join.pack())
                ask = loop.create_task(_ask(loop, link, job.deadline))
                return await self._hear(loop, link, where)
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

    async def _hear(self, loop: asyncio.AbstractEventLoop, sock: Peer, where: str) -> Meeting:
        """Take rank 0's records until it says go."""
        size = self.job.world_size
        meeting: Meeting | None = None
        while True:
            record = await read_record(sock, size * (MAX_PAYLOAD + 8) + OVERHEAD)
            kind = record.get("kind")
            if kind == "go" and meeting is not None:
                return meeting
            if kind == "refused":
                raise refused_error(record, where)
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
            await write_all(loop, sock, CONFIRM)

    def _unreached(self) -> CollectiveTimeoutError:
        job = self.job
        tried = "; ".join(f"{where}: {failure}" for where, failure in self._failures.items())
        return CollectiveTimeoutError(
            f"rank {job.rank} of {job.world_size}: rank 0 was not reached within timeout={job.timeout:g} s "
            f"({tried}); see that rank 0 runs there, check host and port, or raise timeout=",
            missing=(0,),
            seen=tried,
        )


async def _ask(loop: asyncio.AbstractEventLoop, sock: Peer, deadline: float) -> None:
    await asyncio.sleep(deadline - time.monotonic())
    with contextlib.suppress(OSError):
        await write_all(loop, sock, ASK)
