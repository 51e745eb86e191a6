"""``scheme://[host[:port]][/job]?parameter=value&…``: a URL's syntax, and nothing of what it means."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from .errors import ConfigError

__all__ = ["HIDDEN", "UrlParts", "redact", "split_url"]

#: Parameters with these names are never printed, and refused in URLs.
HIDDEN = frozenset(("secret", "password", "passwd", "token"))

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")


class UrlParts(NamedTuple):
    """A URL taken apart, its parts decoded.

    Attributes:
        text: the whole, fit for error texts.
        scheme: in lower case; empty where there is none, and then all else is empty too.
        host, port: None where there is none.
        path: without the slashes around it.
        query: its parameters, each once.
    """

    text: str
    scheme: str
    host: str | None
    port: int | None
    path: str
    query: dict[str, str]


def split_url(url: object) -> UrlParts:
    """Take a URL apart and check it; nothing is looked up.

    Raises:
        ConfigError: it is malformed, or carries a password or a secret.
    """
    if not isinstance(url, str):
        raise ConfigError(f"a URL is text such as scheme://host:port/job, not {type(url).__name__}")
    shown = redact(url)
    if _CONTROL.search(url):
        raise ConfigError(f"the URL {shown!r} has control characters; remove them")
    scheme, found, rest = url.partition("://")
    if not found or not _SCHEME.fullmatch(scheme):
        return UrlParts(shown, "", None, None, "", {})
    if "@" in rest:
        raise ConfigError(
            f"the URL {shown!r} has a user or password before '@'; take it out, and give the job secret as "
            "RUDA_SECRET or secret_file= (a plain @ is written %40)"
        )
    rest, _, fragment = rest.partition("#")
    if fragment:
        raise ConfigError(f"the URL {shown!r} has a part after '#', which means nothing here; write # as %23")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    host, port = _host_and_port(authority, shown)
    return UrlParts(
        shown, scheme.lower(), host, port, _decode(path.strip("/"), "job name"), _query(query, shown)
    )


def _host_and_port(authority: str, shown: str) -> tuple[str | None, int | None]:
    if authority.startswith("["):
        host, bracket, rest = authority[1:].partition("]")
        if not bracket or not host or (rest and not rest.startswith(":")):
            raise ConfigError(f"the URL {shown!r} has unbalanced brackets; write an IPv6 host as [::1]:29500")
        colon, port = rest[:1], rest[1:]
    else:
        host, colon, port = authority.partition(":")
        if ":" in port:
            raise ConfigError(f"the URL {shown!r} has several colons in its host; write IPv6 as [::1]:29500")
    if not colon:
        return _decode(host, "host") or None, None
    if not (port.isascii() and port.isdigit()):
        raise ConfigError(
            f"the URL {shown!r} has port {port!r:.40}, which is no number; a port is from 1 to 65535"
        )
    if len(port) > 5 or int(port) > 65535:
        raise ConfigError(
            f"the URL {shown!r} has port {port:.20}, which is out of range; it is from 1 to 65535"
        )
    return _decode(host, "host") or None, int(port)


def _query(query: str, shown: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for item in query.split("&"):
        if not item:
            continue
        key, equals, value = (part.replace("+", " ") for part in item.partition("="))
        key = _decode(key, "parameter name")
        if key.lower() in HIDDEN:
            raise ConfigError(
                f"a {key.lower()} in a URL would be printed in logs; set RUDA_SECRET, or give secret= or "
                "secret_file="
            )
        if not equals:
            raise ConfigError(
                f"the URL {shown!r} has the parameter {key!r} without a value; write {key}=value"
            )
        if key in found:
            raise ConfigError(f"the URL {shown!r} gives the parameter {key!r} twice; keep one")
        found[key] = _decode(value, key)
    return found


def _decode(text: str, what: str) -> str:
    try:
        decoded = unquote_to_bytes(text).decode()
    except UnicodeDecodeError:
        raise ConfigError(
            f"the URL's {what} {text!r:.80} is not UTF-8 once decoded; write it as UTF-8"
        ) from None
    if _CONTROL.search(decoded):
        raise ConfigError(f"the URL's {what} {text!r:.80} has control characters; remove them")
    return decoded


def redact(url: str) -> str:
    """The URL without user, password and what looks secret, fit for an error text."""
    url = re.sub(r"(://|^).*@", r"\1***@", url, flags=re.DOTALL)
    url = re.sub(rf"(?i)([?&][^&=]*(?:{'|'.join(sorted(HIDDEN))})[^&=]*=)[^&#]*", r"\1***", url)
    return url if len(url) <= 200 else url[:200] + "…"
