"""The file that ``ruda-async tune`` writes, and what `connect` makes of it."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .machine import fingerprint, machine
from .numbers import Numbers

__all__ = ["OFF", "check_place", "default_path", "find_numbers", "read_tuning", "write_tuning"]

log = logging.getLogger("ruda_async")

#: What ``tuning=`` takes instead of a path, to go by the transport's own declaration.
OFF = "off"
_FORMAT = 1
_MAX_FILE = 1 << 20


def default_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where this machine's measurement is kept: in the user's cache, named for the machine."""
    environ = os.environ if environ is None else environ
    cache = environ.get("XDG_CACHE_HOME", "")
    base = Path(cache) if os.path.isabs(cache) else Path(environ.get("HOME") or "~").expanduser() / ".cache"
    return base / "ruda-async" / f"tuning-{fingerprint(machine())}.json"


def find_numbers(tuning: str | None, scheme: str, environ: Mapping[str, str] | None = None) -> Numbers | None:
    """The measured numbers of a transport, or None where its own declaration holds.

    Args:
        tuning: a path, ``"off"``, or None for `default_path` where there is such a file.
        scheme: the transport's.

    Raises:
        ConfigError: a file that was asked for by name cannot be used: it is not there, is malformed, comes
            from another machine, or has nothing about this transport.
    """
    if tuning == OFF:
        return None
    if tuning is not None:
        path = Path(tuning).expanduser()
        found = read_tuning(path)
        if scheme not in found:
            raise ConfigError(
                f"tuning={tuning!r} has nothing about {scheme}:// (it has {', '.join(found) or 'nothing'}); "
                f"run `ruda-async tune --url {scheme}://… --output {tuning}`, or give tuning=off"
            )
        return found[scheme]
    path = default_path(environ)
    if not path.is_file():
        return None
    try:
        return read_tuning(path).get(scheme)
    except ConfigError as error:  # nobody asked for it
        log.warning("%s", error)
        return None


def write_tuning(path: Path, measured: Mapping[str, Numbers]) -> None:
    """Write what was measured, replacing the file whole.

    Transports that a file of this machine has and `measured` has not are kept.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        kept = read_tuning(path) if path.is_file() else {}  # others (a pipe, a device) hold nothing to keep
    except ConfigError:
        kept = {}
    content = {
        "ruda_async_tuning": _FORMAT,
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "transports": {
            scheme: numbers._asdict() for scheme, numbers in sorted((kept | dict(measured)).items())
        },
    }
    _write(path, json.dumps(content, indent=2) + "\n")


def check_place(path: Path) -> None:
    """See that `write_tuning` will be able to write there; folders that are missing are made.

    Raises:
        ConfigError: it will not.
    """
    _write(path, None)


def _write(path: Path, text: str | None) -> None:
    """Replace a file whole; without a text, leave it as it is, and only see that it could be done.

    What is no plain file (``/dev/stdout``, a named pipe) is written to, and stays what it is.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            if text is not None:
                path.write_text(text)
            return
        place = path.resolve()  # a link stays one
        fresh = place.with_name(f"{place.name}.{os.getpid()}")
        try:
            fresh.write_text(text or "")
            if text is not None:
                fresh.replace(place)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the tuning file {str(path)!r} cannot be written: {error.strerror}; name another by --output"
        ) from None


def read_tuning(path: Path) -> dict[str, Numbers]:
    """What a file says of each transport, by scheme.

    Raises:
        ConfigError: it cannot be read, is no tuning file, or is from another machine.
    """
    shown = f"the tuning file {str(path)!r}"
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(
            f"{shown} cannot be read: {error.strerror}; make it by `ruda-async tune --output {path}`"
        ) from None
    try:
        content: Any = json.loads(data)
        version, facts = content["ruda_async_tuning"], content["machine"]
        if version != _FORMAT:
            raise ValueError(f"its format is {version!r:.20}, not {_FORMAT}")
        found = {
            str(scheme): Numbers(**{name: float(value) for name, value in entry.items()}).check()
            for scheme, entry in content["transports"].items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{shown} is malformed ({type(error).__name__}: {error}); make it anew by `ruda-async tune`"
        ) from None
    if facts != machine():
        ours = machine()
        other = facts if isinstance(facts, dict) else {}
        differs = ", ".join(
            f"{key} {other.get(key)!r:.60}, here {ours[key]!r:.60}"
            for key in ours
            if other.get(key) != ours[key]
        )
        raise ConfigError(
            f"{shown} was measured on another machine ({differs}); run `ruda-async tune` on this one, or "
            "give tuning=off"
        )
    return found
