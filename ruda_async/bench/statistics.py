"""From times to figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Summary", "ratio", "summarize"]

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds per call, over all calls of all rounds; `median` is p50, `p90` and `p99` percentiles."""

    median: float
    p90: float
    p99: float
    min: float
    mean: float
    calls: int


def summarize(times: npt.NDArray[Any]) -> Summary:
    """Figures of seconds of any shape; at least one."""
    median, p90, p99 = np.percentile(times, (50, 90, 99))
    return Summary(
        float(median), float(p90), float(p99), float(np.min(times)), float(np.mean(times)), int(times.size)
    )


def ratio(ours: Times, theirs: Times) -> float:
    """How many times as fast ours is: the median over rounds of the quotient of the rounds' medians.

    Both ``[rounds, calls]``. Blocks of one round were measured one after the other, so the machine's drift
    over the run cancels in each quotient.
    """
    return float(np.median(np.median(theirs, axis=1) / np.median(ours, axis=1)))
