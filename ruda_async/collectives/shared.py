"""Collectives through memory that all ranks see: every byte is read where its owner has it.

The *shared* all-reduce and reduce-scatter. As in the pairwise exchange (`reduction_pipeline`) each rank
owns a part of the tensor and adds it up in the documented order, since it has all inputs side by side; but
it reads them from its peers' memory block by block, and they read the results from its own. Nothing is
sent but one message a pair that says where everything lies.

Tensors in shared memory (results of earlier calls, `Communicator.empty`) are read in place. Others go
through slots that stay in the cache: one copy by their owner, none by the reader. The idea of reducing in
shared segments, block by block, is that of Graham & Shipman, "MPI Support for Multi-core Architectures:
Optimized Shared Memory Collectives" (2008); that of reading peers' memory in place is that of Hashmi et
al., "Designing Efficient Shared Address Space Reduction Collectives for Multi-/Many-cores" (2018).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from .feeds import Feed, Offer, Tap, boarded, lent, trade
from .messages import peers
from .reduction_pipeline import even_parts

if TYPE_CHECKING:
    from ..tensors import Reducer
    from .operation import Link

__all__ = ["shared_all_reduce", "shared_reduce", "shared_reduce_scatter"]

#: Bytes per block: operands, slots and result of one stay in the second-level cache.
_BLOCK = 256 * 1024
#: Slots of one rank together stay within this many bytes, by smaller blocks.
_SLOT_BYTES = 8 * 1024 * 1024
_LEAST_BLOCK = 16 * 1024
#: Seconds of work between two turns of the event loop.
_WORK = 0.0004


async def shared_all_reduce(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """Each rank reduces its part from all ranks' memory and reads the other parts from their owners'.

    Per rank and S bytes: S/n are read from each peer twice, once as input and once as result, and
    S(n-1)/n written once more where the input, or the result, is not in shared memory. `out` may be `source`.
    """
    parts = even_parts(len(source), reducer.itemsize, link.size)
    start, end = parts[link.rank]
    await _Reduction(link, reducer, source, parts, out[start:end], range(link.size), out).run()


async def shared_reduce(link: Link, reducer: Reducer, source: memoryview, out: memoryview, root: int) -> None:
    """Each rank reduces its part from all ranks' memory; the root reads the parts from their owners'.

    `out` is empty on the other ranks, and does not overlap `source`.
    """
    parts = even_parts(len(source), reducer.itemsize, link.size)
    start, end = parts[link.rank]
    if link.rank == root:
        await _Reduction(link, reducer, source, parts, out[start:end], (root,), out).run()
        return
    assert link.heap is not None
    with link.heap.work(end - start) as own:
        await _Reduction(link, reducer, source, parts, own, (root,), None).run()


async def shared_reduce_scatter(link: Link, reducer: Reducer, source: memoryview, own: memoryview) -> None:
    """Each rank reduces its shard from all ranks' memory. `own` does not overlap `source`."""
    parts = even_parts(len(source), reducer.itemsize, link.size)
    await _Reduction(link, reducer, source, parts, own, (), None).run()


class _Reduction:
    """The state of one call on this rank.

    Args:
        parts: for each rank the run of `source` that it owns.
        own: receives this rank's reduced part.
        receivers: the ranks that want all parts.
        collected: where this rank is one of them, memory as long as `source`; `own` lies in it.
    """

    def __init__(
        self,
        link: Link,
        reducer: Reducer,
        source: memoryview,
        parts: Sequence[tuple[int, int]],
        own: memoryview,
        receivers: Collection[int],
        collected: memoryview | None,
    ) -> None:
        self.link = link
        self.reducer = reducer
        self.source = source
        self.parts = parts
        self.own = own
        self.collected = collected
        self.peers = peers(link.rank, link.size)
        self.receivers = [peer for peer in self.peers if peer in receivers]
        longest = max(end - start for start, end in parts)
        block = min(_BLOCK, max(_SLOT_BYTES // (3 * link.size), _LEAST_BLOCK), longest)
        self.block = max(block // reducer.itemsize, 1) * reducer.itemsize
        self.steps = -(-longest // self.block)
        start, end = parts[link.rank]
        self.mine = source[start:end]
        self.turned = perf_counter()

    async def run(self) -> None:
        link = self.link
        with lent(link, (self.source, self.own)) as (place_in, place_out):
            self.inputs = {
                peer: Feed(
                    link,
                    self.source[start:end],
                    (peer,),
                    self.block,
                    None if place_in is None else place_in.further(start),
                )
                for peer in self.peers
                for start, end in (self.parts[peer],)
            }
            self.results = Feed(link, self.own, self.receivers, self.block, place_out, filled=False)
            with boarded(link, [*self.inputs.values(), self.results]) as offers:
                await self._run(offers)

    async def _run(self, offers: dict[int, list[Offer]]) -> None:
        link = self.link
        per_peer = 1 if self.collected is None else 2
        theirs = await trade(link, offers, dict.fromkeys(self.peers, per_peer))
        taps: list[Tap] = []
        try:
            self.raws: list[Tap | None] = [None] * link.size
            for peer in self.peers:
                self.raws[peer] = Tap(link, peer, theirs[peer][0], len(self.mine), self.block)
                taps.append(self.raws[peer])  # type: ignore[arg-type]
            self.sums: list[Tap] = []
            if self.collected is not None:
                for peer in self.peers:
                    start, end = self.parts[peer]
                    self.sums.append(Tap(link, peer, theirs[peer][1], end - start, self.block))
                taps += self.sums
            await self._flow()
        finally:
            for tap in taps:
                tap.release()

    async def _flow(self) -> None:
        # Waits are only for what peers do in the same or an earlier step, so nobody waits in a circle.
        feeds = list(self.inputs.values())
        staged = [feed for feed in feeds if not feed.in_place]
        for step in range(self.steps):
            for feed in staged:  # one block ahead of what is read
                if feed.published < min(step + 2, feed.blocks):
                    if not feed.room():
                        await feed.wait_room()
                    feed.copy_next()
            await self._reduce(step)
            if step:
                await self._collect(step - 1)
        await self._collect(self.steps - 1)
        for feed in feeds:
            await feed.wait_all_taken()
        await self.results.wait_all_taken()

    async def _turn(self) -> None:
        """Let the loop run other work, now and then."""
        if perf_counter() - self.turned > _WORK:
            await self.link.turn()
            self.turned = perf_counter()

    async def _reduce(self, step: int) -> None:
        """Add block `step` of this rank's part."""
        start = step * self.block
        if start >= len(self.mine):
            return
        mine = self.mine[start : start + self.block]
        raws: list[memoryview] = []
        for tap in self.raws:
            if tap is None:
                raws.append(mine)
                continue
            if not tap.ready(step + 1):
                await tap.wait(step + 1)
            raws.append(tap.block(step))
        out = self.own[start : start + len(mine)]
        results = self.results
        self.reducer.reduce(out, raws)
        for tap in self.raws:
            if tap is not None:
                tap.take(step + 1)
        if results.readers:
            if results.in_place:
                results.publish(step + 1)
            else:
                if not results.room():
                    await results.wait_room()
                results.copy_next()
        await self._turn()

    async def _collect(self, step: int) -> None:
        """Copy block `step` of the other parts from their owners."""
        if self.collected is None:
            return
        for tap in self.sums:
            if step >= tap.blocks:
                continue
            if not tap.ready(step + 1):
                await tap.wait(step + 1)
            piece = tap.block(step)
            at = self.parts[tap.peer][0] + step * self.block
            self.collected[at : at + len(piece)] = piece
            tap.take(step + 1)
            await self._turn()
