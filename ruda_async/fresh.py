"""Results in memory that nobody has touched yet.

The first touch of a page has the system find one and clear it: for one of 2 MiB about 0.2 ms, and on a
virtual machine whose host has to find it too, 10 ms and more. A thread does that, for bytes that arrive
are written by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, TypeVar

from .tensors.pool import WIDEST, fresh_blocks, touch
from .transport import blocking
from .transport.threads import start_in_thread

if TYPE_CHECKING:
    from .heap import Heap
    from .tensors import Target, TensorAdapter

__all__ = ["allocate"]

T = TypeVar("T")

#: From so many bytes on numpy asks for pages of 2 MiB.
_LARGE = 4 << 20
#: Bytes touched at a time: so much goes on in vain when the call has ended.
_PIECE = 16 << 20


async def allocate(
    adapter: TensorAdapter[T],
    like: T,
    shape: tuple[int, ...],
    dtype: str,
    wait: Callable[[asyncio.Future[None]], Awaitable[None]],
    heap: Heap | None = None,
) -> Target[T]:
    """`TensorAdapter.allocate`, in shared memory where there is a `heap`; large ones have their pages.

    `wait` waits for a thread, but no longer than the call may last.
    """
    make = adapter.allocate if heap is None else partial(heap.allocate, adapter)
    # A blocking call that runs by hand holds up no loop.
    if blocking.seconds or prod(shape) * WIDEST < _LARGE:
        return make(like, shape, dtype)
    with fresh_blocks() as blocks:
        target = make(like, shape, dtype)
    for block in blocks:
        if block.nbytes >= _LARGE:
            for at in range(0, block.nbytes, _PIECE):
                await wait(start_in_thread(partial(touch, block[at : at + _PIECE])))
    return target
