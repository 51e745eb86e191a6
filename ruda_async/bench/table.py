"""Results on the terminal: by rich where it is installed and somebody looks, else aligned text."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

from .results import Report, Row
from .shown import LEGEND, Section, cells, columns, sections

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["aligned", "print_report", "remarks"]


def print_report(report: Report, file: TextIO | None = None) -> None:
    """Write all results to `file`, by default standard output."""
    file = file or sys.stdout
    if file.isatty() and _print_rich(report, file):
        return
    print(report.machine.line, file=file)
    for section in sections(report):
        rows = [cells(row, section.peers) for row in section.rows]
        print(f"\n{section.title}", file=file)
        print(aligned(columns(section.peers), rows), file=file)
    for line in ("", LEGEND, *remarks(report)):
        print(line, file=file)


def aligned(head: list[str], rows: list[list[str]]) -> str:
    """A table in columns: names to the left, figures to the right."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
    lines = []
    for line in (head, *rows):
        parts = (
            cell.ljust(width) if i == 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append(("  " + "  ".join(parts)).rstrip())
    return "\n".join(lines)


def remarks(report: Report) -> list[str]:
    """What was wrong, emulated or left out, a line each."""
    lines = [
        f"WRONG RESULT: {row.operation}, {row.nbytes} bytes, {row.world} ranks, {row.subject}: {row.fault}"
        for row in report.faults
    ]
    notes = dict.fromkeys(f"{row.subject}: {row.note}" for row in report.rows if row.note)
    return [*lines, *notes, *report.notes]


def _print_rich(report: Report, file: TextIO) -> bool:
    """False where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return False
    console = Console(file=file, highlight=False)
    console.print(report.machine.line, markup=False)
    for section in sections(report):
        console.print()
        console.print(_rich_table(section, console))
    console.print()
    console.print(LEGEND, style="dim", markup=False)
    for line in remarks(report):
        console.print(line, style="bold red" if line.startswith("WRONG") else "yellow", markup=False)
    return True


#: Columns that may go where the terminal is narrow, the first one first.
_SPARE = ("min", "alg bw", "p90", "stall")


def _rich_table(section: Section, console: Console) -> Table:
    """As many columns as the terminal has room for."""
    unbounded = console.options.update(width=10_000)
    names = columns(section.peers)
    for spare in ("", *_SPARE):
        names = [name for name in names if name != spare]
        table = _rich_columns(section, names)
        if console.measure(table, options=unbounded).maximum <= console.width:
            break
    return table


def _rich_columns(section: Section, names: list[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=section.title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1)
    )
    for name in names:
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    former = None
    for row in section.rows:
        if former not in (None, row.nbytes):
            table.add_section()
        former = row.nbytes
        texts = dict(zip(columns(section.peers), map(Text, cells(row, section.peers)), strict=True))
        texts["what"].stylize(_style(row))
        for peer, ratio in row.ratios.items():
            texts[peer].stylize("green" if ratio >= 1 else "red")
        table.add_row(*(texts[name] for name in names))
    return table


def _style(row: Row) -> str:
    if row.fault:
        return "bold red"
    return "bold" if row.name == "ruda" else "dim"
