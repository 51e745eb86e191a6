"""From torch's ways of meeting to a communicator.

Torch meets first: its ``init_process_group`` makes a key-value store from ``env://``, ``tcp://``,
``file://`` or the store it is given. A URL of this library (`Options`, ``RUDA_URL``) then says over what to
talk. Where it names no place (``shm://``, ``tcp://``, or no URL at all), rank 0 chooses one and puts it into
the store. With one of this library's schemes as ``init_method``, the ranks meet through the transport, and
torch's store is made from the communicator.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store, TCPStore

from .. import sync
from ..config import environment
from ..environment import find_job
from ..errors import ConfigError, RudaError
from ..transport.registry import default_plugin, get_plugin, is_network
from ..url import split_url
from .work import BackendError

__all__ = ["Options", "claim", "join", "meet"]

_LOOPBACK = "127.0.0.1"
#: Connections that may wait at rank 0's port before it accepts, beyond one for each rank.
_BACKLOG = 64
#: Communicators that `meet` made and no process group has claimed yet.
_waiting: list[sync.Communicator] = []


@dataclass(frozen=True, slots=True)
class Options:
    """``init_process_group("ruda", pg_options=Options(…))``.

    Attributes:
        url: the transport's URL; it wins over ``RUDA_URL``. Without a host, port or job name, ranks agree on
            one through torch's store.
        parameters: further keyword arguments of `ruda_async.connect`, such as ``order="any"``.
    """

    url: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)


def join(
    store: Store, rank: int, world_size: int, timeout: timedelta, options: Options, own_place: bool = False
) -> sync.Communicator:
    """Connect the ranks of a process group.

    Args:
        store: torch's, of this group alone.
        rank, world_size, timeout: the group's.
        options: see `Options`.
        own_place: the URL's place is taken by another group; choose one of this group's own.

    Raises:
        ConfigError, TransportUnavailableError, CollectiveTimeoutError, AuthenticationError
    """
    asked = options.url or os.environ.get("RUDA_URL") or ""
    if asked.startswith("env:"):
        asked = ""
    arguments: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timeout.total_seconds()}
    arguments |= options.parameters
    parts = split_url(asked or f"{default_plugin(network=True).scheme}://")
    plugin = get_plugin(parts.scheme)
    known = parts.host or parts.path or parts.port is not None
    if known and not own_place:
        return sync.connect(options.url, **arguments)
    meeting = _Meeting(store, rank)
    listener = None
    if rank == 0:
        with meeting.telling_others():
            place = f"job-{os.getpid()}-{secrets.token_hex(8)}"
            if is_network(plugin):
                listener = _listen(_host_of(store), world_size)
                host, port = listener.getsockname()[:2]
                place = f"{f'[{host}]' if ':' in host else host}:{port}"
            meeting.tell(place)
    url = re.sub(r"://[^?#]*", lambda _: f"://{meeting.place()}", parts.text, count=1)
    variables = {"RUDA_URL": url, "RUDA_LISTEN_FD": "" if listener is None else str(listener.detach())}
    if not _has_secret(parts.query, options):
        variables["RUDA_SECRET"] = meeting.secret()
    with environment(variables):
        communicator = sync.connect(None, **arguments)
    meeting.over()
    return communicator


def _has_secret(query: Mapping[str, str], options: Options) -> bool:
    given = {*query, *options.parameters}
    return bool(
        given & {"secret", "secret_file"}
        or os.environ.get("RUDA_SECRET")
        or os.environ.get("RUDA_SECRET_FILE")
    )


class _Meeting:
    """What rank 0 tells the others through the store."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        # A store may outlive a process group: the n-th group on it has keys of its own.
        self._life = store.add(f"ruda/lives/{rank}", 1)
        if rank == 0:
            self._store.set(self._key("secret"), secrets.token_hex(32))

    def _key(self, name: str) -> str:
        return f"ruda/{self._life}/{name}"

    def tell(self, place: str) -> None:
        """Rank 0: where the ranks meet."""
        self._store.set(self._key("place"), f"at {place}")

    def telling_others(self) -> _Telling:
        """Rank 0: within, an error is the others' too."""
        return _Telling(self)

    def fail(self, error: BaseException) -> None:
        """Rank 0: there is no place."""
        self._store.set(self._key("place"), f"no {error}")

    def place(self) -> str:
        """Where the ranks meet.

        Raises:
            ConfigError: rank 0 could not say.
        """
        kind, _, text = self._store.get(self._key("place")).decode().partition(" ")
        if kind == "no":
            raise ConfigError(f"rank 0 has no place to meet: {text}", rank=0)
        return text

    def secret(self) -> str:
        """The job secret that rank 0 made."""
        return self._store.get(self._key("secret")).decode()

    def over(self) -> None:
        """All ranks have met: the secret need not stay in the store."""
        if self._rank == 0:
            self._store.delete_key(self._key("secret"))


class _Telling:
    def __init__(self, meeting: _Meeting) -> None:
        self._meeting = meeting

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._meeting.fail(error)


def _host_of(store: Any) -> str:
    """The host of rank 0 as the others know it: that of torch's store, where it is a server."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store.host if isinstance(store, TCPStore) else _LOOPBACK


def _listen(host: str, world_size: int) -> socket.socket:
    """A socket at a free port of `host`, or of this machine's name where the store is elsewhere."""
    refused: OSError | None = None
    for name in (host, socket.gethostname()):
        try:
            found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
            family, address = found[0][0], found[0][4]
            return socket.create_server(address[:2], family=family, backlog=world_size + _BACKLOG)
        except OSError as error:
            refused = refused or error
    raise ConfigError(f"cannot listen on {host!r}: {refused}; set RUDA_URL to scheme://host:port of rank 0")


# ---------------------------------------------------------------------- meeting through a transport


def meet(
    url: str, timeout: timedelta = timedelta(minutes=5), **ignored: Any
) -> Iterator[tuple[Store, int, int]]:
    """Torch's rendezvous handler for this library's schemes: ``init_method="shm://job"``.

    ``ruda://`` asks the environment, as `ruda_async.connect` does. Rank and world size are those of the
    call, the URL or the launcher.

    Yields:
        a store that rank 0 serves, rank and world size.
    """
    scheme, _, rest = url.partition("://")
    arguments: dict[str, Any] = {"timeout": timeout.total_seconds()}
    query = split_url(url).query
    asked: str | None = url
    if scheme == "ruda":
        place = rest.partition("?")[0]
        if place.strip("/"):
            raise ConfigError(f"ruda://{place} names a place, which the environment does: write ruda://")
        arguments |= {name: int(query[name]) for name in ("rank", "world_size") if name in query}
        asked = None
    else:
        if (job := find_job(os.environ)) is not None:
            own = {"rank": job.rank, "world_size": job.world_size}
            arguments.update((name, value) for name, value in own.items() if name not in query)
    communicator = sync.connect(asked, **arguments)
    try:
        store = _store_over(communicator, split_url(url).host, timeout)
    except BaseException:
        communicator.close()
        raise
    _waiting.append(communicator)
    yield store, communicator.rank, communicator.world_size
    raise BackendError(RudaError(f"{scheme}:// does not meet again; make a new process group"))


def claim(rank: int, world_size: int) -> sync.Communicator | None:
    """The communicator that `meet` made for the process group that is being made, if it did."""
    while _waiting:
        communicator = _waiting.pop()
        if (communicator.rank, communicator.world_size) == (rank, world_size) and not communicator.closed:
            return communicator
        communicator.close()
    return None


def _store_over(communicator: sync.Communicator, host: str | None, timeout: timedelta) -> Store:
    """A store that rank 0 serves on a free port, which it tells through the communicator."""
    served = None
    place: Any = None
    if communicator.rank == 0:
        host = host if host and _resolves(host) else _LOOPBACK
        served = TCPStore(host, 0, communicator.world_size, True, timeout, wait_for_workers=False)
        place = [host, served.port]
    host, port = communicator.broadcast_object(place, 0)
    if served is not None:
        return served
    return TCPStore(host, port, communicator.world_size, False, timeout, wait_for_workers=False)


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, 0)
    except OSError:
        return False
    return True
