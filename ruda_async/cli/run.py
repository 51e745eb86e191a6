"""``ruda-async run``: a program on several ranks of this host."""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "main"]

_EPILOG = """\
examples:
  ruda-async run -n 4 train.py --epochs 3
  ruda-async run -n 2 --url 'tcp://127.0.0.1:0?heartbeat=2' -m package.module
  ruda-async run -n 2 -- ./program --option

In the program, connect() without arguments joins the job. When a rank fails the others are ended, and the
exit code is its own. Ctrl-C is passed on once; a second one kills.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("-n", "--ranks", type=int, required=True, metavar="N", help="the number of ranks")
    parser.add_argument(
        "--url",
        help="where ranks meet; by default RUDA_URL, else the most preferred transport between processes",
    )
    parser.add_argument(
        "--prefix",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put [rank N] before each line of output (the default)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long ranks that are asked to end may take before they are killed (5)",
    )
    parser.add_argument(
        "--keep-going",
        action="store_true",
        help="a rank other than 0 that fails does not end the others, and the exit code is rank 0's",
    )
    parser.add_argument(
        "--trace-dir",
        metavar="DIR",
        help="the folder that ranks write flight records to; by default RUDA_TRACE_DIR",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module, as python -m does",
    )
    parser.add_argument(
        "command_line",
        nargs=argparse.REMAINDER,
        metavar="program",
        help="a Python file or a folder with a __main__.py, or -- and any program; then its arguments",
    )


def main(args: argparse.Namespace) -> int:
    """Run the program; returns the exit code of the first rank that failed, else 0."""
    from ..launch import run

    argv = args.command_line if args.module is None else ["-m", *args.module]
    return run(
        args.ranks,
        argv,
        args.url,
        prefix=args.prefix,
        grace=args.grace,
        trace_dir=args.trace_dir,
        keep_going=args.keep_going,
    )
