"""Gather and scatter: equal shards from all ranks to the root, and from the root to all.

Most ranks of these could finish without hearing from the others, so that bad input on one rank would
fail the call there alone. All algorithms here therefore end only when every rank has entered: a direct
gather by the root's answer, the rest by the messages of a dissemination barrier.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, TypeVar

from .barrier import dissemination
from .messages import (
    EMPTY,
    WINDOW,
    Buffers,
    copy_all,
    cut,
    message_limit,
    peers,
    same_memory,
    scratch,
    split,
    stream,
    swap,
)

if TYPE_CHECKING:
    from .operation import Link

__all__ = ["binomial_gather", "binomial_scatter", "direct_gather", "direct_scatter"]

T = TypeVar("T")


async def direct_gather(link: Link, root: int, mine: memoryview, out: memoryview) -> None:
    """Every rank sends its shard straight to the root, which answers when it has all.

    The answer, an empty message, is how a rank learns that the others came too.

    Args:
        link: the group.
        root: the rank that gets all shards.
        mine: this rank's shard.
        out: on the root ``size * len(mine)`` bytes; not used elsewhere.
    """
    rank, size = link.rank, link.size
    limit = message_limit(link)
    nbytes = len(mine)
    if rank != root:
        answer = link.recv_into(root, EMPTY)
        await stream(link, ((root, None, root, piece) for piece in cut((mine,), limit)))
        await answer
        return
    shards = split(out, [nbytes] * size)
    others = peers(rank, size)
    if size <= WINDOW + 1 and nbytes <= limit:
        receives = [link.recv_into(peer, shards[peer]) for peer in others]
        if not same_memory(mine, shards[rank]):
            await copy_all(link, shards[rank], mine)
        for receive in receives:
            await receive
    else:
        if not same_memory(mine, shards[rank]):
            await copy_all(link, shards[rank], mine)
        await stream(
            link, ((peer, piece, peer, None) for peer in others for piece in cut((shards[peer],), limit))
        )
    answers = [link.send(peer, EMPTY) for peer in others]
    for sent in answers:
        await sent


async def direct_scatter(link: Link, root: int, source: memoryview, out: memoryview) -> None:
    """The root sends each rank its shard straight, beside a dissemination barrier.

    Args:
        link: the group.
        root: the rank that has all shards.
        source: on the root ``size * len(out)`` bytes; not used elsewhere.
        out: memory for this rank's shard.
    """
    rank, size = link.rank, link.size
    limit = message_limit(link)
    nbytes = len(out)
    if nbytes > limit or size > WINDOW + 1:
        await dissemination(link)
        if rank != root:
            await stream(link, ((root, piece, root, None) for piece in cut((out,), limit)))
            return
        shards = split(source, [nbytes] * size)
        await stream(
            link,
            ((p, None, p, piece) for p in peers(rank, size) for piece in cut((shards[p],), limit)),
        )
        if not same_memory(out, shards[rank]):
            await copy_all(link, out, shards[rank])
        return
    posted: list[Awaitable[None]]
    if rank != root:
        posted = [link.recv_into(root, out)]
    else:
        shards = split(source, [nbytes] * size)
        posted = [link.send(peer, shards[peer]) for peer in peers(rank, size)]
    await dissemination(link)
    if rank == root and not same_memory(out, shards[rank]):
        await copy_all(link, out, shards[rank])
    for awaitable in posted:
        await awaitable


def _runs(view: memoryview, nbytes: int, root: int, first: int, last: int, size: int) -> Buffers:
    """Shards `first` to `last`, counted from the root, of all shards in rank order: one run or two."""
    start, end = root + first, root + last
    if start >= size:
        start, end = start - size, end - size
    if end <= size:
        return (view[start * nbytes : end * nbytes],)
    return (view[start * nbytes : size * nbytes], view[: (end - size) * nbytes])


async def binomial_gather(link: Link, root: int, mine: memoryview, out: memoryview) -> None:
    """Collect shards up a binomial tree: ceil(log2 size) rounds, log2(size) messages to the root.

    Ranks are counted from the root; in round *k* those that are odd multiples of ``2**k`` hand what they
    collected to the rank ``2**k`` before. These are among the pairs of a dissemination barrier, so every
    other rank sends an empty message in its place, and all ranks know at the end that all came.
    Arguments as for `direct_gather`.

    Source: Thakur, Rabenseifner & Gropp (2005), section 4; Hensgen, Finkel & Manber (1988) for the pattern.
    """
    rank, size = link.rank, link.size
    nbytes = len(mine)
    place = (rank - root) % size
    # A rank collects the shards from its own up to its lowest set bit's worth; the root collects all.
    span = min(place & -place, size - place) if place else size
    if place == 0:
        own = out[rank * nbytes : (rank + 1) * nbytes]
        if not same_memory(mine, own):
            await copy_all(link, own, mine)
    elif span == 1:
        out = mine
    else:
        out = scratch(span * nbytes, mine)
        await copy_all(link, out[:nbytes], mine)
    distance = 1
    while distance < size:
        to, source = (rank - distance) % size, (rank + distance) % size
        outgoing: Buffers = (EMPTY,)
        incoming: Buffers = (EMPTY,)
        if place & (2 * distance - 1) == distance:
            outgoing = (out,)
        elif place & (2 * distance - 1) == 0 and place + distance < size:
            end = min(place + 2 * distance, size)
            if place:
                incoming = (out[distance * nbytes : (end - place) * nbytes],)
            else:
                incoming = _runs(out, nbytes, root, distance, end, size)
        await swap(link, to, outgoing, source, incoming)
        distance *= 2


async def binomial_scatter(link: Link, root: int, source: memoryview, out: memoryview) -> None:
    """Hand shards down a binomial tree: `binomial_gather` backwards, with the distances falling.

    Arguments as for `direct_scatter`.
    """
    rank, size = link.rank, link.size
    nbytes = len(out)
    place = (rank - root) % size
    span = min(place & -place, size - place) if place else size
    rest = scratch((span - 1) * nbytes, out) if place else EMPTY  # shards to hand on, after this rank's own
    distance = 1 << (size - 1).bit_length() - 1 if size > 1 else 0
    while distance:
        to, sender = (rank + distance) % size, (rank - distance) % size
        outgoing: Buffers = (EMPTY,)
        incoming: Buffers = (EMPTY,)
        if place & (2 * distance - 1) == distance:
            incoming = (out, rest)
        elif place & (2 * distance - 1) == 0 and place + distance < size:
            end = min(place + 2 * distance, size)
            if place:
                outgoing = (rest[(distance - 1) * nbytes : (end - place - 1) * nbytes],)
            else:
                outgoing = _runs(source, nbytes, root, distance, end, size)
        await swap(link, to, outgoing, sender, incoming)
        distance //= 2
    if rank == root:
        own = source[rank * nbytes : (rank + 1) * nbytes]
        if not same_memory(out, own):
            await copy_all(link, out, own)
