"""``ruda-async bench``: measure collectives, beside peers, in one run."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .files import check_writable, write

__all__ = ["add_arguments", "main"]

_EPILOG = """\
examples:
  ruda-async bench --quick
  ruda-async bench all_reduce --sizes 8:256m:4 --peers gloo,mpi,raw,numpy --html report.html
  ruda-async bench all_to_all_v --world 4 --sizes 512k --dtype bfloat16 --peers gloo
  ruda-async bench all_reduce --url memory://bench --world 2,4,8,16,32 --peers numpy
  ruda-async bench --load results.json --markdown docs/performance.md

Ranks of transports between processes are processes; those of memory:// are tasks of one event loop, or
threads in the mode sync. Blocks of calls of all that is measured alternate. Every result is checked; the
exit code is 1 when one is wrong.
"""

#: What --quick sets where nothing else is asked for.
_QUICK: dict[str, Any] = {"sizes": (8, 64 << 10, 4 << 20), "rounds": 3, "block": 0.01}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    from ..bench.plan import DTYPES, MODES, OPERATIONS, PEERS

    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("operations", nargs="?", help=f"by default all: {', '.join(OPERATIONS)}")
    add("--sizes", metavar="LIST", help="bytes per rank: 8,64k,4m, or first:last:factor such as 8:256m:4")
    add("--world", metavar="LIST", help="numbers of ranks (2)")
    add(
        "--url",
        action="append",
        metavar="URL",
        help="where this library's ranks meet; may be given several times (tcp://127.0.0.1:0)",
    )
    add("--mode", metavar="LIST", help=f"of {', '.join(MODES)} (async)")
    add("--dtype", help=f"of {', '.join(DTYPES)} (float32)")
    add("--in-flight", metavar="LIST", help="numbers of concurrent calls, each on a channel of its own (1)")
    add("--peers", metavar="LIST", help=f"of {', '.join(PEERS)}, or none (gloo,raw,numpy)")
    add("--rounds", type=int, metavar="N", help="blocks of calls (7)")
    add("--block", type=float, metavar="SECONDS", help="what a block should take (0.05)")
    add("--row", type=int, metavar="N", help="elements in a row of all_to_all_v (4096)")
    add("--out", action="store_true", help="reuse the memory of results (out=)")
    add("--empty", action="store_true", help="put tensors into memory that comm.empty() gives")
    add("--timeout", type=float, metavar="SECONDS", help="what any call may take (120)")
    add("--quick", action="store_true", help="fewer and shorter blocks of 8 bytes, 64 KiB and 4 MiB")
    add("--json", type=Path, metavar="FILE", help="write the results there")
    add("--html", type=Path, metavar="FILE", help="write a page with plots there")
    add("--markdown", type=Path, metavar="FILE", help="write a page for the documentation there")
    add(
        "--load",
        type=Path,
        action="append",
        metavar="FILE",
        help="show results that --json wrote instead of measuring; several of one machine are joined",
    )


def main(args: argparse.Namespace) -> int:
    """Measure or load, and show; 1 when a result was wrong."""
    from ..bench.driver import run_plan
    from ..bench.progress import terminal_progress
    from ..bench.table import print_report

    for path in filter(None, (args.json, args.html, args.markdown)):
        check_writable(path)
    report = _load(args.load) if args.load else run_plan(_plan(args), terminal_progress())
    failures = []
    for path, text in _pages(args, report):
        try:
            write(path, text)
        except ConfigError as error:
            failures.append(error)
    print_report(report)  # also where the disk is full: measuring took its time
    if failures:
        raise failures[0]
    return int(bool(report.faults))


def _pages(args: argparse.Namespace, report: Any) -> Iterator[tuple[Path, str]]:
    """What is asked for in files."""
    if args.json:
        yield args.json, report.to_json()
    if args.html:
        from ..bench.report import to_html

        yield args.html, to_html(report)
    if args.markdown:
        from ..bench.markdown import to_markdown

        yield args.markdown, to_markdown(report)


def _plan(args: argparse.Namespace) -> Any:
    from ..bench.plan import Plan, parse_sizes

    options: dict[str, Any] = dict(_QUICK) if args.quick else {}
    for name, given, read in (
        ("operations", args.operations, _names),
        ("sizes", args.sizes, parse_sizes),
        ("worlds", args.world, _numbers),
        ("urls", args.url, tuple),
        ("modes", args.mode, _names),
        ("dtype", args.dtype, str),
        ("in_flight", args.in_flight, _numbers),
        ("peers", args.peers, lambda text: () if text == "none" else _names(text)),
        ("rounds", args.rounds, int),
        ("block", args.block, float),
        ("row", args.row, int),
        ("timeout", args.timeout, float),
    ):
        if given is not None:
            options[name] = read(given)
    return Plan(reuse=args.out, empty=args.empty, **options)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{text!r} is not a list of whole numbers, such as 2,4") from None


def _load(paths: list[Path]) -> Any:
    from ..bench.results import Report

    report = None
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{str(path)!r} cannot be read: {error.strerror}; check the path") from None
        except UnicodeDecodeError:
            raise ConfigError(
                f"{str(path)!r} is not a result of `ruda-async bench --json`, nor text"
            ) from None
        try:
            found = Report.from_json(text)
        except ConfigError as error:
            raise ConfigError(f"{str(path)!r}: {error}") from None
        if report is None:
            report = found
            continue
        if (found.machine.cpu, found.machine.cores) != (report.machine.cpu, report.machine.cores):
            raise ConfigError(f"{str(path)!r} was measured on another machine; show it alone")
        report.rows += found.rows
        report.notes += [note for note in found.notes if note not in report.notes]
    return report
