"""Which rank owns which experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..errors import TensorContractError

__all__ = ["ExpertLayout"]


class ExpertLayout:
    """Experts laid out over ranks in order, by an explicit prefix.

    Rank *r* owns the experts ``prefix[r] … prefix[r+1]-1``. A rank may own none. The same on all ranks.

    Attributes:
        prefix: ``world_size + 1`` numbers from 0 up to the number of experts, never falling.
        counts: experts of each rank.
        experts: the number of experts of all ranks, at least 1.
        world_size: the number of ranks.
    """

    __slots__ = ("counts", "experts", "prefix", "world_size")

    def __init__(self, prefix: Sequence[int]) -> None:
        """Raises `TensorContractError` where `prefix` is not one."""
        numbers = tuple(prefix)
        if (
            len(numbers) < 2
            or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers)
            or numbers[0] != 0
            or numbers[-1] < 1
            or any(a > b for a, b in pairwise(numbers))
        ):
            raise TensorContractError(
                "an expert prefix is world_size + 1 integers that start at 0, never fall, and end at the "
                f"number of experts, at least 1; not {list(numbers)!r}. For 5 experts on 2 ranks: [0, 3, 5]"
            )
        self.prefix = numbers
        self.counts = tuple(b - a for a, b in pairwise(numbers))
        self.experts = numbers[-1]
        self.world_size = len(numbers) - 1

    @classmethod
    def even(cls, experts: int, world_size: int) -> ExpertLayout:
        """As equal as can be: the first ``experts % world_size`` ranks own one more."""
        if experts < 1 or world_size < 1:
            raise TensorContractError(f"{experts} experts on {world_size} ranks; both must be at least 1")
        share, more = divmod(experts, world_size)
        return cls.of_counts([share + (rank < more) for rank in range(world_size)])

    @classmethod
    def of_counts(cls, counts: Sequence[int]) -> ExpertLayout:
        """From the number of experts of each rank."""
        return cls([0, *accumulate(counts)])

    def local(self, rank: int) -> range:
        """The experts that `rank` owns."""
        return range(self.prefix[rank], self.prefix[rank + 1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertLayout) and other.prefix == self.prefix

    def __hash__(self) -> int:
        return hash(self.prefix)

    def __repr__(self) -> str:
        return f"ExpertLayout({list(self.prefix)})"
