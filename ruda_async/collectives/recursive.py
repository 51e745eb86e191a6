"""Recursive halving and doubling, and the fold that lets any number of ranks take part.

Partners are at distance 1, 2, 4, …, so that what is combined are always neighbouring groups of ranks, the
lower one on the left: exactly the documented order of summation. Partial results travel unrounded.

The fold: of n ranks with p the largest power of two up to n, the first ``2 * (n-p)`` pair up; the odd one
gives its input to the even one, which takes part for both and hands the result back. Those who take
part are numbered ``0 … p-1`` in rank order; that number is called `place` here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .messages import cut, message_limit, scratch, stream, swap
from .reductions import combine_all, load_all, store_all

if TYPE_CHECKING:
    from ..tensors import Reducer
    from .operation import Link

__all__ = ["fold", "rabenseifner", "recursive_doubling", "recursive_halving"]


def fold(size: int) -> tuple[int, int]:
    """``(p, r)``: the largest power of two up to `size`, and the ``size - p`` ranks that are left over."""
    power: int = 1 << (size.bit_length() - 1)
    return power, size - power


async def _give(link: Link, peer: int, view: memoryview) -> None:
    limit = message_limit(link)
    await stream(link, ((peer, None, peer, message) for message in cut((view,), limit)))


async def _take(link: Link, peer: int, view: memoryview) -> None:
    limit = message_limit(link)
    await stream(link, ((peer, message, peer, None) for message in cut((view,), limit)))


class _Seat:
    """A rank's part in a recursion that folded `size` ranks to a power of two.

    Attributes:
        power: how many take part.
        place: this rank's number among them, or None for one that gave its input away.
        partner: for a rank of a folded pair the other one, else None.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.power, self._extra = fold(size)
        self.partner: int | None = None
        self.place: int | None = rank - self._extra
        if rank < 2 * self._extra:
            self.partner = rank ^ 1
            self.place = None if rank & 1 else rank // 2

    def rank_of(self, place: int) -> int:
        """The rank at `place`."""
        return 2 * place if place < self._extra else place + self._extra


async def _take_seat(
    link: Link, reducer: Reducer, source: memoryview, out: memoryview, seat: _Seat
) -> tuple[memoryview, memoryview]:
    """Fold the leftover ranks in; returns ``(mine, work)`` for one that takes part.

    `mine` holds this place's partial result to begin with and is only read (it may be the input);
    `work` is memory for the partial results to come. Where nothing widens, `work` is `out`.
    """
    if reducer.widens:
        wide = len(source) // reducer.itemsize * reducer.partial_itemsize
        mine = work = scratch(wide, source)
        await load_all(link, reducer, mine, source)
    else:
        mine, work = source, out
    if seat.partner is not None:
        raw = scratch(len(source), source)
        await _take(link, seat.partner, raw)
        theirs = raw
        if reducer.widens:
            theirs = scratch(len(work), source)
            await load_all(link, reducer, theirs, raw)
        await combine_all(link, reducer, work, mine, theirs)
        mine = work
    return mine, work


async def recursive_doubling(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """All-reduce in ``log2(n)`` rounds in which partners swap all they have (Thakur et al. 2005, 4.5).

    Least latency; each round carries the whole message. Ranks that are no power of two cost two more rounds.
    `out` may be `source`.
    """
    seat = _Seat(link.rank, link.size)
    if seat.place is None:
        await _stand_aside(link, seat, source, out)
        return
    mine, work = await _take_seat(link, reducer, source, out, seat)
    theirs = scratch(len(work), source)
    distance = 1
    while distance < seat.power:
        partner = seat.rank_of(seat.place ^ distance)
        await swap(link, partner, [mine], partner, [theirs])
        low, high = (theirs, mine) if seat.place & distance else (mine, theirs)
        await combine_all(link, reducer, work, low, high)
        mine = work
        distance *= 2
    await store_all(link, reducer, out, work)
    if seat.partner is not None:
        await _give(link, seat.partner, out)


async def rabenseifner(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """All-reduce by recursive halving, then recursive doubling backwards (Rabenseifner 2004).

    ``2 log2(n)`` rounds, and each byte leaves about twice: half of the message in the first round, a
    quarter in the second, and so on, then the same backwards with the results. `out` may be `source`.
    """
    seat = _Seat(link.rank, link.size)
    if seat.place is None:
        await _stand_aside(link, seat, source, out)
        return
    mine, work = await _take_seat(link, reducer, source, out, seat)
    wide, itemsize = reducer.partial_itemsize, reducer.itemsize
    low, high = 0, len(source) // itemsize
    theirs = scratch((high + 1) // 2 * wide, source)
    rounds: list[tuple[int, slice, slice]] = []
    distance = 1
    while distance < seat.power:
        partner = seat.rank_of(seat.place ^ distance)
        middle = (low + high) // 2
        upper = bool(seat.place & distance)
        keep, give = ((middle, high), (low, middle)) if upper else ((low, middle), (middle, high))
        low, high = keep
        arrived = theirs[: (high - low) * wide]
        kept = slice(low * wide, high * wide)
        await swap(link, partner, [mine[give[0] * wide : give[1] * wide]], partner, [arrived])
        left, right = (arrived, mine[kept]) if upper else (mine[kept], arrived)
        await combine_all(link, reducer, work[kept], left, right)
        mine = work
        ours = slice(low * itemsize, high * itemsize)
        others = slice(give[0] * itemsize, give[1] * itemsize)
        rounds.append((partner, ours, others))
        distance *= 2
    await store_all(link, reducer, out[low * itemsize : high * itemsize], work[low * wide : high * wide])
    for partner, ours, others in reversed(rounds):
        await swap(link, partner, [out[ours]], partner, [out[others]])
    if seat.partner is not None:
        await _give(link, seat.partner, out)


async def _stand_aside(link: Link, seat: _Seat, source: memoryview, out: memoryview) -> None:
    """Give the input to the other one of the pair, and take the result from it."""
    assert seat.partner is not None
    await _give(link, seat.partner, source)
    await _take(link, seat.partner, out)


async def recursive_halving(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """Reduce-scatter in ``log2(n)`` rounds on a power of two of ranks (Thakur et al. 2005, 4.3).

    In round k partners differ in bit k of their rank and each keeps the shards whose number has its own
    bit k; so neighbours combine first, as documented, and each ends with its own shard. The shards that are
    given away are sent from where they lie, as one message of many buffers.
    """
    wide = len(out) // reducer.itemsize * reducer.partial_itemsize
    partials = source
    if reducer.widens:
        partials = scratch(wide * link.size, source)
        await load_all(link, reducer, partials, source)
    held = _sliced(partials, wide)
    bit = 0
    while len(held) > 1:
        side = link.rank >> bit & 1
        keep, give = held[side::2], held[1 - side :: 2]
        arrived = _sliced(scratch(wide * len(keep), source), wide)
        partner = link.rank ^ (1 << bit)
        await swap(link, partner, give, partner, arrived)
        for number, (mine, theirs) in enumerate(zip(keep, arrived, strict=True)):
            if number:
                await link.turn()
            left, right = (theirs, mine) if side else (mine, theirs)
            await combine_all(link, reducer, theirs, left, right)
        held = arrived
        bit += 1
    if reducer.widens:
        await store_all(link, reducer, out, held[0])
    else:
        out[:] = held[0]
        await store_all(link, reducer, out, out)


def _sliced(view: memoryview, nbytes: int) -> list[memoryview]:
    """`view` in runs of `nbytes`."""
    return [view[at : at + nbytes] for at in range(0, len(view), nbytes)]
