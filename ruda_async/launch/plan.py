"""What all ranks of a job on this host are told, settled and checked before the first of them starts."""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

from ..config import resolve
from ..errors import ConfigError
from ..transport.base import Plugin
from ..transport.registry import default_plugin, get_plugin, is_network
from ..url import UrlParts, split_url

__all__ = ["Plan", "fresh_url", "prepare"]

_LOOPBACK = "127.0.0.1"
#: Connections that may wait at the listener while rank 0 still starts, beyond one for each rank.
_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """A job that is about to start. A context manager, which closes the listening socket.

    Attributes:
        url: where all ranks meet, with a real port.
        world_size: how many ranks there are.
        listener: the socket at that port, for rank 0 to inherit; None where the URL named the port.
    """

    url: str
    world_size: int
    listener: socket.socket | None
    _secret: str | None = field(repr=False)

    def variables(self, rank: int, listen_fd: int | None = None) -> dict[str, str]:
        """The environment variables that make ``connect()`` without arguments join as `rank`.

        Those that do not apply are there and empty, so that none is left over from an outer job.
        """
        variables = {
            "RUDA_URL": self.url,
            "RUDA_RANK": str(rank),
            "RUDA_LOCAL_RANK": str(rank),
            "RUDA_WORLD_SIZE": str(self.world_size),
            "RUDA_LISTEN_FD": "" if listen_fd is None else str(listen_fd),
        }
        return variables if self._secret is None else {**variables, "RUDA_SECRET": self._secret}

    def __enter__(self) -> Plan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.listener is not None:
            self.listener.close()


def prepare(
    url: str | None, world_size: int, *, rank_per: str = "process", environ: Mapping[str, str] | None = None
) -> Plan:
    """Choose the URL, the port and the secret of a job on this host.

    Args:
        url: without one, ``RUDA_URL`` where this process is not itself a rank, else the most preferred
            transport's example.
        world_size: the number of ranks.
        rank_per: ``"process"`` where each rank is one, ``"task"`` where they share this process, ``"engine"``
            where another engine has started them.
        environ: instead of ``os.environ``.

    Raises:
        ConfigError: the URL or a number is wrong.
        TransportUnavailableError: the transport cannot be used here.
    """
    environ = os.environ if environ is None else environ
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"world_size={world_size!r} is out of range; a job has at least 1 rank")
    if url is None and not environ.get("RUDA_RANK"):
        url = environ.get("RUDA_URL") or None
    if url is None:
        url = fresh_url(default_plugin(rank_per))
    parts = split_url(url)
    plugin = get_plugin(parts.scheme) if parts.scheme else None
    if plugin is not None:
        _check(plugin, parts, world_size, rank_per)
    listener = None
    try:
        if plugin is not None and is_network(plugin) and not parts.port:
            listener = _listen(parts.host or _LOOPBACK, world_size)
            url = _with_port(url, parts.host or _LOOPBACK, listener.getsockname()[1])
        config = resolve(url, rank=0, world_size=world_size, environ=environ)
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    return Plan(url, world_size, listener, None if config.secret else secrets.token_hex(32))


def fresh_url(plugin: Plugin) -> str:
    """The plugin's example under a job name of its own, so that jobs on this host do not meet."""
    place, question, query = plugin.example.partition("?")
    base = f"{place.rstrip('/')}/" if is_network(plugin) else f"{plugin.scheme}://"
    return f"{base}job-{os.getpid()}-{secrets.token_hex(4)}{question}{query}"


def _check(plugin: Plugin, parts: UrlParts, world_size: int, rank_per: str) -> None:
    if plugin.rank_per == "engine" and rank_per != "engine":
        raise ConfigError(
            f"{parts.scheme}:// is for ranks that another engine starts, such as mpiexec; start the program "
            f"with that, or use {default_plugin('process').scheme}://"
        )
    if rank_per == "process" and plugin.rank_per != "process":
        raise ConfigError(
            f"{parts.scheme}:// links ranks of one process, and the launcher starts {world_size}; use "
            f"spawn(…, threads=True), or {default_plugin('process').scheme}://"
        )
    if "rank" in parts.query:
        raise ConfigError(
            f"the URL {parts.text!r} names a rank, but the launcher numbers the ranks; leave rank= out"
        )
    if parts.query.get("world_size", str(world_size)) != str(world_size):
        raise ConfigError(
            f"the URL {parts.text!r} says world_size={parts.query['world_size']}, the launcher was told "
            f"{world_size}; leave world_size= out of the URL"
        )


def _listen(host: str, world_size: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, backlog=world_size + _BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host!r}: {error.strerror or error}; name an address of this machine"
        ) from None


def _with_port(url: str, host: str, port: int) -> str:
    scheme, _, rest = url.partition("://")
    tail = re.sub(r"^[^/?#]*", "", rest)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{tail}"
