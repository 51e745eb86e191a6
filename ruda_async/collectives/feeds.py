"""Streams of blocks through memory that both ranks see, instead of messages.

A *feed* is some bytes of one rank that others want to read, cut into blocks. Where the peers can see the
bytes themselves, they read them in place; else the owner copies them block by block into a few slots of
shared memory, small enough to stay in the cache until they are read. A *tap* is a reader's end.

Two counters per reader keep both in step: how many blocks the owner has published, and how many the
reader has taken. Each has one writer and only grows. The owner's memory is its own again when every
reader has taken all; the last thing that a reader touches is that counter.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ProtocolError, RudaError

if TYPE_CHECKING:
    from ..heap import Place
    from .operation import Link

__all__ = ["SLOTS", "Feed", "Offer", "Tap", "boarded", "lent", "trade"]

#: Slots per feed whose bytes have to be copied: one that is filled, one that is read, one for jitter.
SLOTS = 3
#: Counters lie a cache line apart, so that their writers do not disturb each other.
_LINE = 64

_OFFER = struct.Struct("<QQQQ")


class Offer(NamedTuple):
    """What a reader must know of a feed.

    Attributes:
        board: the owner's region with this reader's counters, and slots.
        at: where the counters lie in it: published, and one line on, taken.
        source: the region that holds the bytes, or 0 for slots on the board.
        start: where the bytes, or the slots, begin.
    """

    board: int
    at: int
    source: int
    start: int


class Feed:
    """The owner's end.

    Args:
        data: the bytes; those of a feed that is read in place are where `place` says.
        readers: group ranks.
        block: bytes per block.
        place: where the peers see `data`, or None to go through slots.
        filled: `data` is there already, so that a reader finds as much as can be with the offer.
    """

    __slots__ = (
        "_block",
        "_counters",
        "_data",
        "_filled",
        "_link",
        "_place",
        "_slots",
        "blocks",
        "published",
        "readers",
    )

    def __init__(
        self,
        link: Link,
        data: memoryview,
        readers: Sequence[int],
        block: int,
        place: Place | None,
        *,
        filled: bool = True,
    ) -> None:
        self._link = link
        self._data = data
        self._block = block
        self._place = place
        self._filled = filled
        self.readers = readers
        self.blocks = -(-len(data) // block) if readers else 0
        self.published = 0
        link.count(sent=len(data) * len(readers))

    @property
    def nbytes(self) -> int:
        """Bytes that it takes on the board."""
        slots = 0 if self._place is not None else min(SLOTS, self.blocks) * self._block
        return 2 * _LINE * len(self.readers) + -(-slots // _LINE) * _LINE

    def settle(self, board: int, at: int, memory: memoryview) -> list[Offer]:
        """Take this place on the board; an offer for every reader."""
        if not self.readers:
            return []
        lines = 2 * _LINE * len(self.readers)
        memory[:lines] = bytes(lines)
        self._counters = memory[:lines].cast("Q")
        self._slots = memory[lines:]
        if self._place is None:
            source, start = 0, at + lines
            if self._filled and self.blocks:
                self._count(self._fill())
        else:
            source, start = self._place
            if self._filled:
                self._count(self.blocks)
        return [Offer(board, at + 2 * _LINE * i, source, start) for i in range(len(self.readers))]

    def publish(self, count: int) -> None:
        """Blocks up to `count` may be read."""
        self._count(count)
        for reader in self.readers:
            self._link.signal(reader)

    def _count(self, published: int) -> None:
        self.published = published
        for i in range(len(self.readers)):
            self._counters[16 * i] = published

    @property
    def in_place(self) -> bool:
        """Whether readers see the bytes themselves."""
        return self._place is not None

    def room(self) -> bool:
        """Whether the next block has a free slot."""
        return all(self._has_taken(i, self.published + 1 - SLOTS) for i in range(len(self.readers)))

    def _has_taken(self, index: int, count: int) -> bool:
        return self._counters[16 * index + 8] >= count

    def copy_next(self) -> None:
        """Copy the next block into its slot, which is free, and publish it."""
        self.publish(self._fill())

    def _fill(self) -> int:
        """Copy the next block into its slot; how many are there then."""
        start = self.published * self._block
        piece = self._data[start : start + self._block]
        at = self.published % SLOTS * self._block
        self._slots[at : at + len(piece)] = piece
        return self.published + 1

    async def wait_room(self) -> None:
        """Wait until the next block has a free slot."""
        await self._wait_taken(self.published + 1 - SLOTS)

    async def wait_all_taken(self) -> None:
        """Wait until no reader looks at this rank's memory any more."""
        await self._wait_taken(self.blocks)

    async def _wait_taken(self, count: int) -> None:
        for i, reader in enumerate(self.readers):
            if not self._has_taken(i, count):
                await self._link.watch(reader, lambda i=i: self._has_taken(i, count))  # type: ignore[misc]

    def release(self) -> None:
        """Let go of the board."""
        if self.readers:
            self._counters.release()
            self._slots.release()


class Tap:
    """A reader's end of `peer`'s feed of `nbytes` bytes.

    Raises:
        ProtocolError: the offer does not fit the feed.
    """

    __slots__ = ("_block", "_bytes", "_counters", "_in_place", "_link", "blocks", "nbytes", "peer", "taken")

    def __init__(self, link: Link, peer: int, offer: Offer, nbytes: int, block: int) -> None:
        self._link = link
        self.peer = peer
        self.nbytes = nbytes
        self._block = block
        self.blocks = -(-nbytes // block)
        self.taken = 0
        link.count(received=nbytes)
        if not nbytes:
            return
        board = link.open(peer, offer.board)
        self._in_place = offer.source != 0
        memory = link.open(peer, offer.source) if self._in_place else board
        room = nbytes if self._in_place else min(SLOTS, self.blocks) * block
        if offer.at % 8 or offer.at + 2 * _LINE > len(board) or offer.start + room > len(memory):
            raise ProtocolError(
                f"rank {link.rank}: rank {peer} offers memory that it does not have", rank=peer
            )
        self._counters = board[offer.at : offer.at + 2 * _LINE].cast("Q")
        self._bytes = memory[offer.start : offer.start + room]

    def ready(self, count: int) -> bool:
        """Whether `count` blocks are published."""
        return self._counters[0] >= count

    def wait(self, count: int) -> Awaitable[None]:
        """Wait until `count` blocks are published."""
        return self._link.watch(self.peer, lambda: self._counters[0] >= count)

    def block(self, index: int) -> memoryview:
        """The bytes of a published block; not to be looked at after `take`."""
        start = index * self._block
        length = min(self._block, self.nbytes - start)
        if not self._in_place:
            start = index % SLOTS * self._block
        return self._bytes[start : start + length]

    def take(self, count: int) -> None:
        """Done with the first `count` blocks. After the last, the owner may do with its memory as it likes.

        Of a feed that is read in place only the last is told.
        """
        self.taken = count
        if not self._in_place or count == self.blocks:
            self._counters[8] = count
            self._link.signal(self.peer)

    def release(self) -> None:
        """Let go of the peer's memory."""
        if self.nbytes:
            self._counters.release()
            self._bytes.release()


def lent(link: Link, data: Sequence[memoryview]) -> AbstractContextManager[list[Place | None]]:
    """Where the peers see some of this rank's bytes, each, as long as the block lasts; None where not."""
    assert link.heap is not None
    return link.heap.lending(data)


@contextmanager
def boarded(link: Link, feeds: Sequence[Feed]) -> Iterator[dict[int, list[Offer]]]:
    """Give all feeds their place in one region; for each peer its offers, in the feeds' order.

    Raises:
        RudaError: there is no shared memory for it.
    """
    assert link.heap is not None
    rooms = [feed.nbytes for feed in feeds]
    nbytes = sum(rooms)
    if not nbytes:
        yield {}
        return
    try:
        block = link.heap.take(nbytes)
    except OSError as error:
        raise RudaError(
            f"rank {link.rank} has no {nbytes} bytes of shared memory for this call "
            f"({error.strerror or error}); algorithm=pairwise does without"
        ) from error
    memory = block.data
    place = link.heap.find(memory)
    assert place is not None
    offers: dict[int, list[Offer]] = {}
    at = 0
    for feed, room in zip(feeds, rooms, strict=True):
        made = feed.settle(place.number, place.offset + at, memory[at : at + room])
        for reader, offer in zip(feed.readers, made, strict=True):
            offers.setdefault(reader, []).append(offer)
        at += room
    try:
        yield offers
    except BaseException:
        # A peer that has not heard yet may still move its counters on this board.
        link.heap.discard(block)
        raise
    finally:
        for feed in feeds:
            feed.release()


async def trade(
    link: Link, offers: dict[int, list[Offer]], expected: dict[int, int]
) -> dict[int, list[Offer]]:
    """Tell every peer its offers and get theirs, `expected` of each; the call's agreement as well.

    Every pair of ranks exchanges a message, with fingerprints, so that a call on which ranks do not agree
    ends here.
    """
    rooms = {peer: bytearray(count * _OFFER.size) for peer, count in expected.items()}
    arriving = [link.recv_into(peer, memoryview(room)) for peer, room in rooms.items()]
    leaving = [
        link.send(peer, memoryview(b"".join(_OFFER.pack(*offer) for offer in offers.get(peer, ()))))
        for peer in rooms
    ]
    for transfer in arriving:
        await transfer
    for transfer in leaving:
        await transfer
    return {peer: [Offer(*fields) for fields in _OFFER.iter_unpack(room)] for peer, room in rooms.items()}
