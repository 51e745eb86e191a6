"""``ruda-async trace``: flight records of all ranks, on one time line or in words."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from .files import write

__all__ = ["add_arguments", "main"]

_EPILOG = """\
examples:
  ruda-async run -n 4 --trace-dir traces train.py
  ruda-async trace explain traces/*.json
  ruda-async trace merge traces/*.json -o trace.json

Of each rank the latest record is taken. Show trace.json at https://ui.perfetto.dev or in chrome://tracing.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    merging = actions.add_parser("merge", help="join the ranks into one trace for Perfetto or Chrome")
    merging.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to write it; standard output by default"
    )
    explaining = actions.add_parser("explain", help="say who waits for whom")
    explaining.add_argument("--json", action="store_true", help="print JSON: culprits and text")
    for action in (merging, explaining):
        action.add_argument(
            "records", type=Path, nargs="+", metavar="record.json", help="flight records, or folders of them"
        )


def main(args: argparse.Namespace) -> int:
    """Run one action; 0, also where somebody is found to wait."""
    from ..observe.reading import load

    records = load(args.records)
    if args.action == "explain":
        from ..observe.explain import explain

        found = explain(records)
        if args.json:
            print(json.dumps({"culprits": list(found.culprits), "text": found.text}))
        else:
            print(found.text)
        return 0
    from ..observe.merge import merge

    text = json.dumps(merge(records))
    if args.output is None:
        print(text)
        return 0
    write(args.output, text)
    print(f"{len(records)} ranks in {args.output}; open it at https://ui.perfetto.dev", file=sys.stderr)
    return 0
