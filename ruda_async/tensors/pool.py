"""Memory of large results that nobody holds any more, used again for the next ones.

The first touch of fresh pages costs about as much as a transfer into them, in pieces that hold up the
event loop. A block is free again when the last array or tensor over it is gone, which its reference
count tells; what is handed out is a view that keeps it alive.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["POOLED", "Pool", "pool"]

#: Results from this many bytes on come from the pool.
POOLED = 1024 * 1024
#: The pool keeps at most this many bytes, used or free.
_LIMIT = 512 * 1024 * 1024
#: References to a block that nobody uses: the pool's list, the loop's variable, `getrefcount`'s argument.
_IDLE = 3


class Pool:
    """Blocks of a few sizes; safe to use from several threads.

    Args:
        limit: bytes to keep; what is handed out beyond them is ordinary memory.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._blocks: list[npt.NDArray[Any]] = []
        self._kept = 0

    def take(self, nbytes: int) -> npt.NDArray[Any]:
        """`nbytes` bytes whose content is whatever the last user left."""
        # Eight sizes to a factor of two: little is wasted, and near sizes share blocks.
        step = 1 << max(nbytes.bit_length() - 4, 12)
        size = -(-nbytes // step) * step
        with self._lock:
            for block in self._blocks:
                if block.nbytes == size and sys.getrefcount(block) == _IDLE:
                    return block[:nbytes]
            if self._kept + size > self._limit:
                self._drop_idle()
            fresh = np.empty(size, np.uint8)
            if self._kept + size <= self._limit:
                self._blocks.append(fresh)
                self._kept += size
            return fresh[:nbytes]

    def _drop_idle(self) -> None:
        """Give the memory of free blocks back."""
        blocks, self._blocks = self._blocks, []
        while blocks:
            block = blocks.pop()
            if sys.getrefcount(block) == _IDLE - 1:
                self._kept -= block.nbytes
            else:
                self._blocks.append(block)


#: The one that the adapters use.
pool = Pool()
