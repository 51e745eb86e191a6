"""``mpiexec -n 5 python -m ruda_async.transport.conformance URL [scenario …]``: the suite on placed ranks.

Every rank prints a line for each scenario that it takes part in, and ends with 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import sys
import traceback

from . import SCENARIOS, run_placed


def main() -> int:
    """Run the scenarios in turn; 1 if any failed on this rank."""
    parser = argparse.ArgumentParser(prog="python -m ruda_async.transport.conformance")
    parser.add_argument("url", help="the transport")
    parser.add_argument("scenario", nargs="*", help="those to run; all by default")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.scenario) - set(SCENARIOS))
    if unknown:
        parser.error(f"no scenario is called {unknown[0]}; there are {', '.join(sorted(SCENARIOS))}")
    failed = 0
    for name in arguments.scenario or sorted(SCENARIOS):
        try:
            if run_placed(name, arguments.url):
                print(f"{name}: passed", flush=True)
        except Exception:
            failed = 1
            print(f"{name}: FAILED\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
