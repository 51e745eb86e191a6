"""Where a rank listens for its peers, and where they reach it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from functools import partial
from typing import Any

from ..errors import ConfigError, ProtocolError
from .job import Job
from .mesh import MAX_STRANGERS
from .threads import in_thread

__all__ = ["listen_for_ranks", "no_address", "reachable_address", "resolve"]


def no_address(rank: int) -> ProtocolError:
    """What to raise where what `rank` sent at the meeting does not say how it is reached."""
    return ProtocolError(
        f"rank {rank} sent no usable address; see that all ranks have the same URL and version", rank=rank
    )


async def listen_for_ranks(job: Job, bind: str = "") -> socket.socket:
    """A non-blocking listener for other ranks of the job, on a free port.

    Args:
        bind: a local address or name; by default the address by which this host reaches rank 0.

    Raises:
        ConfigError: there is no such address here.
    """
    name = bind or job.host or "127.0.0.1"
    failure: OSError | None = None
    for family, address in await resolve(job, name, job.port or 1):
        try:
            where = address[0] if bind or job.rank == 0 else _route_to(family, address)
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.bind((where, 0))
                listener.listen(job.world_size + MAX_STRANGERS)
                listener.setblocking(False)
            except BaseException:
                listener.close()
                raise
            return listener
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            failure = error
    raise ConfigError(
        f"rank {job.rank} cannot listen on {name!r}: {failure.strerror if failure else 'no address'}; "
        "give this host's own address as bind="
    )


async def reachable_address(job: Job, listener: socket.socket) -> tuple[str, int]:
    """Where the other ranks reach `listener`."""
    host, port = listener.getsockname()[:2]
    if job.rank and ipaddress.ip_address(host).is_unspecified:
        # Nobody can dial "all addresses": name the one that rank 0 sees this host at.
        family, address = (await resolve(job, job.host or "127.0.0.1", job.port or 1))[0]
        host = _route_to(family, address)
    return host, port


async def resolve(job: Job, host: str, port: int) -> list[tuple[int, Any]]:
    """The families and addresses that `host` stands for; at least one.

    Raises:
        ConfigError: it is not found.
    """
    try:
        async with asyncio.timeout(job.remaining()):
            infos = await in_thread(partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error) or "no answer in time"
        raise ConfigError(
            f"rank {job.rank}: the host {host!r} is not found: {reason}; check the URL and bind="
        ) from None
    return [(family, address) for family, _, _, _, address in infos]


def _route_to(family: int, address: Any) -> str:
    """The local address from which `address` is reached; sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        host: str = probe.getsockname()[0]
        return host
