"""The sockets of a meeting: what an address means, where rank 0 may listen, and when a secret is needed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import socket
import stat
import time
from functools import partial
from typing import Any, TypeAlias

from ..errors import ConfigError
from ..transport.handshake import address_text
from ..transport.job import Job
from ..transport.threads import in_thread
from . import limits

__all__ = ["Address", "Endpoint", "listen", "prepare", "resolve"]

Address: TypeAlias = "tuple[str, int] | str"
#: An address family and an address of it, as `socket` takes them.
Endpoint: TypeAlias = "tuple[int, Any]"


def prepare(sock: socket.socket) -> None:
    """Make a socket non-blocking and, on a network, quick with small messages."""
    sock.setblocking(False)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


async def resolve(job: Job, address: Address) -> list[Endpoint]:
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
            async with asyncio.timeout(job.deadline - time.monotonic()):
                found = await in_thread(partial(socket.getaddrinfo, host, ports[0], type=socket.SOCK_STREAM))
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


async def listen(job: Job, address: Address) -> socket.socket:
    """Rank 0's listening socket.

    Raises:
        ConfigError: there is none to be had; the text says why.
    """
    if job.listen_fd is not None:
        return _borrow(job, job.listen_fd)
    try:
        endpoints = await resolve(job, address)
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
            return _bind(family, name, job.world_size + limits.MAX_STRANGERS)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
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
