"""Options for the conformance suite; found by pytest through the ``pytest11`` entry point."""

from __future__ import annotations

from typing import Any

__all__ = ["pytest_addoption"]


def pytest_addoption(parser: Any) -> None:
    """Add ``--ruda-url`` and ``--ruda-ranks``."""
    group = parser.getgroup("ruda-async")
    group.addoption("--ruda-url", default=None, help="the transport to run the conformance suite over")
    group.addoption(
        "--ruda-ranks",
        default="loop",
        choices=("loop", "threads", "processes"),
        help="whether ranks are tasks of one loop, threads or processes (default: %(default)s)",
    )
