"""How new ranks come to a running job: the first step of growing it. The second is in `growth`.

The lowest member listens where the job's URL says, as rank 0 of a job of two ranks, again and again, and each
newcomer comes there as rank 1. So newcomers are met, and prove the secret, as all ranks do, on every
transport alike; and over the link that results they get their invitation: their rank, and where the grown
job meets.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from .errors import CollectiveTimeoutError, ConfigError, PeerLostError, ProtocolError, RudaError
from .opening import open_transport
from .rendezvous import OtherJobError, meet, visit
from .tags import CONTROL_TAG
from .transport.alike import NotAlikeError
from .transport.registry import is_network
from .transport.threads import in_thread

if TYPE_CHECKING:
    from .config import Config
    from .transport.base import Transport
    from .transport.job import Job, Meeting

__all__ = ["LINK_SECONDS", "Invitation", "admit", "invite", "knock", "listen"]

#: Seconds for the steps that need no newcomer to come any more.
LINK_SECONDS = 15.0
_MAX_TICKET = 4096
_FIRST_PAUSE, _LAST_PAUSE = 0.02, 0.2


class Invitation(NamedTuple):
    """Where and as what a rank joins the grown job.

    Attributes:
        name: the grown job's name.
        rank, world_size: this rank's place in it.
        host, port: where it meets, on a network.
    """

    name: str
    rank: int
    world_size: int
    host: str | None
    port: int | None

    def pack(self) -> bytes:
        """As a message."""
        packed: bytes = msgpack.packb(list(self))
        return packed

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Invitation:
        """Check a message that came from the network.

        Raises:
            ProtocolError: it is no invitation.
        """
        try:
            ticket = cls(*msgpack.unpackb(data, max_str_len=2048, max_array_len=8))
            numbers = type(ticket.rank) is int and type(ticket.world_size) is int
            if type(ticket.name) is not str or not numbers or not 0 < ticket.rank < ticket.world_size:
                raise ValueError
            if not isinstance(ticket.host, str | None) or not isinstance(ticket.port, int | None):
                raise ValueError
        except (ValueError, TypeError, msgpack.UnpackException):
            raise ProtocolError("the member that takes newcomers in sent no valid invitation") from None
        return ticket

    def apply(self, config: Config, listen_fd: int | None = None) -> Config:
        """The configuration with which a rank of `config` meets the others."""
        return replace(
            config,
            name=self.name,
            rank=self.rank,
            world_size=self.world_size,
            host=self.host,
            port=self.port,
            ports=(),
            listen_fd=listen_fd,
            timeout=LINK_SECONDS,
        )


def _admission(config: Config, rank: int, deadline: float) -> Config:
    """The job of two in which a newcomer and the lowest member meet."""
    return replace(
        config,
        name=f"{config.name}/join",
        rank=rank,
        world_size=2,
        timeout=max(deadline - monotonic(), 0.001),
        listen_fd=config.listen_fd if rank == 0 else None,
    )


# ---------------------------------------------------------------------- the lowest member


async def admit(config: Config, count: int, seconds: float, members: asyncio.Future[None]) -> list[Transport]:
    """Let `count` newcomers in; a link to each, in the order in which they came.

    Args:
        config: where newcomers knock.
        seconds: how long they have.
        members: done, with an error, when some member cannot go on.

    Raises:
        CollectiveTimeoutError: too few came in time.
        ConfigError: this process cannot listen there.
        PeerLostError, CollectiveCancelledError: what `members` has.
    """
    admission = asyncio.ensure_future(_admit(config, count, seconds))
    try:
        await asyncio.wait((admission, members), return_when=asyncio.FIRST_COMPLETED)
        if not admission.done():
            await members
        return await admission
    finally:
        if not admission.done():
            admission.cancel()
            await asyncio.gather(admission, return_exceptions=True)


async def _admit(config: Config, count: int, seconds: float) -> list[Transport]:
    deadline = monotonic() + seconds
    links: list[Transport] = []
    watches: dict[asyncio.Task[None], Transport] = {}
    why = ""
    try:
        while True:
            for watch in [w for w in watches if w.done()]:  # it died while the others came
                links.remove(lost := watches.pop(watch))
                lost.abort("the newcomer is gone")
            if len(links) == count:
                return links
            if monotonic() >= deadline:
                raise CollectiveTimeoutError(
                    f"grow waited {seconds:.3g} s: {len(links)} of {count} new ranks came to "
                    f"{_place(config)}; start {count - len(links)} more with connect(url, join=True) and "
                    f"this job's secret meanwhile, or raise timeout={_meanwhile(why)}"
                )
            try:
                link = await _admit_one(config, deadline)
            except CollectiveTimeoutError as error:  # nobody came, which is no news
                why = error.seen or why
                continue
            except (PeerLostError, NotAlikeError, TimeoutError) as error:
                why = str(error) or why
                continue
            links.append(link)
            watches[asyncio.ensure_future(_until_lost(link))] = link
    except BaseException:
        for link in links:
            link.abort("grow() failed")
        raise
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def _admit_one(config: Config, deadline: float) -> Transport:
    """A link to the next newcomer. One that dies between meeting and linking up is not waited for long."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout_at(loop.time() + max(deadline - monotonic(), 0) + 2) as limit:

        async def meeting(job: Job, payload: bytes, address: Any) -> Meeting:
            found = await meet(job, payload, address)
            limit.reschedule(loop.time() + LINK_SECONDS / 3)
            return found

        return await open_transport(_admission(config, 0, deadline), meeting)


async def _until_lost(link: Transport) -> None:
    """A newcomer says nothing; so what comes is that it is gone."""
    try:
        await link.probe(1, CONTROL_TAG)
    except RudaError:
        pass


async def invite(links: list[Transport], first: int, invitation: Invitation) -> None:
    """Give each newcomer its invitation, and end the links. One that died meanwhile misses the meeting."""
    for rank, link in enumerate(links, start=first):
        ticket = invitation._replace(rank=rank, host=None).pack()
        try:
            async with asyncio.timeout(LINK_SECONDS / 3):
                await link.send(1, CONTROL_TAG, (memoryview(ticket),))
        except (RudaError, TimeoutError):
            pass
    await asyncio.gather(*(link.close() for link in links))


async def listen(config: Config) -> tuple[str, socket.socket | None]:
    """A fresh name for the grown job, and on a network an open port at this process."""
    name = f"{config.name.partition('#')[0]}#{secrets.token_hex(4)}"
    if not is_network(config.plugin):
        return name, None
    host = config.host or "127.0.0.1"
    try:
        (family, _, _, _, address), *_ = await in_thread(
            partial(socket.getaddrinfo, host, 0, type=socket.SOCK_STREAM)
        )
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(address)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"grow: the lowest member cannot listen on {host!r} ({error.strerror or error}); give "
            "grow(url=…) with an address of its machine, and newcomers the same"
        ) from None
    return name, listener


# ---------------------------------------------------------------------- a newcomer


async def knock(config: Config) -> Config:
    """Come to a running job and wait to be taken in; the configuration of this rank in the grown job.

    Raises:
        CollectiveTimeoutError: no `grow` took this process in before the deadline.
        AuthenticationError: the job has another secret.
        ConfigError: the address cannot be used, or the job has other parameters that have to be the same.
    """
    deadline = monotonic() + config.timeout
    pause = _FIRST_PAUSE
    why = ""
    while monotonic() < deadline:
        try:
            link = await open_transport(_admission(config, 1, deadline), visit)
        except NotAlikeError:
            raise
        except ConfigError as error:
            # Another newcomer is being let in, or the job itself still meets there.
            if error.rank != 1 and not isinstance(error, OtherJobError):
                raise
            why = str(error)
        except CollectiveTimeoutError as error:
            why = error.seen
        except PeerLostError as error:
            why = str(error)
        else:
            try:
                async with asyncio.timeout(deadline - monotonic()):
                    ticket = await _receive(link)
                return ticket._replace(host=config.host).apply(config)
            except PeerLostError as error:
                why = str(error)  # that grow() failed, and another may follow
            except TimeoutError:
                why = "it came to one that still waits for others"
            finally:
                await link.close()
        await asyncio.sleep(min(pause, max(deadline - monotonic(), 0)))
        pause = min(2 * pause, _LAST_PAUSE)
    raise CollectiveTimeoutError(
        f"no job at {_place(config)} took this process in within timeout={config.timeout:g} s; every member "
        f"has to call grow(), with room for this process, while it waits{_meanwhile(why)}"
    ) from None


async def _receive(link: Transport) -> Invitation:
    envelope = await link.probe(0, CONTROL_TAG)
    if envelope.nbytes > _MAX_TICKET:
        raise ProtocolError(f"an invitation of {envelope.nbytes} bytes", rank=0)
    data = bytearray(envelope.nbytes)
    await link.recv_into(0, CONTROL_TAG, (memoryview(data),), envelope.head)
    return Invitation.unpack(data)


def _place(config: Config) -> str:
    if not is_network(config.plugin):
        return f"{config.scheme}://{config.name}"
    return f"{config.scheme}://{config.host or '127.0.0.1'}:{config.port or 0}/{config.name}"


def _meanwhile(why: str) -> str:
    """What was seen last, at the end of a text."""
    return f" (the last that was seen: {why})" if why else ""
