"""The command ``ruda-async``.

A subcommand is a module of this package with ``add_arguments(parser)`` and ``main(args) -> int``, entered in
`COMMANDS`. It is imported when it is called.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from ..errors import RudaError

__all__ = ["COMMANDS", "main"]

#: Subcommand → what it does. Those whose module is not there are not offered.
COMMANDS = {
    "run": "run a program on several ranks of this host",
    "doctor": "say what is installed, which transports work, and test them",
    "bench": "measure collectives",
    "tune": "measure what messages cost on this machine, for the choice of algorithms",
    "trace": "join the flight records of all ranks, or say in words who waits for whom",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    Errors of the library are one line on standard error and exit code 2, unless ``--traceback`` is given.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    _settle_output()
    args = _parser(argv).parse_args(argv)
    try:
        code: int = importlib.import_module(f".{args.command}", __name__).main(args)
        sys.stdout.flush()
    except RudaError as error:
        if args.traceback:
            raise
        print(f"ruda-async: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _forget_output()  # our reader has gone (``| head``)
        return 141
    except OSError as error:
        if args.traceback or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        _forget_output()
        print(f"ruda-async: cannot write: {error.strerror}", file=sys.stderr)
        return 2
    return code


def _settle_output() -> None:
    """Output that was closed (``>&-``) is lost in silence; what a locale cannot show is replaced."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif name == "stdout" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _forget_output() -> None:
    """What is left in the buffer has to go somewhere at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with the arguments of the one subcommand that `argv` calls."""
    from .. import __version__

    parser = argparse.ArgumentParser(
        prog="ruda-async", description="Tensor collectives for asyncio over pluggable transports."
    )
    parser.add_argument("--version", action="version", version=f"ruda-async {__version__}")
    parser.add_argument(
        "--traceback", action="store_true", help="show where an error came from, not only its text"
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    called = next((arg for arg in argv if not arg.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if importlib.util.find_spec(f"{__name__}.{name}") is None:
            continue
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        if name == called:
            importlib.import_module(f".{name}", __name__).add_arguments(command)
    return parser
