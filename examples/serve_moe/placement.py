"""Which rank holds which experts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ruda_async import AsyncCommunicator
from ruda_async.moe import ExpertLayout

if TYPE_CHECKING:
    from .shard import Saved

__all__ = ["FrontLostError", "OtherModelError", "Placement", "agree"]

log = logging.getLogger("serve_moe")


class FrontLostError(Exception):
    """The rank that speaks HTTP is not among those that are left."""


class OtherModelError(Exception):
    """This rank was started with another model than the front."""


@dataclass(frozen=True)
class Placement:
    """The experts that each rank holds, in ascending order; some may be held by nobody.

    Attributes:
        experts: how many the model has.
        held: of each rank.
    """

    experts: int
    held: tuple[range, ...]

    @classmethod
    def even(cls, experts: int, ranks: int) -> Placement:
        """All experts, spread over the workers; on the front where it is alone."""
        if ranks == 1:
            return cls(experts, (range(experts),))
        workers = ExpertLayout.even(experts, ranks - 1)
        return cls(experts, (range(0), *(workers.local(rank) for rank in range(ranks - 1))))

    @property
    def absent(self) -> frozenset[int]:
        """The experts that nobody holds."""
        return frozenset(range(self.experts)) - {number for held in self.held for number in held}

    @property
    def layout(self) -> ExpertLayout:
        """As `moe_layer` wants it: every expert has an owner. Absent ones count to the rank before them.

        No row may be sent to those; `Shard.apply` refuses it.
        """
        starts = [0, *(held.start if held else None for held in self.held[1:]), self.experts]
        prefix = [n if n is not None else -1 for n in starts]
        for i in range(len(prefix) - 2, -1, -1):  # ranks that hold none own nothing
            if prefix[i] < 0:
                prefix[i] = prefix[i + 1]
        return ExpertLayout(prefix)


async def agree(
    comm: AsyncCommunicator,
    saved: Saved,
    front: bool,
    held: Sequence[int],
    even: bool,
    timeout: float,
) -> Placement:
    """The placement for the ranks of `comm`; the same on all of them.

    Args:
        front: whether this rank is the front.
        held: what this rank holds now.
        even: the front's is followed: spread all experts anew, or leave them where they are. They are left
            also where some rank no longer finds the file with which it began: experts of another model
            would make answers wrong.

    Raises:
        FrontLostError: rank 0 is no front.
        OtherModelError: this rank serves another model than the front.
    """
    channel = comm.channel("placement")
    readable = await asyncio.to_thread(saved.unchanged)
    entry = {
        "front": front,
        "held": [min(held, default=0), max(held, default=-1) + 1],
        "even": even,
        "model": saved.digest,
        "readable": readable,
    }
    told = await channel.all_gather_object(entry, timeout=timeout)
    await channel.close()
    if not told[0]["front"]:
        raise FrontLostError("the front is lost")
    if saved.digest != told[0]["model"]:
        raise OtherModelError(f"{saved.path} is another model than the front's; give this rank the same file")
    others = [rank for rank, entry in enumerate(told) if entry["model"] != saved.digest]
    blind = [rank for rank, entry in enumerate(told) if not entry["readable"]]
    if others and front:
        log.error("rank %s came with another model than this one's, and leaves", ", ".join(map(str, others)))
    if told[0]["even"] and not others and not blind:
        return Placement.even(saved.experts, comm.world_size)
    left = Placement(saved.experts, tuple(range(*entry["held"]) for entry in told))
    if told[0]["even"] and blind and comm.rank in (0, *blind):
        log.error(
            "%s has changed or gone since rank %s started: experts stay where they are, and those that "
            "nobody holds, %s, are lost until the file is back and a rank comes; or start the server anew",
            saved.path,
            ", ".join(map(str, blind)),
            sorted(left.absent),
        )
    return left
