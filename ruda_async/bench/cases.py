"""One operation at one size on one rank: its input, what has to come out, and whether it did.

A result is described as *segments*, in order: so many elements from a place in one rank's input, or
the sum of that place over several ranks. From them follow the check of a result, the memory that it
takes, and the local work that no implementation can avoid.

Inputs are small integers in the tensor's dtype, so that every order of summation gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import TransportUnavailableError
from ..installing import how_to_install

__all__ = ["Case", "Segment", "bus_factor", "numpy_dtype", "pattern"]

Array = npt.NDArray[Any]

#: Elements that are computed and compared at once, to keep the check's own memory small.
_CHUNK = 1 << 20
#: Inputs are below this: with 32 ranks their sums are still whole numbers in bfloat16.
_VALUES = 7
_BREAK = 1021  # a prime: the pattern does not repeat at any power of two


class Segment(NamedTuple):
    """`length` elements from `start` on, of the input of the one rank in `ranks`, or summed over all."""

    ranks: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True)
class Case:
    """What rank `rank` of `world` gives and gets.

    Attributes:
        operation: of `plan.OPERATIONS`.
        asked: the size that was asked for, in bytes.
        dtype: a numpy dtype's name; bfloat16 is ml_dtypes'.
        row: elements in a row of all_to_all_v.
    """

    operation: str
    asked: int
    world: int
    rank: int
    dtype: str
    row: int = field(default=4096)

    @cached_property
    def itemsize(self) -> int:
        """Bytes in an element."""
        return numpy_dtype(self.dtype).itemsize

    @cached_property
    def row_length(self) -> int:
        """Elements in a row: the plan's, or fewer so that there is a row for every rank."""
        if self.operation != "all_to_all_v":
            return 1
        return max(1, min(self.row, self.asked // (self.itemsize * self.world)))

    @cached_property
    def _elements(self) -> int:
        """Elements of the size that is asked for, rounded up to whole ones (or rows) for each rank."""
        if self.operation == "barrier":
            return 0
        unit = self.row_length
        if self.operation in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v"):
            unit *= self.world
        return max(1, -(-self.asked // (unit * self.itemsize))) * unit

    @property
    def nbytes(self) -> int:
        """The size as it is counted: see `plan.Plan.sizes`."""
        return self._elements * self.itemsize

    @cached_property
    def input_length(self) -> int:
        """Elements of this rank's input."""
        return self._elements // self.world if self.operation == "all_gather" else self._elements

    @cached_property
    def output_length(self) -> int:
        """Elements of this rank's result."""
        return sum(segment.length for segment in self.segments)

    @cached_property
    def counts(self) -> list[list[int]]:
        """Rows that each rank (first index) sends to each: uneven, as experts' loads are."""
        rows = self._elements // self.row_length
        table = []
        for source in range(self.world):
            weights = [1 + (3 * source + 2 * dest) % self.world for dest in range(self.world)]
            ends = [rows * done // sum(weights) for done in accumulate(weights)]
            table.append([end - start for start, end in zip([0, *ends], ends, strict=False)])
        return table

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of this rank's input; only all_to_all_v has rows."""
        if self.operation == "all_to_all_v":
            return (self.input_length // self.row_length, self.row_length)
        return (self.input_length,)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """What the result consists of."""
        everyone = tuple(range(self.world))
        whole = self._elements
        part = whole // self.world
        match self.operation:
            case "all_reduce":
                return (Segment(everyone, 0, whole),)
            case "reduce_scatter":
                return (Segment(everyone, self.rank * part, part),)
            case "all_gather":
                return tuple(Segment((source,), 0, part) for source in everyone)
            case "broadcast":
                return (Segment((0,), 0, whole),)
            case "all_to_all":
                return tuple(Segment((source,), self.rank * part, part) for source in everyone)
            case "all_to_all_v":
                return tuple(
                    Segment(
                        (source,),
                        sum(sent[: self.rank]) * self.row_length,
                        sent[self.rank] * self.row_length,
                    )
                    for source, sent in enumerate(self.counts)
                )
            case "send":
                return (Segment(((self.rank - 1) % self.world,), 0, whole),)
        return ()

    def value(self) -> Array:
        """This rank's input: a fresh array of `shape` and `dtype`."""
        value = np.empty(self.input_length, numpy_dtype(self.dtype))
        for start in range(0, len(value), _CHUNK):
            part = value[start : start + _CHUNK]
            part[...] = pattern(self.rank, start, len(part))
        return value.reshape(self.shape)

    def result(self) -> Array:
        """Memory for a result, of the shape and dtype that the operation returns."""
        trailing = self.shape[1:]
        length = self.output_length // self.row_length
        return np.zeros((length, *trailing), numpy_dtype(self.dtype))

    def fault(self, result: Array | None) -> str:
        """What is wrong with `result`, in one line; empty when nothing is.

        Compares every element, of an array of any shape.
        """
        if result is None:
            return "" if not self.segments else "there is no result"
        flat = np.asarray(result).reshape(-1)
        if flat.dtype != numpy_dtype(self.dtype):
            return f"the result's dtype is {flat.dtype}, not {self.dtype}"
        if len(flat) != self.output_length:
            return f"the result has {len(flat)} elements, not {self.output_length}"
        at = 0
        for ranks, begin, length in self.segments:
            for start in range(0, length, _CHUNK):
                number = min(_CHUNK, length - start)
                expected = self.expected(ranks, begin + start, number)
                found = flat[at : at + number]
                if not np.array_equal(found, expected):
                    index = int(np.argmax(found != expected))
                    return f"element {at + index} of the result is {found[index]}, not {expected[index]}"
                at += number
        return ""

    def expected(self, ranks: tuple[int, ...], start: int, length: int) -> Array:
        """The sum of that part of the inputs of `ranks`, in the case's dtype."""
        total: Array = sum((pattern(rank, start, length) for rank in ranks), np.zeros(length, np.int64))
        return total.astype(numpy_dtype(self.dtype))


def pattern(rank: int, start: int, length: int) -> Array:
    """Elements ``start … start+length-1`` of a rank's input, as int64: different at every rank and place."""
    index = np.arange(start, start + length, dtype=np.int64)
    return (index + index // _BREAK + 5 * rank) % _VALUES


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of this name.

    Raises:
        TransportUnavailableError: it is bfloat16 and ml_dtypes is not installed.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise TransportUnavailableError(
            f"bfloat16 arrays need ml_dtypes; {how_to_install('bfloat16')}"
        ) from None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def bus_factor(operation: str, world: int) -> float:
    """Bus bandwidth over algorithm bandwidth.

    The factors of nccl-tests, ``doc/PERFORMANCE.md``: they correct for the bytes that an ideal algorithm
    moves over each rank's link, so that figures of different operations and worlds compare with the
    hardware's peak.
    """
    if operation == "all_reduce":
        return 2 * (world - 1) / world
    if operation in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v"):
        return (world - 1) / world
    return 1.0
