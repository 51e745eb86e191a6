"""Memory of large results that nobody holds any more, used again for the next ones.

The first touch of fresh pages costs about as much as a transfer into them, in pieces that hold up the
event loop. A block is free again when the last array or tensor over it is gone, which its reference
count tells; what is handed out is a view that keeps it alive.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["POOLED", "WIDEST", "Pool", "allocating", "fresh_blocks", "take", "touch"]

Block = npt.NDArray[Any]

#: Results from this many bytes on come from the pool.
POOLED = 256 * 1024
#: Bytes of the widest element.
WIDEST = 8
#: The pool keeps at most this many bytes of large blocks, used or free.
_LIMIT = 512 * 1024 * 1024
#: References to a block that nobody uses: the pool's list, the loop's variable, `getrefcount`'s argument.
_IDLE = 3
#: The smallest page of any system this runs on.
_PAGE = 4096
#: So many blocks of a size are looked at for a free one, so that holding many results costs no time.
_LOOKS = 32


def _ordinary(nbytes: int) -> Block:
    return np.empty(nbytes, np.uint8)


def _forget(_: Block) -> None:
    pass


class Pool:
    """Blocks of a few sizes; safe to use from several threads.

    Blocks of up to a 64th of the limit have an eighth of it to themselves, so that room for scratch memory
    is never made by giving a large result back, which the next call would have to find again.

    Args:
        limit: bytes to keep.
        make: a fresh block of so many bytes.
        drop: called with a block that the pool lets go of.
    """

    def __init__(
        self,
        limit: int = _LIMIT,
        make: Callable[[int], Block] = _ordinary,
        drop: Callable[[Block], None] = _forget,
    ) -> None:
        self._small = limit // 64
        #: Bytes to keep, and those kept, in small blocks and in large ones.
        self._limits = (limit // 8, limit)
        self._kept = [0, 0]
        self._make = make
        self._drop = drop
        self._lock = threading.Lock()
        #: By size; each list is turned as it is looked through.
        self._blocks: dict[int, deque[Block]] = {}

    def take(self, nbytes: int) -> Block | None:
        """`nbytes` bytes whose content is whatever the last user left; None where the limit is reached."""
        # Eight sizes to a factor of two: little is wasted, and near sizes share blocks.
        step = 1 << max(nbytes.bit_length() - 4, 12)
        size = -(-nbytes // step) * step
        with self._lock:
            blocks = self._blocks.setdefault(size, deque())
            for _ in range(min(len(blocks), _LOOKS)):
                block = blocks[0]
                if sys.getrefcount(block) == _IDLE:
                    return block[:nbytes]
                blocks.rotate(-1)
            large = size > self._small
            if self._kept[large] + size > self._limits[large]:
                self._drop_idle(large)
                if self._kept[large] + size > self._limits[large]:
                    return None
            fresh = self._make(size)
            self._blocks[size].appendleft(fresh)
            self._kept[large] += size
            return _noted(fresh)[:nbytes]

    def discard(self, block: Block) -> Block | None:
        """Never hand out again the block that `block` is a view of, which may be in use.

        Its maker is not told: it is returned instead; None where it is not one of this pool's.
        """
        base = block.base if isinstance(block.base, np.ndarray) else block
        with self._lock:
            blocks = self._blocks.get(base.nbytes, deque())
            for index, mine in enumerate(blocks):
                if mine is base:
                    del blocks[index]
                    self._kept[mine.nbytes > self._small] -= mine.nbytes
                    return mine
        return None

    def _drop_idle(self, large: bool) -> None:
        """Give the memory of the free blocks among the large or the small ones back."""
        for size, blocks in self._blocks.items():
            if (size > self._small) is not large:
                continue
            for _ in range(len(blocks)):
                block = blocks.popleft()
                if sys.getrefcount(block) == _IDLE - 1:
                    self._kept[large] -= size
                    self._drop(block)
                else:
                    blocks.append(block)


#: The one for results in ordinary memory.
_pool = Pool()
_here = threading.local()


def take(nbytes: int) -> Block:
    """Memory for a result of at least `POOLED` bytes: from where `allocating` says, else from the pool."""
    source: Callable[[int], Block | None] | None = getattr(_here, "source", None)
    if source is not None:
        block = source(nbytes)
        if block is not None:
            return block
    block = _pool.take(nbytes)
    return _noted(_ordinary(nbytes)) if block is None else block


@contextmanager
def allocating(source: Callable[[int], Block | None]) -> Iterator[None]:
    """Take the memory of large results from `source` meanwhile, in this thread; None means not from there."""
    outer = getattr(_here, "source", None)
    _here.source = source
    try:
        yield
    finally:
        _here.source = outer


@contextmanager
def fresh_blocks() -> Iterator[list[Block]]:
    """The blocks that are made for results meanwhile, in this thread: nobody has touched their pages yet."""
    outer = getattr(_here, "fresh", None)
    blocks: list[Block] = []
    _here.fresh = blocks
    try:
        yield blocks
    finally:
        _here.fresh = outer


def _noted(block: Block) -> Block:
    fresh: list[Block] | None = getattr(_here, "fresh", None)
    if fresh is not None:
        fresh.append(block)
    return block


def touch(block: Block) -> None:
    """Have the system find the pages of `block`, whose content is lost; other threads run meanwhile."""
    block[::_PAGE] = 0
