"""The numbers of the cost model, as ranks tell them to each other."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ..collectives.costs import overhead_of
from ..errors import ProtocolError

if TYPE_CHECKING:
    from ..transport.base import Capabilities

__all__ = ["Numbers", "numbers_of", "with_numbers"]


class Numbers(NamedTuple):
    """What `Capabilities` says of costs.

    Attributes:
        latency: seconds for an empty message, one way.
        overhead: seconds for each further message that a rank has under way.
        bandwidth: bytes per second on the way.
        reduction: bytes per second that a rank adds to others.
    """

    latency: float
    overhead: float
    bandwidth: float
    reduction: float

    def check(self) -> Numbers:
        """Themselves, where they can be costs.

        Raises:
            ValueError: one is not finite, or not above zero; the text names it.
        """
        for name, value in self._asdict().items():
            if (
                type(value) is not float
                or not math.isfinite(value)
                or value < 0
                or not (value or name == "overhead")
            ):
                raise ValueError(f"{name}={value!r:.40} is no cost; it is a number above 0")
        return self

    def __str__(self) -> str:
        return (
            f"latency {seconds(self.latency)}, {seconds(self.overhead)} for each further message, "
            f"{self.bandwidth / 1e9:.3g} GB/s on the way, {self.reduction / 1e9:.3g} GB/s for additions"
        )


def numbers_of(capabilities: Capabilities) -> Numbers:
    """What a transport declares, with what it leaves open filled in."""
    overhead = overhead_of(capabilities)
    latency, bandwidth, reduction = capabilities.latency, capabilities.bandwidth, capabilities.reduction
    return Numbers(float(latency), float(overhead), float(bandwidth), float(reduction))


def with_numbers(capabilities: Capabilities, numbers: Numbers, segment_bytes: int) -> Capabilities:
    """`capabilities` with the numbers that all ranks agreed on.

    Args:
        segment_bytes: rank 0's, since all ranks cut their messages alike.

    Raises:
        ProtocolError: they came over the network and are no costs.
    """
    try:
        numbers.check()
        if not 1 <= segment_bytes < 1 << 62:
            raise ValueError(f"segment_bytes={segment_bytes} is no size")
    except ValueError as error:
        raise ProtocolError(f"rank 0 sent costs that are none: {error}", rank=0) from None
    return replace(capabilities, segment_bytes=segment_bytes, **numbers._asdict())


def seconds(value: float) -> str:
    """A duration for people."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"
