"""The command line, the same for every rank."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["Options", "parse"]


@dataclass(frozen=True, slots=True)
class Options:
    """What may be chosen. Times are in seconds where their name does not say otherwise; sizes are rows."""

    model: Path = Path("digits.npz")
    host: str = "127.0.0.1"
    port: int = 8000
    max_batch: int = 64
    linger_ms: float = 1.0
    in_flight: int = 4
    max_queue: int = 1024
    max_request: int = 256
    request_timeout: float = 10.0
    batch_timeout: float = 5.0
    retries: int = 1
    on_loss: str = "replicate"
    join: bool = False
    rejoin_timeout: float = 30.0
    drain_timeout: float = 10.0
    exchange: str = "ruda"


_HELP = {
    "model": "the file that train_digits_moe.py --save wrote",
    "host": "where the front listens",
    "port": "0 for a free one, which is printed",
    "max_batch": "rows of a batch at most",
    "linger_ms": "how long a batch that is not full waits for more rows",
    "in_flight": "batches under way at once",
    "max_queue": "rows that may wait; beyond it requests are answered 429",
    "max_request": "rows of one request at most",
    "request_timeout": "a request that takes longer is answered 504",
    "batch_timeout": "deadline of one batch's exchanges",
    "retries": "how often a batch that failed through no fault of its own is tried again",
    "rejoin_timeout": "how long a rank that was dropped knocks to come back; 0 ends it at once",
    "drain_timeout": "how long SIGTERM waits for requests that were accepted",
}


def parse(argv: list[str] | None = None) -> Options:
    """Read the command line; ends the program where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="serve_moe", description="Serve a mixture of experts that is sharded over ranks."
    )
    defaults: dict[str, Any] = {f.name: f.default for f in fields(Options)}
    for name, text in _HELP.items():
        default = defaults[name]
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=Path if name == "model" else type(default),
            default=default,
            help=f"{text} ({default})",
        )
    parser.add_argument(
        "--on-loss",
        choices=["replicate", "refuse"],
        default="replicate",
        help="when a rank is lost: the others load its experts from the file, or requests that need them "
        "are answered 503",
    )
    parser.add_argument("--join", action="store_true", help="be a worker that joins a running server")
    parser.add_argument(
        "--exchange",
        choices=["ruda", "gloo", "none"],
        default="ruda",
        help="for comparison: torch.distributed in threads, or one rank without any exchange",
    )
    return _checked(parser, Options(**vars(parser.parse_args(argv))))


def _checked(parser: argparse.ArgumentParser, options: Options) -> Options:
    for name in ("max_batch", "in_flight", "max_queue", "max_request", "request_timeout", "batch_timeout"):
        value = getattr(options, name)
        if not value > 0:
            parser.error(f"--{name.replace('_', '-')} has to be above 0, not {value}")
    for name in ("linger_ms", "retries", "rejoin_timeout", "drain_timeout", "port"):
        value = getattr(options, name)
        if not value >= 0:
            parser.error(f"--{name.replace('_', '-')} has to be 0 or more, not {value}")
    if options.max_request > options.max_queue:
        parser.error(
            f"--max-request {options.max_request} is more than --max-queue {options.max_queue} can ever hold"
        )
    return options
