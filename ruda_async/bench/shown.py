"""How results read, wherever they are shown: units, columns and sections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .plan import PEERS, format_size
from .results import Report, Row

__all__ = ["LEGEND", "Section", "bandwidth", "cells", "columns", "seconds", "sections", "times"]

#: What the columns mean, for people.
LEGEND = (
    "Times are per call, the mean over ranks; with xN in flight, of N concurrent calls divided by N. "
    "Algorithm bandwidth is the message size over the median time; bus bandwidth is that times nccl-tests' "
    "factor, for comparison with the hardware. Stall is the 99th percentile of how late a 1 ms ticker on "
    "the same event loop was. Columns named after a peer say how many times as fast as it this library is, "
    "as the median over rounds of blocks that alternated in one run: above 1 it is faster."
)


@dataclass(frozen=True, slots=True)
class Section:
    """Rows that belong side by side: one operation, dtype, number of ranks and kind of ranks."""

    operation: str
    dtype: str
    world: int
    placement: str
    rows: tuple[Row, ...]

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.operation}, {self.world} ranks as {self.placement}, {self.dtype}"

    @property
    def peers(self) -> list[str]:
        """Peers to whom ratios are known, in the usual order."""
        known = {peer for row in self.rows for peer in row.ratios}
        return [peer for peer in PEERS if peer in known]


def sections(report: Report) -> list[Section]:
    """The report's rows, in the order in which their sections first appear, by operation."""
    found: dict[tuple[str, str, int, str], list[Row]] = {}
    for row in report.rows:
        found.setdefault((row.operation, row.dtype, row.world, row.placement), []).append(row)
    order = {row.operation: i for i, row in reversed(list(enumerate(report.rows)))}
    return [
        Section(*key, tuple(sorted(rows, key=lambda row: row.nbytes)))
        for key, rows in sorted(found.items(), key=lambda item: order[item[0][0]])
    ]


def seconds(value: float | None) -> str:
    """``0.00025`` → ``"250 µs"``: three digits."""
    if value is None:
        return ""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= unit:
            return f"{value / unit:.3g} {name}" if value / unit < 999.5 else f"{value / unit:.0f} {name}"
    return f"{value * 1e6:.2f} µs"


def bandwidth(value: float) -> str:
    """Bytes per second: ``"1.25 GB/s"``; empty for none."""
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if value >= 0.9995 * unit:
            return f"{value / unit:.3g} {name}" if value < 999.5 * unit else f"{value / unit:.0f} {name}"
    return f"{value:.3g} B/s" if value else ""


def times(value: float | None) -> str:
    """A ratio: ``"2.5x"``."""
    if value is None:
        return ""
    return f"{value:.1f}x" if value >= 10 else f"{value:.2f}x"


def columns(peers: Iterable[str]) -> list[str]:
    """Headings for `cells`."""
    return ["size", "what", "median", "p90", "p99", "min", "alg bw", "bus bw", "stall", *peers]


def cells(row: Row, peers: Iterable[str]) -> list[str]:
    """One row as text."""
    return [
        format_size(row.nbytes) if row.nbytes else "-",
        row.subject + (" WRONG" if row.fault else ""),
        seconds(row.median),
        seconds(row.p90),
        seconds(row.p99),
        seconds(row.min),
        bandwidth(row.algorithm_bandwidth),
        bandwidth(row.bus_bandwidth),
        seconds(row.stall),
        *(times(row.ratios.get(peer)) for peer in peers),
    ]
