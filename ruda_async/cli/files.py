"""Files that commands write, by names that a person gave."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigError

__all__ = ["check_writable", "write"]


def check_writable(path: Path) -> None:
    """See that `write` can open the file, before minutes go into what it will hold. Nothing is changed.

    Raises:
        ConfigError: it cannot; the text says why.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"the folder of {str(path)!r} is not there; make it, or name another")
    new = not path.exists()
    if not (new or path.is_file() or path.is_dir()):
        return  # who reads a pipe would take this for its end
    try:
        with path.open("a"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise _cannot(path, error) from None


def write(path: Path, text: str) -> None:
    """Write the whole file.

    Raises:
        ConfigError: it cannot be written; the text says why.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise _cannot(path, error) from None


def _cannot(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot write {str(path)!r}: {error.strerror or error}; name another file")
