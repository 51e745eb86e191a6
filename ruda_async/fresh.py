"""Results in memory that nobody has touched yet.

The first touch of a page has the system find one and clear it: for one of 2 MiB about 0.2 ms, and on a
virtual machine whose host has to find it too, 10 ms and more. A thread does that, for bytes that arrive
are written by the event loop.
"""

from __future__ import annotations

import asyncio
from math import prod
from typing import TYPE_CHECKING, TypeVar

from .tensors.pool import WIDEST, fresh_blocks, touch
from .transport import blocking

if TYPE_CHECKING:
    from .tensors import Target, TensorAdapter

__all__ = ["allocate"]

T = TypeVar("T")

#: From so many bytes on numpy asks for pages of 2 MiB.
_LARGE = 4 << 20
#: Bytes touched at a time, so that who was cancelled waits for little.
_PIECE = 16 << 20


async def allocate(adapter: TensorAdapter[T], like: T, shape: tuple[int, ...], dtype: str) -> Target[T]:
    """`TensorAdapter.allocate`, whose pages are there already if it is large."""
    # A blocking call that runs by hand holds up no loop.
    if blocking.seconds or prod(shape) * WIDEST < _LARGE:
        return adapter.allocate(like, shape, dtype)
    with fresh_blocks() as blocks:
        target = adapter.allocate(like, shape, dtype)
    for block in blocks:
        if block.nbytes >= _LARGE:
            for at in range(0, block.nbytes, _PIECE):
                await asyncio.to_thread(touch, block[at : at + _PIECE])
    return target
