"""``ruda-async doctor``: what is installed, which transports work here, and a test of each."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from typing import Any

from ..errors import RudaError, TransportUnavailableError
from ..transport.parameters import ParameterRow, describe_parameters
from ..transport.registry import PluginInfo, plugins
from .probe import LIMIT, MARK, probe

__all__ = ["add_arguments", "examine", "main"]

#: Distributions that matter here, and the names that they go by.
_PACKAGES = (
    ("numpy", ("numpy",)),
    ("msgpack", ("msgpack",)),
    ("torch", ("torch",)),
    ("uvloop", ("uvloop",)),
    ("ml_dtypes", ("ml_dtypes",)),
    ("ucxx", ("ucxx", "ucxx-cu12", "ucxx-cu13")),
    ("mpi4py", ("mpi4py",)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--parameters", action="store_true", help="list the URL parameters of every transport too"
    )
    parser.add_argument("--no-test", action="store_true", help="do not connect two ranks over each transport")


def main(args: argparse.Namespace) -> int:
    """Print the report; 1 when a transport that claims to be usable fails its test."""
    report = examine(test=not args.no_test)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report, args.parameters)
    return int(any(transport["status"] == "failed" for transport in report["transports"]))


def examine(*, test: bool = True) -> dict[str, Any]:
    """The whole report, as plain data.

    Returns:
        ``versions``: name → version or None; ``transports``: a list with ``scheme``, ``summary``, ``origin``,
        ``status`` (``"works"``, ``"usable"``, ``"unavailable"``, ``"failed"`` or ``"wrapper"``), ``detail``,
        ``latency`` in seconds per 8-byte all-reduce between two ranks, or None, and ``parameters``.
    """
    return {
        "versions": _versions(),
        "transports": [_examine(info, test) for info in plugins().values()],
    }


def _versions() -> dict[str, str | None]:
    """Without importing anything."""
    from .. import __version__

    found: dict[str, str | None] = {"ruda-async": __version__, "python": platform.python_version()}
    for name, distributions in _PACKAGES:
        found[name] = next(filter(None, map(_version, distributions)), None)
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine(info: PluginInfo, test: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "scheme": info.scheme,
        "summary": "",
        "origin": info.origin,
        "status": "unavailable",
        "detail": "",
        "latency": None,
        "parameters": [],
    }
    try:
        plugin: Any = info.load()
    except TransportUnavailableError as error:
        return {**found, "detail": str(error)}
    found["summary"] = plugin.summary
    if hasattr(plugin, "parameters"):
        found["parameters"] = [row._asdict() for row in describe_parameters(plugin.parameters)]
    try:
        reason = plugin.unavailable()
    except Exception as error:
        return {
            **found,
            "status": "failed",
            "detail": f"unavailable() raised {type(error).__name__}: {error}",
        }
    if reason is not None:
        return {**found, "detail": reason}
    if getattr(plugin, "wraps", False):
        return {**found, "status": "wrapper", "detail": f"goes around another transport: {info.scheme}+…://"}
    needs = getattr(plugin, "needs", "")
    if needs:  # no example works without what only its user has
        return {**found, "status": "usable", "detail": f"needs {needs}"}
    if not test:
        return {**found, "status": "usable"}
    try:
        tested = _engine_test(plugin) if plugin.rank_per == "engine" else _self_test(plugin)
        if tested is None:
            return {**found, "status": "usable", "detail": f"{plugin.summary}; not tested without them"}
        latency, links = tested
        detail = f"{plugin.summary}; between two ranks here: {', '.join(links)}" if links else ""
        return {**found, "status": "works", "latency": latency, "detail": detail}
    except RudaError as error:
        return {**found, "status": "failed", "detail": " ".join(str(error).split())}


def _self_test(plugin: Any) -> tuple[float, list[str]]:
    """Two ranks over the plugin's example: the seconds per 8-byte all-reduce, and what links were taken.

    The latter for a transport that chooses: the schemes under ``links`` of its `Transport.describe`.

    Raises:
        RudaError: they did not connect, or summed wrongly.
    """
    from ..launch.plan import fresh_url
    from ..launch.spawn import spawn

    threads = plugin.rank_per == "task"
    found: list[tuple[float, list[str]]] = spawn(probe, 2, fresh_url(plugin), timeout=LIMIT, threads=threads)
    return max(latency for latency, _ in found), found[0][1]


def _engine_test(plugin: Any) -> tuple[float, list[str]] | None:
    """`_self_test` on ranks that the plugin's engine starts; None where there is no such program.

    Raises:
        RudaError: as `_self_test`, or the ranks did not end in time.
    """
    from ..launch.plan import fresh_url

    command = plugin.command(2) if hasattr(plugin, "command") else None
    if command is None:
        return None
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RUDA_")}
    with subprocess.Popen(
        [*command, "-m", "ruda_async.cli.probe", fresh_url(plugin)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as ranks:
        try:
            said, _ = ranks.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            ranks.terminate()
            raise RudaError(f"the ranks that {command[0]} started took over {LIMIT:g} s") from None
    for line in said.splitlines():
        if line.startswith(MARK) and not ranks.returncode:
            latency, links = json.loads(line.removeprefix(MARK))
            return latency, links
    last = said.strip().splitlines()[-1:] or ["nothing"]
    raise RudaError(f"{command[0]} ended with code {ranks.returncode}, and said last: {last[0]}")


# ---------------------------------------------------------------------- printing

_WORDS = {
    "works": "works",
    "usable": "usable",
    "unavailable": "not here",
    "failed": "FAILED",
    "wrapper": "wrapper",
}
_STYLES = {
    "works": "green",
    "usable": "green",
    "unavailable": "yellow",
    "failed": "bold red",
    "wrapper": "cyan",
}


def _print(report: dict[str, Any], parameters: bool) -> None:
    versions = [[name, version or "not installed"] for name, version in report["versions"].items()]
    transports, styles = [], []
    for found in report["transports"]:
        latency = "" if found["latency"] is None else f"{found['latency'] * 1e6:.0f} µs"
        status = _WORDS[found["status"]]
        transports.append([f"{found['scheme']}://", status, latency, found["detail"] or found["summary"]])
        styles.append(_STYLES[found["status"]])
    _table("versions", ["package", "version"], versions)
    _table("transports", ["scheme", "status", "8-byte all-reduce", ""], transports, styles)
    if parameters:
        from ..config import CommonParameters

        _parameter_table("parameters of every URL", describe_parameters(CommonParameters))
        for found in report["transports"]:
            rows = [ParameterRow(**row) for row in found["parameters"]]
            if rows:
                _parameter_table(f"parameters of {found['scheme']}://", rows)


def _parameter_table(title: str, rows: list[ParameterRow]) -> None:
    _table(title, ["name", "type", "default", "unit", ""], [list(row) for row in rows])


def _table(title: str, head: list[str], rows: list[list[str]], styles: list[str] | None = None) -> None:
    """By rich where it is installed and somebody looks, else aligned text."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            pass
        else:
            table = Table(*head, title=title, title_justify="left")
            for row, style in zip(rows, styles or [""] * len(rows), strict=True):
                table.add_row(*(Text(cell, style if i == 1 else "") for i, cell in enumerate(row)))
            Console().print(table)
            return
    print(title)
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    for line in (head, *rows):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(("  " + "  ".join(cells)).rstrip())
    print()
