"""Ring algorithms: each rank hears its left neighbour and speaks to its right one, and no one else.

Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). Each chunk
is summed along the ring, so every chunk has an order of its own: the reducing ring is for ``order="any"``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING

from .messages import message_limit, scratch
from .reduction_pipeline import Part
from .reductions import combine_all, load_all, store_all

if TYPE_CHECKING:
    from ..tensors import Reducer
    from .operation import Link

__all__ = ["ring_all_gather", "ring_reduce_scatter"]

#: Receives that are posted ahead.
_WINDOW = 3


async def ring_reduce_scatter(
    link: Link, reducer: Reducer, source: memoryview, parts: Sequence[Part], own: memoryview
) -> None:
    """Reduce part r onto rank r in ``n-1`` steps around the ring.

    A part starts right of its owner and gathers one rank's input per step. It travels in segments of at
    most `Capabilities.segment_bytes`, unrounded; a segment goes on as soon as it is added. Each rank
    sends (n-1)/n of the message, and keeps one part and a few segments in scratch memory.

    Args:
        source: this rank's input.
        parts: for each rank its run of `source`, ``(start, end)`` in bytes.
        own: receives this rank's part; it may lie at its place in `source`.
    """
    rank, size = link.rank, link.size
    left, right = (rank - 1) % size, (rank + 1) % size
    itemsize, wide = reducer.itemsize, reducer.partial_itemsize
    segment = max(min(link.capabilities.segment_bytes, message_limit(link)) // wide, 1)  # in elements
    longest = max(end - start for start, end in parts) // itemsize
    segments = max(-(-longest // segment), 1)
    total = (size - 1) * segments
    # A segment stays in its slot until it has left, which is one step after it came.
    slots = scratch(min(segments + _WINDOW, total) * segment * wide, source)
    depth = max(min(segments + _WINDOW, total), 1)
    loaded = scratch(segment * wide, source) if reducer.widens else None

    def span(part: int, number: int) -> Part:
        start, end = parts[part % size]
        start = min(start + number * segment * itemsize, end)
        return start, min(start + segment * itemsize, end)

    def slot(position: int) -> memoryview:
        step, number = divmod(position, segments)
        start, end = span(rank - 2 - step, number)
        at = position % depth * segment * wide
        return slots[at : at + (end - start) // itemsize * wide]

    arriving: deque[Awaitable[None]] = deque(
        link.recv_into(left, slot(position)) for position in range(min(_WINDOW, total))
    )
    leaving: deque[Awaitable[None]] = deque()
    first = source[parts[left][0] : parts[left][1]]
    if reducer.widens:
        raw, first = first, scratch(len(first) // itemsize * wide, source)
        await load_all(link, reducer, first, raw)
    for number in range(segments):
        leaving.append(link.send(right, first[number * segment * wide : (number + 1) * segment * wide]))

    for position in range(total):
        if position:
            await link.turn()
        step, number = divmod(position, segments)
        start, end = span(rank - 2 - step, number)
        theirs, mine = slot(position), source[start:end]
        if loaded is not None:
            raw, mine = mine, loaded[: len(theirs)]
            await load_all(link, reducer, mine, raw)
        await arriving.popleft()
        if step < size - 2:
            await combine_all(link, reducer, theirs, theirs, mine)
            leaving.append(link.send(right, theirs))
        else:
            begin = start - parts[rank][0]
            result = own[begin : begin + end - start]
            partial = theirs if reducer.widens else result
            await combine_all(link, reducer, partial, theirs, mine)
            await store_all(link, reducer, result, partial)
        await leaving.popleft()
        if position + _WINDOW < total:
            arriving.append(link.recv_into(left, slot(position + _WINDOW)))


async def ring_all_gather(link: Link, out: memoryview, parts: Sequence[Part], lane: int) -> None:
    """Bring every rank's part of `out` to all, in ``n-1`` steps around the ring.

    Args:
        out: the whole; this rank's part is at its place already.
        parts: for each rank its run of `out`, ``(start, end)`` in bytes; they may differ in length.
        lane: one that no transfer under way uses.
    """
    rank, size = link.rank, link.size
    left, right = (rank - 1) % size, (rank + 1) % size
    segment = min(link.capabilities.segment_bytes, message_limit(link))
    segments = max(-(-max(end - start for start, end in parts) // segment), 1)
    total = (size - 1) * segments

    def view(position: int) -> memoryview:
        """Segment `position` of those that come: step by step, each step one rank's part."""
        step, number = divmod(position, segments)
        start, end = parts[(rank - 1 - step) % size]
        start = min(start + number * segment, end)
        return out[start : min(start + segment, end)]

    arriving: deque[Awaitable[None]] = deque(
        link.recv_into(left, view(position), lane=lane) for position in range(min(_WINDOW, total))
    )
    leaving: deque[Awaitable[None]] = deque(
        link.send(right, view(number - segments), lane=lane) for number in range(segments)
    )
    for position in range(total):
        await arriving.popleft()
        if position + segments < total:
            leaving.append(link.send(right, view(position), lane=lane))
        if position + _WINDOW < total:
            arriving.append(link.recv_into(left, view(position + _WINDOW), lane=lane))
        await leaving.popleft()
