"""``ruda-async tune``: measure what messages and additions cost here, once, for `connect` to choose by."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RudaError, TransportUnavailableError

__all__ = ["add_arguments", "main"]

_EPILOG = """\
examples:
  ruda-async tune
  ruda-async tune --url 'tcp://?socket_bytes=4m' --output cluster-a.json

Each transport is measured between two ranks of this machine. Jobs here go by the file in the user's cache
without being told; any other file is named by tuning= or RUDA_TUNING, and tuning=off goes by what transports
declare. Rank 0's numbers hold for all ranks. comm.explain(operation, bytes) shows what comes of it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "--url",
        action="append",
        metavar="URL",
        help="a transport and its parameters; may be given several times (by default all that work here)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="where to write (a file of the user's cache)"
    )
    parser.add_argument("--rounds", type=int, default=300, metavar="N", help="rounds of short messages (300)")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for each transport (60)"
    )
    parser.add_argument("--show", action="store_true", help="measure nothing, show what the file says")


def main(args: argparse.Namespace) -> int:
    """Measure, write and show; 1 where a transport failed that works here of itself, or none was measured."""
    from ..tuning.measure import measure
    from ..tuning.store import check_place, default_path, read_tuning, write_tuning
    from ..url import split_url

    path = args.output or default_path()
    if args.show:
        for scheme, numbers in read_tuning(path).items():
            print(f"{scheme}: {numbers}")
        return 0
    if args.rounds < 1:
        raise ConfigError(f"rounds={args.rounds} is out of range; give numbers from 1 on")
    check_place(path)  # before it takes a minute
    failed = 0
    measured = {}
    for url in args.url or _urls():
        try:
            numbers = measure(url, args.rounds, args.timeout)
        except RudaError as error:
            if args.url:
                raise
            print(f"ruda-async: {url} was not measured: {error}", file=sys.stderr)
            failed = 1
            continue
        measured[split_url(url).scheme] = numbers
        print(f"{split_url(url).scheme}: {numbers}", flush=True)
    if measured:
        write_tuning(path, measured)
        print(f"written to {path}")
    return failed


def _urls() -> list[str]:
    """Every transport that works here of itself and is no wrapper; says why others are left out."""
    from ..transport.registry import plugins, why_unavailable

    found = []
    for scheme, info in plugins().items():
        plugin: Any = info.load() if why_unavailable(info) is None else None
        if plugin is None or getattr(plugin, "wraps", False):
            continue
        needs = getattr(plugin, "needs", "")
        if needs:
            left_out = f"it needs {needs}; give them by --url '{scheme}://?…'"
        elif plugin.rank_per == "engine":
            left_out = "another engine starts its ranks; it goes by what it declares"
        else:
            found.append(f"{scheme}://")
            continue
        print(f"ruda-async: {scheme}:// is not measured: {left_out}", file=sys.stderr)
    if not found:
        raise TransportUnavailableError("no transport works here; see `ruda-async doctor`")
    return found
