"""Bytes between ranks and within one, in pieces that are bounded in size and in number.

Nothing here, and no algorithm of the data-moving families, makes a task. ``send`` and ``recv_into`` start
at the call, so concurrency is to post several of them and then wait; and when a wait fails or is
cancelled, the error comes out as it is and the communicator withdraws whatever is still posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..errors import ProtocolError
from ..tensors import device_memory
from ..tensors.numpy_adapter import empty_array
from ..transport.base import DONE

if TYPE_CHECKING:
    from .operation import Link

__all__ = [
    "EMPTY",
    "UNLIMITED",
    "WINDOW",
    "Buffers",
    "Placing",
    "copy_all",
    "cut",
    "message_limit",
    "pairwise",
    "peers",
    "receive_bytes",
    "same_memory",
    "scratch",
    "send_bytes",
    "separate",
    "split",
    "stream",
    "swap",
    "uneven",
]

#: The payload of a message that only says "I am here".
EMPTY = memoryview(bytearray())
_BYTE = np.dtype(np.uint8)
#: More than any message: stands for "no limit".
UNLIMITED = 1 << 62
#: Messages posted ahead in each direction: enough to keep a link busy, few enough to be fair.
WINDOW = 8
#: Bytes copied between two turns of the event loop: well under a quarter of a millisecond.
_WORK = 512 * 1024
#: Messages between two turns, where none of them has to wait.
_BURST = 32

#: The parts of one message, in order, each contiguous bytes.
Buffers: TypeAlias = Sequence[memoryview]
#: Gets the bytes from each rank and makes the memory for all of them, in rank order.
Placing: TypeAlias = Callable[[list[int]], Awaitable[memoryview]]


# ---------------------------------------------------------------------- memory


def scratch(nbytes: int, like: memoryview | None = None) -> memoryview:
    """Memory for `nbytes` bytes where `like` lies, else on the host; aligned for every dtype, not set."""
    if like is None or type(like) is memoryview:
        return empty_array((nbytes,), _BYTE).data
    return like.scratch(nbytes)  # see `tensors.device`


def _span(view: memoryview) -> tuple[int, int]:
    memory = device_memory(view)
    if memory is not None:
        return memory.span
    start: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return start, start + len(view)


def same_memory(a: memoryview, b: memoryview) -> bool:
    """Whether two views are of exactly the same bytes."""
    return bool(len(a)) and _span(a) == _span(b)


async def separate(link: Link, source: memoryview, out: memoryview) -> memoryview:
    """`source`, or a copy of it where writing `out` would change it."""
    if not len(source) or not len(out):
        return source
    ours, theirs = _span(source), _span(out)
    if ours[1] <= theirs[0] or theirs[1] <= ours[0]:
        return source
    copied = scratch(len(source), source)
    await copy_all(link, copied, source)
    return copied


async def copy_all(link: Link, out: memoryview, source: memoryview) -> None:
    """Copy `source` to `out`, which is as long and does not overlap it, in blocks."""
    if len(out) <= _WORK or type(out) is not memoryview:  # a device copies without holding up the loop
        out[:] = source
        return
    for at in range(0, len(out), _WORK):
        if at:
            await link.turn()
        out[at : at + _WORK] = source[at : at + _WORK]


# ---------------------------------------------------------------------- messages


@lru_cache(maxsize=1024)
def peers(rank: int, size: int) -> tuple[int, ...]:
    """The other ranks, from the next one round: so ranks do not all start with the same peer."""
    return tuple((rank + step) % size for step in range(1, size))


def message_limit(link: Link) -> int:
    """The most bytes that one message may have here; `UNLIMITED` where there is no limit."""
    limit = link.settings.max_bytes or UNLIMITED
    largest = link.capabilities.max_message
    return limit if largest is None or largest > limit else largest


def cut(buffers: Buffers, limit: int) -> Iterator[Buffers]:
    """The messages that carry `buffers`, each of at most `limit` bytes; at least one, if empty.

    Cuts lie at multiples of `limit` whatever the buffers are, so sender and receiver may have different
    ones for the same bytes.
    """
    total = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
    if total <= limit:
        yield buffers
        return
    piece: list[memoryview] = []
    room = limit
    for view in buffers:
        at = 0
        while at < len(view):
            taken = view[at : at + room]
            piece.append(taken)
            at += len(taken)
            room -= len(taken)
            if not room:
                yield piece
                piece, room = [], limit
    if piece:
        yield piece


#: One step of `stream`: ``(source, incoming, to, outgoing)``, with None for nothing to receive or send.
_Step: TypeAlias = "tuple[int, Buffers | None, int, Buffers | None]"


async def stream(link: Link, steps: Iterable[_Step], lane: int = 0) -> None:
    """Take the steps in order, up to `WINDOW` of them at a time.

    Args:
        steps: ``(source, incoming, to, outgoing)``. If rank *b* receives from *a* in its step *i* then *a*
            sends to *b* in its own step *i*; that makes waiting free of deadlock, since the earliest step
            that is open anywhere has been posted on both sides.
    """
    window: deque[tuple[Awaitable[None], Awaitable[None]]] = deque()
    for number, (source, incoming, to, outgoing) in enumerate(steps, 1):
        if len(window) == WINDOW:
            receive, sent = window.popleft()
            await receive
            await sent
        receive = DONE if incoming is None else link.recv_into(source, *incoming, lane=lane)
        sent = DONE if outgoing is None else link.send(to, *outgoing, lane=lane)
        window.append((receive, sent))
        if not number % _BURST:
            await link.turn()
    for receive, sent in window:
        await receive
        await sent


async def swap(link: Link, to: int, outgoing: Buffers, source: int, incoming: Buffers, lane: int = 0) -> None:
    """Send `outgoing` to one rank and fill `incoming` from another, or the same."""
    limit = message_limit(link)
    if limit != UNLIMITED and max(sum(map(len, outgoing)), sum(map(len, incoming))) > limit:
        await stream(link, _swap_steps(to, outgoing, source, incoming, limit), lane)
        return
    receive = link.recv_into(source, *incoming, lane=lane)
    sent = link.send(to, *outgoing, lane=lane)
    await receive
    await sent


def _swap_steps(to: int, outgoing: Buffers, source: int, incoming: Buffers, limit: int) -> Iterator[_Step]:
    for received, sent in zip_longest(cut(incoming, limit), cut(outgoing, limit)):
        yield source, received, to, sent


async def pairwise(
    link: Link,
    outgoing: Sequence[memoryview],
    incoming: Sequence[memoryview],
    local: tuple[memoryview, memoryview] | None = None,
    lane: int = 0,
) -> None:
    """Send ``outgoing[p]`` to every other rank *p* and fill ``incoming[p]`` from it.

    In step *i* a rank sends to the one *i* places on and receives from the one *i* places back, so no rank
    is anybody's target twice in a step.

    Args:
        local: ``(destination, source)`` to copy while messages move.
        lane: the message stream.
    """
    rank, size = link.rank, link.size
    limit = message_limit(link)
    if size <= WINDOW + 1 and (limit == UNLIMITED or max(map(len, (*outgoing, *incoming))) <= limit):
        others = peers(rank, size)
        receives = [link.recv_into(peer, incoming[peer], lane=lane) for peer in others]
        sends = [link.send(peer, outgoing[peer], lane=lane) for peer in others]
        if local is not None:
            await copy_all(link, *local)
        for receive in receives:
            await receive
        for sent in sends:
            await sent
        return
    if local is not None:
        await copy_all(link, *local)
    await stream(link, _pairwise_steps(rank, size, outgoing, incoming, limit), lane)


def _pairwise_steps(
    rank: int, size: int, outgoing: Sequence[memoryview], incoming: Sequence[memoryview], limit: int
) -> Iterator[_Step]:
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        yield from _swap_steps(to, (outgoing[to],), source, (incoming[source],), limit)


async def uneven(
    link: Link,
    outgoing: Sequence[memoryview],
    unit: int,
    place: Placing,
) -> None:
    """Exchange blocks whose lengths their receivers learn from the messages themselves.

    Each rank sends each other rank one message, an empty one too, so there is no exchange of counts
    beforehand: a receiver probes for all lengths, makes room once, and receives every block in place.

    Args:
        outgoing: the block for each rank; this rank's own is copied locally.
        unit: what every length is a multiple of, in bytes.
        place: makes the memory.

    Raises:
        ProtocolError: a length is not a multiple of `unit`.
    """
    rank, size = link.rank, link.size
    others = peers(rank, size)
    sends = [link.send(peer, outgoing[peer]) for peer in others]
    lengths = [0] * size
    lengths[rank] = len(outgoing[rank])
    for peer in others:
        nbytes = (await link.probe(peer)).nbytes
        if nbytes % unit:
            raise ProtocolError(
                f"rank {peer} sent {nbytes} bytes to rank {rank}, which is no whole number of rows of {unit} "
                "bytes; see that all ranks run the same version",
                rank=peer,
            )
        lengths[peer] = nbytes
    out = await place(lengths)
    blocks = split(out, lengths)
    window: deque[Awaitable[None]] = deque()
    for peer in others:
        if len(window) == 2 * WINDOW:
            await window.popleft()
        window.append(link.recv_into(peer, blocks[peer]))
    await copy_all(link, blocks[rank], outgoing[rank])
    for receive in window:
        await receive
    for sent in sends:
        await sent


def split(view: memoryview, lengths: Sequence[int]) -> list[memoryview]:
    """`view` as consecutive blocks of the given lengths."""
    blocks = []
    at = 0
    for length in lengths:
        blocks.append(view[at : at + length])
        at += length
    return blocks


# ---------------------------------------------------------------------- bytes of unknown length


async def send_bytes(link: Link, to: int, data: memoryview) -> None:
    """Send `data` to a rank that calls `receive_bytes`."""
    limit = message_limit(link)
    if limit == UNLIMITED:
        await link.send(to, data)
        return
    header = memoryview(len(data).to_bytes(8, "big"))
    for part in (header, data):
        await stream(link, ((to, None, to, piece) for piece in cut((part,), limit)))


async def receive_bytes(link: Link, source: int, largest: int) -> memoryview:
    """What `source` sends by `send_bytes`.

    Raises:
        ProtocolError: it announces more than `largest` bytes.
    """
    limit = message_limit(link)
    if limit == UNLIMITED:
        nbytes = (await link.probe(source)).nbytes
    else:
        header = scratch(8)
        await stream(link, ((source, piece, source, None) for piece in cut((header,), limit)))
        nbytes = int.from_bytes(header, "big")
    if nbytes > largest:
        raise ProtocolError(
            f"rank {source} announced {nbytes} bytes to rank {link.rank}, more than the {largest} allowed; "
            "see that all ranks run the same version",
            rank=source,
        )
    data = scratch(nbytes)
    await stream(link, ((source, piece, source, None) for piece in cut((data,), limit)))
    return data
