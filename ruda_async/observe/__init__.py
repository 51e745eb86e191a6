"""Seeing inside a running job: statistics, flight records, metrics and spans.

`recorder` counts and remembers what this rank did, always and at nearly no cost. `flight` writes that down
when something goes wrong, `signals` when somebody asks. `explain` and `merge` read what all ranks wrote.
`prometheus` and `opentelemetry` hand it to those systems, where they are installed.
"""

from __future__ import annotations

from .flight import dump
from .recorder import OperationStats, Stats
from .signals import dump_on_signal

__all__ = ["OperationStats", "Stats", "dump", "dump_on_signal"]
