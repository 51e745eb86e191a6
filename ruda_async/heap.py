"""Results and work areas in memory that all ranks of the job can see."""

from __future__ import annotations

import asyncio
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from .tensors import Target, TensorAdapter
from .tensors.pool import POOLED, WIDEST, Pool, allocating
from .transport.regions import Regions

__all__ = ["Heap", "Place"]

T = TypeVar("T")

#: Shared memory that one rank keeps for results and work areas, used or free, in bytes.
_LIMIT = 1024 * 1024 * 1024
#: Seconds that the memory of a failed call stays, for peers that are still in it.
_GRACE = 2.0


class Place(NamedTuple):
    """Where a peer finds some bytes: in which region of this rank, and how far into it."""

    number: int
    offset: int

    def further(self, nbytes: int) -> Place:
        """The place `nbytes` on."""
        return Place(self.number, self.offset + nbytes)


class Heap:
    """One rank's shared blocks, recycled like those of `tensors.pool`, over a transport's `Regions`."""

    def __init__(self, regions: Regions, limit: int = _LIMIT) -> None:
        self.regions = regions
        self._pool = Pool(limit, self._create, self._destroy)
        self._lock = threading.Lock()
        #: Start addresses, sorted, and for each the block's size and number.
        self._starts: list[int] = []
        self._blocks: dict[int, tuple[int, int]] = {}

    def take(self, nbytes: int) -> npt.NDArray[Any]:
        """`nbytes` shared bytes of unknown content; free again when the last view of them is gone.

        Raises:
            OSError: there is no such memory.
        """
        block = self._pool.take(nbytes)
        if block is None:  # more than the pool keeps: for this one use
            block = self._create(nbytes)
            weakref.finalize(block, self._forget, _address(block))
        return block

    def discard(self, block: npt.NDArray[Any]) -> None:
        """The call that used this work area failed, and peers may still write to it: not to be used again."""
        mine = self._pool.discard(block)
        if mine is not None:
            self._destroy_later(self._unlist(_address(mine)))

    def _destroy_later(self, number: int) -> None:
        # A peer that has not heard of the failure yet should find the memory, not miss it.
        asyncio.get_running_loop().call_later(_GRACE, self.regions.destroy, number)

    def allocate(self, adapter: TensorAdapter[T], like: T, shape: tuple[int, ...], dtype: str) -> Target[T]:
        """`TensorAdapter.allocate`, shared where the tensor is large."""
        if prod(shape) * WIDEST < POOLED:
            return adapter.allocate(like, shape, dtype)
        with allocating(self._try_take):
            return adapter.allocate(like, shape, dtype)

    @contextmanager
    def work(self, nbytes: int) -> Iterator[memoryview]:
        """A work area of so many bytes, for as long as the block lasts; ordinary memory if need be."""
        block = self._try_take(max(nbytes, 1))
        memory = np.empty(nbytes, np.uint8).data if block is None else block.data[:nbytes]
        yield memory

    def _try_take(self, nbytes: int) -> npt.NDArray[Any] | None:
        try:
            return self._pool.take(nbytes)
        except OSError:
            return None  # ordinary memory does as well, only slower

    def find(self, view: memoryview) -> Place | None:
        """Where the peers see these bytes, or None where they do not."""
        if not len(view):
            return None
        start = _address(np.frombuffer(view, np.uint8))
        with self._lock:
            index = bisect_right(self._starts, start) - 1
            if index < 0:
                return None
            base = self._starts[index]
            size, number = self._blocks[base]
        offset = start - base
        return Place(number, offset) if offset + len(view) <= size else None

    @contextmanager
    def lending(self, views: Sequence[memoryview]) -> Iterator[list[Place | None]]:
        """Where the peers see these bytes, each, as long as the block lasts; None where they do not.

        As `find`, or where the transport can lend any memory, that of the views.
        """
        places = [self.find(view) for view in views]
        lent: list[int] = []
        for index, view in enumerate(views):
            if places[index] is None and len(view):
                number = self.regions.lend(view)
                if number is not None:
                    places[index] = Place(number, 0)
                    lent.append(number)
        try:
            yield places
        except BaseException:
            for number in lent:
                self._destroy_later(number)
            raise
        for number in lent:
            self.regions.destroy(number)

    def _create(self, nbytes: int) -> npt.NDArray[Any]:
        number, view = self.regions.create(nbytes)
        block: npt.NDArray[Any] = np.frombuffer(view, np.uint8)
        base = _address(block)
        with self._lock:
            self._starts.insert(bisect_right(self._starts, base), base)
            self._blocks[base] = (nbytes, number)
        return block

    def _destroy(self, block: npt.NDArray[Any]) -> None:
        self._forget(_address(block))

    def _forget(self, base: int) -> None:
        self.regions.destroy(self._unlist(base))

    def _unlist(self, base: int) -> int:
        with self._lock:
            self._starts.remove(base)
            return self._blocks.pop(base)[1]


def _address(block: npt.NDArray[Any]) -> int:
    address: int = block.__array_interface__["data"][0]
    return address
