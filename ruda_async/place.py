"""Where ranks meet, and over which transport: from a URL, else from the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from .environment import EnvJob, find_job, from_environment
from .errors import ConfigError, TransportUnavailableError
from .transport.base import Plugin
from .transport.registry import default_plugin, get_plugin, is_network, plugins
from .url import UrlParts, split_url

__all__ = ["DEFAULT_NAME", "Place", "check_port", "find_place", "placed_ranks"]

#: The job's name where the URL gives none.
DEFAULT_NAME = "default"
#: The pseudo-scheme that asks the environment.
_ENV = "env"


class Place(NamedTuple):
    """Which transport, and where ranks meet."""

    scheme: str
    plugin: Plugin
    host: str | None
    port: int | None
    ports: tuple[int, ...]
    name: str
    query: dict[str, str]
    job: EnvJob | None = None
    #: Whether a launcher named this place, so that a socket it hands over belongs to it.
    inherited: bool = False


def find_place(url: str | None, environ: Mapping[str, str]) -> Place:
    """The place that `url` names, or the environment where it names none.

    Raises:
        ConfigError: neither names a transport, or what they name cannot be.
        TransportUnavailableError: the transport's package is not there.
    """
    asked = url
    if url is None:
        asked = environ.get("RUDA_URL") or f"{_ENV}://"
    parts = _split(asked)
    if parts.scheme != _ENV:
        place = _locate(parts)
        return place if url is not None else place._replace(inherited=True, job=find_job(environ))
    if parts.host or parts.port is not None:
        raise ConfigError(
            f"{parts.text!r}: env:// takes no host, since the environment names it; write "
            f"env:///{parts.host or 'job'} for a job name"
        )
    inner = environ.get("RUDA_URL")
    if inner and not inner.startswith(f"{_ENV}:"):
        place = _locate(_split(inner))
        name = parts.path or place.name
        return place._replace(
            name=name, query=place.query | parts.query, inherited=True, job=find_job(environ)
        )
    job = from_environment({k: v for k, v in environ.items() if k != "RUDA_URL"})
    plugin = default_plugin(network=True)
    return Place(
        plugin.scheme, plugin, job.host, None, job.ports, parts.path or job.name, parts.query, job, True
    )


def _locate(parts: UrlParts) -> Place:
    plugin = get_plugin(parts.scheme)
    if is_network(plugin):
        host, name = parts.host, parts.path or DEFAULT_NAME
    else:
        if parts.port is not None:
            meant = f"{parts.scheme}://{parts.host or 'job'}"
            raise ConfigError(
                f"the URL {parts.text!r} has a port, which {parts.scheme} does not use; write {meant}"
            )
        host, name = parts.host, "/".join(p for p in (parts.host, parts.path) if p) or DEFAULT_NAME
    return Place(parts.scheme, plugin, host, parts.port, (), name, parts.query)


def placed_ranks(plugin: Plugin) -> tuple[int, int] | None:
    """Rank and world size, where the plugin's own engine has placed this process."""
    ask = getattr(plugin, "placed", None)
    found: tuple[int, int] | None = None if ask is None else ask()
    return found


def _split(url: object) -> UrlParts:
    parts = split_url(url)
    if not parts.scheme:
        raise ConfigError(_no_scheme(parts.text))
    return parts


def _no_scheme(url: str) -> str:
    """The error text for a URL without a scheme: what was probably meant, and what there is."""
    known = [*plugins(), _ENV]
    guess = ""
    scheme, colon, rest = url.partition(":")
    if colon and scheme.lower() in known:
        guess = f"{scheme}://{rest.lstrip('/')}"
    elif re.match(r"(//)?(\[[^\]]*\]|[^/?:]+):[0-9]+", url):
        with suppress(TransportUnavailableError):
            guess = f"{default_plugin(network=True).scheme}://{url.lstrip('/')}"
    meant = f"did you mean {guess}? A URL" if guess else "a URL"
    return f"the URL {url!r} names no transport; {meant} begins with one of " + ", ".join(
        f"{scheme}://" for scheme in known
    )


def check_port(place: Place, world_size: int) -> None:
    """Refuse a place without a port, where ranks meet over a network.

    Raises:
        ConfigError
    """
    if world_size > 1 and is_network(place.plugin):
        what = "no port" if place.port is None else "port 0"
        raise ConfigError(
            f"{place.scheme}:// with {what} names no place to meet; write "
            f"{place.scheme}://{place.host or '10.0.0.5'}:29500, or start the ranks with `ruda-async run`, "
            "which finds a free port"
        )
