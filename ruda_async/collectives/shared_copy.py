"""Moving data through memory that all ranks see: the shared all-gather, broadcast and all-to-alls.

A reader copies straight from the owner's tensor where that lies in shared memory, else from slots through
which the owner passes it block by block; see `feeds`. One message a pair says where everything lies.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from ..errors import ProtocolError
from .feeds import Feed, Offer, Tap, boarded, lent, trade
from .messages import Placing, copy_all, peers, scratch, split

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from .operation import Link

__all__ = ["shared_all_gather", "shared_broadcast", "shared_exchange", "shared_uneven"]

#: Bytes per block of a feed that goes through slots.
_BLOCK = 256 * 1024
#: Blocks are smaller where many feeds share this much memory.
_SLOT_BYTES = 8 * 1024 * 1024
_LEAST_BLOCK = 16 * 1024
#: Seconds of work between two turns of the event loop.
_WORK = 0.0004
#: Blocks of an uneven exchange up to this size ride in the message itself.
_INLINE = 32 * 1024

_HEADER = struct.Struct("<QQQQQ")


def _block(size: int) -> int:
    return min(_BLOCK, max(_SLOT_BYTES // (3 * size), _LEAST_BLOCK))


async def shared_all_gather(link: Link, out: memoryview, shard_nbytes: int, mine: memoryview | None) -> None:
    """Everyone copies every other rank's shard from its owner's memory.

    Args:
        out: ``size * shard_nbytes`` bytes.
        mine: this rank's shard where it is not in `out` yet.
    """
    rank = link.rank
    blocks = split(out, [shard_nbytes] * link.size)
    others = peers(rank, link.size)
    own = blocks[rank]
    local = None if mine is None else (own, mine)
    await _exchange(
        link, [(own if mine is None else mine, others)], {peer: blocks[peer] for peer in others}, local
    )


async def shared_broadcast(link: Link, root: int, out: memoryview, source: memoryview | None) -> None:
    """Everyone copies the tensor from the root's memory.

    Args:
        out: memory for the tensor.
        source: the tensor on the root, to be copied to `out`; None where it lies there already.
    """
    if link.rank != root:
        await _exchange(link, [], {root: out}, None)
        return
    data = out if source is None else source
    local = None if source is None else (out, source)
    await _exchange(link, [(data, peers(root, link.size))], {}, local)


async def shared_exchange(link: Link, source: memoryview, out: memoryview) -> None:
    """The equal all-to-all: everyone copies its block from every other rank's memory."""
    rank, size = link.rank, link.size
    length = len(source) // size
    outgoing, incoming = split(source, [length] * size), split(out, [length] * size)
    others = peers(rank, size)
    await _exchange(
        link,
        [(outgoing[peer], (peer,)) for peer in others],
        {peer: incoming[peer] for peer in others},
        (incoming[rank], outgoing[rank]),
    )


async def _exchange(
    link: Link,
    outgoing: Sequence[tuple[memoryview, Sequence[int]]],
    incoming: dict[int, memoryview],
    local: tuple[memoryview, memoryview] | None,
) -> None:
    """Offer some bytes to some ranks each, and fill memory from what others offer.

    Args:
        outgoing: bytes, and who reads them.
        incoming: for each rank that offers something, where it goes.
        local: ``(destination, source)`` to copy besides.
    """
    block = _block(link.size)
    with lent(link, [data for data, _ in outgoing]) as places:
        feeds = [
            Feed(link, data, readers, block, place)
            for (data, readers), place in zip(outgoing, places, strict=True)
        ]
        with boarded(link, feeds) as offers:
            expected = {peer: int(peer in incoming) for peer in peers(link.rank, link.size)}
            theirs = await trade(link, offers, expected)
            found = {peer: theirs[peer][0] for peer in incoming}
            await _flow(link, feeds, found, incoming, block, local)


async def _flow(
    link: Link,
    feeds: Sequence[Feed],
    offers: dict[int, Offer],
    incoming: dict[int, memoryview],
    block: int,
    local: tuple[memoryview, memoryview] | None,
) -> None:
    """Keep the feeds filled and copy from the peers', block by block, until all is read."""
    taps: list[tuple[Tap, memoryview]] = []
    try:
        for peer, offer in offers.items():
            taps.append((Tap(link, peer, offer, len(incoming[peer]), block), incoming[peer]))
        staged = [feed for feed in feeds if not feed.in_place]
        if local is not None:
            await copy_all(link, *local)
        turned = perf_counter()
        blocks = [feed.blocks for feed in feeds] + [tap.blocks for tap, _ in taps]
        steps = max(blocks, default=0)
        for step in range(steps):
            for feed in staged:  # one block ahead of what is read
                if feed.published < min(step + 2, feed.blocks):
                    if not feed.room():
                        await feed.wait_room()
                    feed.copy_next()
            for tap, target in taps:
                if step < tap.blocks:
                    if not tap.ready(step + 1):
                        await tap.wait(step + 1)
                    piece = tap.block(step)
                    at = step * block
                    target[at : at + len(piece)] = piece
                    tap.take(step + 1)
                if perf_counter() - turned > _WORK:
                    await link.turn()
                    turned = perf_counter()
        for feed in feeds:
            await feed.wait_all_taken()
    finally:
        for tap, _ in taps:
            tap.release()


async def shared_uneven(
    link: Link,
    outgoing: Sequence[memoryview],
    unit: int,
    place: Placing,
    *,
    same: bool = False,
) -> None:
    """The exchange of `messages.uneven`: short blocks ride in the message, long ones are offered.

    Args:
        outgoing, unit, place: as there.
        same: all of `outgoing` are the same bytes.

    Raises:
        ProtocolError: a length is not a multiple of `unit`.
    """
    block = _block(link.size)
    long = [peer for peer in peers(link.rank, link.size) if len(outgoing[peer]) > _INLINE]
    if not long:
        await _send_uneven(link, outgoing, unit, place, (), {}, block)
        return
    groups = [tuple(long)] if same else [(peer,) for peer in long]
    with lent(link, [outgoing[group[0]] for group in groups]) as places:
        feeds = [
            Feed(link, outgoing[group[0]], group, block, where)
            for group, where in zip(groups, places, strict=True)
        ]
        with boarded(link, feeds) as offers:
            await _send_uneven(link, outgoing, unit, place, feeds, offers, block)


async def _send_uneven(
    link: Link,
    outgoing: Sequence[memoryview],
    unit: int,
    place: Placing,
    feeds: Sequence[Feed],
    offers: Mapping[int, Sequence[Offer]],
    block: int,
) -> None:
    """Tell every rank how much it gets, with the bytes or where they are, and take what comes."""
    sends = []
    for peer in peers(link.rank, link.size):
        if peer in offers:
            header = _HEADER.pack(len(outgoing[peer]), *offers[peer][0])
            sends.append(link.send(peer, memoryview(header)))
        else:
            header = _HEADER.pack(len(outgoing[peer]), 0, 0, 0, 0)
            sends.append(link.send(peer, memoryview(header), outgoing[peer]))
    await _take_uneven(link, outgoing, unit, place, feeds, block)
    for sent in sends:
        await sent


async def _take_uneven(
    link: Link,
    outgoing: Sequence[memoryview],
    unit: int,
    place: Placing,
    feeds: Sequence[Feed],
    block: int,
) -> None:
    """Learn all lengths, make room, and fill it."""
    rank, size = link.rank, link.size
    others = peers(rank, size)
    lengths = [0] * size
    lengths[rank] = len(outgoing[rank])
    offers: dict[int, Offer] = {}
    inline: list[int] = []
    for peer in others:
        nbytes = (await link.probe(peer)).nbytes - _HEADER.size
        if nbytes == 0:  # offered, or nothing at all
            header = scratch(_HEADER.size)
            await link.recv_into(peer, header)
            nbytes, *fields = _HEADER.unpack(header)
            if nbytes:
                offers[peer] = Offer(*fields)
        else:
            inline.append(peer)
        if nbytes < 0 or nbytes % unit:
            raise ProtocolError(
                f"rank {peer} sent {nbytes} bytes to rank {rank}, which is no whole number of rows of {unit} "
                "bytes; see that all ranks run the same version",
                rank=peer,
            )
        lengths[peer] = nbytes
    blocks = split(await place(lengths), lengths)
    receives: list[Awaitable[None]] = [
        link.recv_into(peer, scratch(_HEADER.size), blocks[peer]) for peer in inline
    ]
    local = blocks[rank], outgoing[rank]
    if feeds or offers:
        await _flow(link, feeds, offers, dict(enumerate(blocks)), block, local)
    else:
        await copy_all(link, *local)
    for receive in receives:
        await receive
