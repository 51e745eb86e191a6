"""Measuring things beside each other: in turns, so that the machine's drift hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

__all__ = ["alternate", "print_table"]


def alternate(
    cases: Mapping[str, Callable[[], object]], meet: Callable[[], object], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Seconds per call of each case, a number for each round.

    Args:
        cases: what to call; every rank the same, in the same order.
        meet: a barrier, before each block.
        rounds: how often every case has its turn, after one turn that does not count.
        calls: how many calls a turn has.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, call in cases.items():
            meet()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            if number:
                seconds[name].append((time.perf_counter() - start) / calls)
    return seconds


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """How many times longer theirs takes: the median over rounds of that round's ratio."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table, by rich where that is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        print(f"\n{title}")
        for row in [columns, *rows]:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
        return
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=100).print(table)
