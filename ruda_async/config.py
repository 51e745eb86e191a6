"""From a URL, keyword arguments and the environment to one checked `Config`.

``scheme://[host[:port]][/job]?parameter=value&…``, where a parameter is one of `CommonParameters` or the
transport's own. Keyword arguments win over the URL, the URL over the environment (``RUDA_RANK``,
``RUDA_WORLD_SIZE``, ``RUDA_TIMEOUT``, ``RUDA_TUNING``, ``RUDA_TRACE_DIR``, ``RUDA_SECRET``,
``RUDA_SECRET_FILE``). Without a URL it is ``RUDA_URL``, else ``env://``, which takes rank, world size and
meeting place from the launcher (see `ruda_async.environment`).

Every mistake is a `ConfigError` of one line that names the value and the remedy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from .collectives.operation import Settings
from .errors import ConfigError
from .place import DEFAULT_NAME, check_port, find_place, placed_ranks
from .transport.base import Plugin
from .transport.job import Secret
from .transport.parameters import param, parse_parameters
from .url import HIDDEN

__all__ = ["CommonParameters", "Config", "environment", "resolve"]

_MAX_SECRET_FILE = 1 << 20
#: Beyond any job of today; a slip of the finger is to be told at once.
_MOST_RANKS = 1 << 16


@dataclass(frozen=True, slots=True)
class CommonParameters:
    """Parameters of every URL."""

    rank: int | None = param(None, doc="this rank, from 0 on", minimum=0, maximum=_MOST_RANKS - 1)
    world_size: int | None = param(None, doc="the number of ranks", minimum=1, maximum=_MOST_RANKS)
    timeout: float = param(
        300.0, doc="how long joining, and any one call, may take", unit="s", minimum=1e-3, maximum=1e9
    )
    algorithm: str | None = param(None, doc="the algorithm to prefer; by default chosen by size")
    order: str = param(
        "exact", doc="order of summation: the documented one, or any", choices=("exact", "any")
    )
    secret_file: Path | None = param(None, doc="a file that holds the job secret")  # noqa: RUF009
    join: bool = param(False, doc="come to a running job whose members call grow()")
    trace_dir: Path | None = param(  # noqa: RUF009
        None, doc="the folder that flight records are written to at timeouts and lost ranks"
    )
    tuning: str | None = param(
        None, doc="a file of ruda-async tune, or off; by default this machine's, where there is one"
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All that is needed to join a job.

    Attributes:
        scheme: the URL's scheme.
        plugin: the transport that serves it.
        host, port: where ranks meet; None where the transport has no such thing.
        ports: candidates to try in turn, where no single port is known (see `ruda_async.environment`).
        name: the job's name.
        rank, world_size: this rank and how many there are.
        timeout: seconds for joining and the default for every call.
        secret: the job secret; never printed.
        parameters: an instance of ``plugin.parameters``.
        settings: what algorithms must respect.
        listen_fd: an inherited listening socket for rank 0, from a launcher.
        trace_dir: where flight records are written; None for nowhere.
        join: come to a running job; `rank` and `world_size` are not known yet.
        tuning: the file of measured costs that rank 0 goes by, ``"off"``, or None for this machine's.
    """

    scheme: str
    plugin: Plugin
    host: str | None
    port: int | None
    ports: tuple[int, ...]
    name: str
    rank: int
    world_size: int
    timeout: float
    secret: Secret
    parameters: Any
    settings: Settings
    listen_fd: int | None = None
    trace_dir: Path | None = None
    join: bool = False
    tuning: str | None = None

    @property
    def redacted_url(self) -> str:
        """A URL for logs that says what was resolved, without any secret."""
        host = f"[{self.host}]" if self.host and ":" in self.host else self.host or ""
        port = "" if self.port is None else f":{self.port}"
        path = "" if self.name in (DEFAULT_NAME, self.host) else f"/{quote(self.name)}"
        query = {"rank": self.rank, "world_size": self.world_size, "timeout": f"{self.timeout:g}"}
        query |= {k: v for k, v in (("algorithm", self.settings.algorithm),) if v is not None}
        query |= {} if self.settings.order == "exact" else {"order": self.settings.order}
        for f in fields(self.parameters):
            value = getattr(self.parameters, f.name)
            if value != f.default:
                query[f.name] = "***" if f.name in HIDDEN else getattr(value, "value", value)
        return f"{self.scheme}://{host}{port}{path}?{urlencode(query, safe='*/:')}"

    def __repr__(self) -> str:
        return f"<Config {self.redacted_url}, {self.secret}>"


def resolve(
    url: str | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: float | None = None,
    secret: str | bytes | Secret | None = None,
    algorithm: str | None = None,
    order: str | None = None,
    join: bool | None = None,
    environ: Mapping[str, str] | None = None,
    **parameters: Any,
) -> Config:
    """Check and join URL, keyword arguments and environment.

    Args:
        url: ``scheme://[host[:port]][/job]?parameter=value&…``; None for ``RUDA_URL``, else ``env://``.
        rank, world_size, timeout, algorithm, order, join: as in `CommonParameters`.
        secret: the job secret; text stands for its UTF-8 bytes.
        environ: instead of ``os.environ``.
        parameters: `secret_file`, `tuning` and the transport's own parameters.

    Raises:
        ConfigError: a mistake in what was given.
        TransportUnavailableError: the transport's package is not there.
    """
    environ = _environ() if environ is None else environ
    given = {
        "rank": rank,
        "world_size": world_size,
        "timeout": timeout,
        "algorithm": algorithm,
        "order": order,
        "join": join,
    }
    place = find_place(url, environ)
    placed = placed_ranks(place.plugin)
    own = {f.name for f in fields(place.plugin.parameters)}
    raw: dict[str, Any] = {}
    labels: dict[str, str] = {}
    for key, variable in (
        ("rank", "RUDA_RANK"),
        ("world_size", "RUDA_WORLD_SIZE"),
        ("timeout", "RUDA_TIMEOUT"),
        ("trace_dir", "RUDA_TRACE_DIR"),
        ("tuning", "RUDA_TUNING"),
    ):
        if environ.get(variable):
            raw[key] = environ[variable]
            labels[key] = variable
    if placed is not None:
        raw |= {"rank": placed[0], "world_size": placed[1]}
    if place.job is not None:
        raw |= {"rank": place.job.rank, "world_size": place.job.world_size}
    for source in (place.query, {**given, **parameters}):
        for key, value in source.items():
            if value is not None:
                raw[key] = value
                labels.pop(key, None)
    common = {f.name for f in fields(CommonParameters)}
    shared = parse_parameters(
        CommonParameters, place.scheme, {k: v for k, v in raw.items() if k in common}, labels=labels
    )
    specific = parse_parameters(
        place.plugin.parameters,
        place.scheme,
        {k: v for k, v in raw.items() if k not in common or k in own},
        also=common,
    )
    if shared.join:
        shared = replace(shared, rank=1, world_size=2)  # until it is told
    _check_rank(shared, place.scheme)
    assert shared.rank is not None
    assert shared.world_size is not None
    _make_folder(shared.trace_dir)
    listen_fd = _listen_fd(environ) if place.inherited and shared.rank == 0 else None
    if place.port in (None, 0) and not place.ports and listen_fd is None and placed is None:
        check_port(place, shared.world_size)
    return Config(
        scheme=place.scheme,
        plugin=place.plugin,
        host=place.host,
        port=place.port,
        ports=place.ports,
        name=place.name,
        rank=shared.rank,
        world_size=shared.world_size,
        timeout=shared.timeout,
        secret=_find_secret(secret, shared.secret_file, environ),
        parameters=specific,
        settings=Settings(algorithm=shared.algorithm, order=shared.order),
        listen_fd=listen_fd,
        trace_dir=shared.trace_dir,
        join=shared.join,
        tuning=shared.tuning,
    )


# ---------------------------------------------------------------------- the environment

_overlay: ContextVar[Mapping[str, str] | None] = ContextVar("ruda_environment", default=None)


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Let `variables` stand before ``os.environ`` for this thread or task: ranks that share a process."""
    token = _overlay.set(variables)
    try:
        yield
    finally:
        _overlay.reset(token)


def _environ() -> Mapping[str, str]:
    overlay = _overlay.get()
    return os.environ if overlay is None else {**os.environ, **overlay}


def _listen_fd(environ: Mapping[str, str]) -> int | None:
    text = environ.get("RUDA_LISTEN_FD")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"RUDA_LISTEN_FD={text!r:.80} is not a file descriptor; unset it")
    return int(text)


# ---------------------------------------------------------------------- checks


def _make_folder(folder: Path | None) -> None:
    """Records that cannot be written would be missed only after the failure that they are about."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"trace_dir={str(folder)!r:.200} cannot be made: {error.strerror}; name a folder that can be"
        ) from None


def _check_rank(shared: CommonParameters, scheme: str) -> None:
    """Both are there and agree."""
    missing = [name for name in ("rank", "world_size") if getattr(shared, name) is None]
    if missing:
        what = " and ".join(missing)
        example = "&".join(f"{name}={2 if name == 'world_size' else 0}" for name in missing)
        variables = " and ".join(f"RUDA_{name.upper()}" for name in missing)
        keywords = ", ".join(f"{name}=…" for name in missing)
        raise ConfigError(
            f"{scheme}:// needs {what}: give connect({keywords}), or ?{example} in the URL, or set "
            f"{variables} (`ruda-async run` does)"
        )
    assert shared.rank is not None
    assert shared.world_size is not None
    if shared.rank >= shared.world_size:
        raise ConfigError(
            f"rank={shared.rank} is outside a job of world_size={shared.world_size}; ranks count from 0 to "
            f"{shared.world_size - 1}"
        )


def _find_secret(
    secret: str | bytes | Secret | None, secret_file: Path | None, environ: Mapping[str, str]
) -> Secret:
    """The keyword, else the file that keyword or URL name, else ``RUDA_SECRET``, ``RUDA_SECRET_FILE``."""
    if isinstance(secret, Secret):
        return secret
    if secret is not None:
        if not isinstance(secret, (str, bytes)):
            raise ConfigError(f"secret= is text or bytes, not {type(secret).__name__}")
        return Secret(secret.encode() if isinstance(secret, str) else secret)
    if secret_file is not None:
        return _read_secret(secret_file, "secret_file")
    if environ.get("RUDA_SECRET"):
        return Secret(os.fsencode(environ["RUDA_SECRET"]))
    if environ.get("RUDA_SECRET_FILE"):
        return _read_secret(Path(environ["RUDA_SECRET_FILE"]).expanduser(), "RUDA_SECRET_FILE")
    return Secret(b"")


def _read_secret(path: Path, label: str) -> Secret:
    try:
        with path.open("rb") as file:
            value = file.read(_MAX_SECRET_FILE + 1)
    except OSError as error:
        raise ConfigError(
            f"{label}={str(path)!r} cannot be read: {error.strerror}; check the path and its permissions"
        ) from None
    value = value.removesuffix(b"\n").removesuffix(b"\r")
    if not value or len(value) > _MAX_SECRET_FILE:
        state = "empty" if not value else f"larger than {_MAX_SECRET_FILE} bytes"
        raise ConfigError(f"{label}={str(path)!r} is {state}; put the job secret there, one line")
    return Secret(value)
