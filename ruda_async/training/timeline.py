"""How much of the communication was hidden behind computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BucketTimes", "SyncStats", "covered"]


@dataclass
class BucketTimes:
    """One bucket's all-reduce in the last pass; times are `time.perf_counter` seconds.

    Attributes:
        bucket: its number; bucket 0 has the last parameters, which backward reaches first.
        nbytes: bytes sent from this rank's gradients, before any algorithm multiplies them.
        started: when its last gradient was there and the call was started.
        ended: when the reduced gradients were there.
        early: whether it was started by its gradients, rather than by the end of the pass.
    """

    bucket: int
    nbytes: int
    started: float = 0.0
    ended: float = 0.0
    early: bool = False


@dataclass
class SyncStats:
    """Sums over the passes of one `GradientSync`, seconds and bytes of this rank.

    Attributes:
        passes: how many backward passes were synchronised.
        nbytes: bytes of gradients given to all-reduces.
        in_flight: seconds in which at least one all-reduce was under way.
        waiting: seconds in which the pass had nothing left to do but wait for them.
    """

    passes: int = 0
    nbytes: int = 0
    in_flight: float = 0.0
    waiting: float = 0.0

    @property
    def overlapped(self) -> float:
        """Seconds of communication that ran while backward computed."""
        return max(0.0, self.in_flight - self.waiting)


def covered(times: Sequence[BucketTimes]) -> float:
    """Seconds in which at least one of the calls was under way."""
    total = 0.0
    end = float("-inf")
    for each in sorted(times, key=lambda t: t.started):
        total += max(0.0, each.ended - max(end, each.started))
        end = max(end, each.ended)
    return total
