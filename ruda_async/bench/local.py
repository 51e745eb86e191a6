"""The local work that an operation has to do, in plain numpy: what no transport can save.

For sums it is the additions of one rank's share and the copy of the other shares, as in Rabenseifner's
reduce-scatter and all-gather; for all else one copy of the result. Other ranks' data are at hand before
the time starts, as if memory were shared and free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from .cases import Array, Case, Segment, numpy_dtype
from .contender import Data, Unsupported, time_calls
from .plan import Subject

__all__ = ["LocalWork"]

#: Elements that are summed at once: partial sums stay in a core's cache.
_CHUNK = 1 << 15


class LocalWork:
    """The contender ``numpy``.

    Args:
        alone: this rank works for all ranks, one after the other, because they share one thread; the
            others do nothing. Otherwise every rank does its own share.
    """

    note = ""

    def __init__(self, subject: Subject, rank: int, alone: bool) -> None:
        self.subject = subject
        self._rank = rank
        self._alone = alone

    def prepare(self, data: Data) -> None:
        """As `Contender.prepare`."""
        case = data.case
        if case.operation == "barrier":
            raise Unsupported("a barrier has no local work")
        self._shares: list[tuple[Case, Callable[[], Array]]] = []
        if not self._alone:
            self._shares.append((case, _share(case, data.result if data.reuse else None)))
        elif self._rank == 0:
            for rank in range(case.world):
                other = Case(case.operation, case.asked, case.world, rank, case.dtype, case.row)
                self._shares.append((other, _share(other, other.result() if data.reuse else None)))

    def check(self) -> str:
        """As `Contender.check`."""
        return next(filter(None, (case.fault(work()) for case, work in self._shares)), "")

    def block(self, count: int) -> list[float]:
        """As `Contender.block`."""
        return time_calls(self._work, count) if self._shares else []

    def _work(self) -> list[Array]:
        return [work() for _, work in self._shares]

    def stall(self, count: int) -> list[float] | None:
        """None."""
        return None

    def close(self) -> None:
        """Nothing."""


def _share(case: Case, out: Array | None) -> Callable[[], Array]:
    """One rank's work; the result is written to `out`, or is fresh at each call."""
    pieces = []
    at = 0
    for index, segment in enumerate(_divided(case)):
        ranks, start, length = segment
        if case.operation == "all_reduce" and index != case.rank:
            sources = [case.expected(ranks, start, length)]  # another rank's share: its sum is only copied
        else:
            sources = [case.expected((rank,), start, length) for rank in ranks]
        pieces.append((at, at + length, sources))
        at += length
    shape, dtype = case.result().shape, numpy_dtype(case.dtype)
    wide = case.dtype in ("float16", "bfloat16")

    def work() -> Array:
        result = np.empty(shape, dtype) if out is None else out
        flat = result.reshape(-1)
        for start, stop, sources in pieces:
            _sum(flat[start:stop], sources, wide)
        return result

    return work


def _divided(case: Case) -> Sequence[Segment]:
    """The result's segments; an all-reduce's cut into the ranks' shares."""
    if case.operation != "all_reduce":
        return case.segments
    (whole,) = case.segments
    ends = [whole.length * rank // case.world for rank in range(case.world + 1)]
    return [Segment(whole.ranks, start, end - start) for start, end in pairwise(ends)]


def _sum(target: Array, sources: Sequence[Array], wide: bool) -> None:
    """Add `sources` up in order; `wide` accumulates in float32 and rounds once, as the library does."""
    if len(sources) == 1:
        np.copyto(target, sources[0])
        return
    for start in range(0, len(target), _CHUNK):
        part = slice(start, start + _CHUNK)
        total = target[part] if not wide else sources[0][part].astype(np.float32)
        if wide:
            for source in sources[1:]:
                total += source[part]
            target[part] = total
        else:
            np.add(sources[0][part], sources[1][part], out=total)
            for source in sources[2:]:
                np.add(total, source[part], out=total)
