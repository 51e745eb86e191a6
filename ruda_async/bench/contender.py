"""What the worker needs of anything that it measures."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from .cases import Array, Case
from .plan import Subject

__all__ = ["Contender", "Data", "Unsupported", "time_calls"]


class Unsupported(Exception):
    """A contender cannot do this case; the text says why. The same on every rank."""


@dataclass(frozen=True)
class Data:
    """One case's memory on this rank, shared by all contenders so that caches and pages treat them alike.

    Attributes:
        reuse, empty: as in `plan.Plan`.
    """

    case: Case
    reuse: bool
    empty: bool

    @cached_property
    def value(self) -> Array:
        """The input, which no contender changes."""
        return self.case.value()

    @cached_property
    def result(self) -> Array:
        """Memory for results of contenders that write them where they are told."""
        return self.case.result()


class Contender(Protocol):
    """A subject on one rank."""

    @property
    def subject(self) -> Subject:
        """What this is."""
        ...

    @property
    def note(self) -> str:
        """A remark on the prepared case, such as what has to be emulated; mostly empty."""
        ...

    def prepare(self, data: Data) -> None:
        """Get ready for a case; all ranks call it.

        Raises:
            Unsupported
        """
        ...

    def check(self) -> str:
        """Run the case once; what is wrong with this rank's result, or an empty string."""
        ...

    def block(self, count: int) -> list[float]:
        """Run the case once, then `count` times: the seconds that each of these took.

        Empty on a rank whose part another rank's times have in them.
        """
        ...

    def stall(self, count: int) -> list[float] | None:
        """Run the case `count` times: seconds of lateness of a ticker on the same event loop, or None."""
        ...

    def close(self) -> None:
        """Release everything; all ranks call it."""
        ...


def time_calls(call: Callable[[], object], count: int) -> list[float]:
    """Run a blocking `call` once, then `count` times: the seconds that each of these took."""
    call()
    clock = time.perf_counter
    times = []
    for _ in range(count):
        start = clock()
        result = call()
        times.append(clock() - start)
        del result  # outside of the measured time
    return times
