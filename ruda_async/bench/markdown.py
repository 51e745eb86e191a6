"""The results as a page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence

from .plan import format_size
from .results import Report, Row
from .shown import LEGEND, Section, cells, columns, seconds, sections, times
from .table import remarks

__all__ = ["to_markdown"]

_HEAD = """\
# Performance

<!-- written by `ruda-async bench --markdown`; do not edit -->

Measured on: {machine}. {date}. {versions}.

{legend}

To measure on your own machine:

```console
$ ruda-async bench --peers gloo,mpi,raw,numpy --html report.html
```
"""


def to_markdown(report: Report) -> str:
    """The whole page."""
    machine = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    head = _HEAD.format(machine=machine.line, date=machine.date, versions=versions, legend=LEGEND)
    parts = [head, *_remarks(report)]
    for section in sections(report):
        rows = [cells(row, section.peers) for row in section.rows]
        parts += [f"## {section.title}\n", _table(columns(section.peers), rows)]
    return "\n".join([*parts, *_growth(report)])


def _remarks(report: Report) -> list[str]:
    lines = remarks(report)
    return ["\n".join(f"* {line}" for line in lines) + "\n"] if lines else []


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---:" if i != 1 else "---" for i in range(len(head))], *rows]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"


# ---------------------------------------------------------------------- growth

_GROWTH = """\
## Growth with the number of ranks

Medians, and in brackets how many times that is of the local work that the same number of ranks cannot
avoid (the `numpy` rows), where it was measured. The steeper a row than its algorithm's own formula in
[algorithms](algorithms.md), the more is lost on the way.
"""


def _growth(report: Report) -> list[str]:
    """A table of times against worlds, where at least three were measured."""
    found = sections(report)
    worlds = sorted({section.world for section in found})
    if len(worlds) < 3:
        return []
    by_key: dict[tuple[str, str, str, str, int], dict[int, Row]] = {}
    for section in found:
        for row in section.rows:
            if row.name == "ruda":
                key = (row.operation, row.dtype, row.placement, row.subject, _nominal(section, row))
                by_key.setdefault(key, {})[row.world] = row
    rows = [
        [operation, f"{subject}, {dtype}", format_size(nbytes) if nbytes else "-"]
        + [_grown(by_world.get(world)) for world in worlds]
        for (operation, dtype, _, subject, nbytes), by_world in by_key.items()
        if len(by_world) > 1
    ]
    head = ["operation", "what", "size", *(f"{world} ranks" for world in worlds)]
    return [_GROWTH, _table(head, rows)]


def _nominal(section: Section, row: Row) -> int:
    """The size in powers of two: sizes are rounded up to whole elements for each rank."""
    return 1 << (row.nbytes.bit_length() - 1) if row.nbytes else 0


def _grown(row: Row | None) -> str:
    if row is None:
        return ""
    ratio = row.ratios.get("numpy")
    return seconds(row.median) + (f" ({times(1 / ratio)})" if ratio else "")
