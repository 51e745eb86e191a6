"""Reducing by pairwise exchange: every part of the input has an owner, and all send it their bytes of it.

One pipeline serves many algorithms; they differ in who owns what and who wants the results:

* all own everything, nobody wants results: the direct all-reduce;
* each owns its shard, nobody wants results: reduce-scatter;
* each owns its shard, all want results: reduce-scatter and all-gather in one, the long all-reduce
  (Rabenseifner 2004 in its outline, with direct exchange for both phases; Thakur, Rabenseifner & Gropp
  2005 call the first phase *pairwise exchange*);
* each owns its shard, the root wants results; or the root owns everything: reduce.

An owner has the inputs of all ranks side by side, so it adds in the documented order and rounds once.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Awaitable, Collection, Sequence
from typing import TYPE_CHECKING

from .barrier import dissemination
from .messages import message_limit, peers, scratch
from .reductions import reduce_all

if TYPE_CHECKING:
    from ..tensors import Reducer
    from .operation import Link

__all__ = ["even_parts", "reduce_parts"]

#: Blocks under way per stream: one that arrives, one that is added, and one in reserve for jitter.
_WINDOW = 3
#: Blocks are cut smaller than this only to keep scratch memory in bounds, never to have more of them.
_SMALL_BLOCK = 512 * 1024
#: Scratch memory that larger groups try to stay within, bytes.
_SCRATCH = 8 * 1024 * 1024

_INPUTS = 0
_RESULTS = 1

Part = tuple[int, int]


def even_parts(nbytes: int, itemsize: int, size: int) -> list[Part]:
    """Cut `nbytes` into `size` runs of whole elements, ``(start, end)`` in bytes, the longer ones first."""
    share, longer = divmod(nbytes // itemsize, size)
    bounds = [(rank * share + min(rank, longer)) * itemsize for rank in range(size + 1)]
    return list(itertools.pairwise(bounds))


async def reduce_parts(
    link: Link,
    reducer: Reducer,
    source: memoryview,
    parts: Sequence[Part],
    own: memoryview,
    *,
    receivers: Collection[int] = (),
    collected: memoryview | None = None,
    in_place: bool = False,
    agree: bool = False,
) -> None:
    """Reduce each part at its owner, and bring the results to those who want them.

    Blocks of at most `Capabilities.segment_bytes` flow on two lanes, inputs to owners and results from
    them; the next blocks travel while one is added. Per rank, with equal shards of S bytes in all, S(n-1)/n
    go out for the inputs and as much per full set of results. Scratch memory is the window times (n-1)
    blocks, whatever S is.

    Args:
        source: this rank's input.
        parts: for each rank the run of `source` that it owns, ``(start, end)`` in bytes.
        own: receives this rank's reduced part; as long as the part.
        receivers: the ranks that every result is sent to.
        collected: where this rank is a receiver, memory as long as `source`; the other parts' results
            come straight to their places in it.
        in_place: `own` and `collected` lie in `source`.
        agree: run the agreement of `dissemination` along with the data.
    """
    await _Pipeline(link, reducer, source, parts, own, receivers, collected).run(in_place, agree)


class _Pipeline:
    """The state of one `reduce_parts`: what is under way, oldest first."""

    def __init__(
        self,
        link: Link,
        reducer: Reducer,
        source: memoryview,
        parts: Sequence[Part],
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
        rank, size = link.rank, link.size
        # Everyone starts with another peer, so that no rank is everybody's first.
        self.peers = peers(rank, size)
        self.receivers = [peer for peer in self.peers if peer in receivers]
        longest = max(end - start for start, end in parts)
        self.block = self._block(longest)
        self.steps = -(-longest // self.block)
        self.slots = scratch(
            min(_WINDOW, self.steps) * len(self.peers) * self.block if len(own) else 0, source
        )
        self.inputs_in: deque[list[Awaitable[None]]] = deque()
        self.inputs_out: deque[list[Awaitable[None]]] = deque()
        self.results_in: deque[list[Awaitable[None]]] = deque()
        self.results_out: deque[list[Awaitable[None]]] = deque()

    def _block(self, longest: int) -> int:
        """Bytes per block: whole elements, the same on all ranks."""
        itemsize = self.reducer.itemsize
        block = min(
            self.link.capabilities.segment_bytes,
            max(_SCRATCH // (_WINDOW * len(self.peers)), _SMALL_BLOCK),
            max(-(-longest // 4), _SMALL_BLOCK),  # short parts make a pipeline too
            message_limit(self.link),
            longest,
        )
        return max(block // itemsize, 1) * itemsize

    def _span(self, owner: int, step: int) -> Part | None:
        """Block `step` of `owner`'s part, or None past its end."""
        start, end = self.parts[owner]
        start += step * self.block
        return (start, min(start + self.block, end)) if start < end else None

    def _slot(self, step: int, peer: int, length: int) -> memoryview:
        """Where `peer`'s input for our block `step` goes."""
        link = self.link
        place = (step % _WINDOW) * (link.size - 1) + (peer - link.rank - 1) % link.size
        start = place * self.block
        return self.slots[start : start + length]

    # ------------------------------------------------------------------ starting transfers

    def _expect_inputs(self, step: int) -> None:
        span = self._span(self.link.rank, step)
        if span is not None:
            length = span[1] - span[0]
            self.inputs_in.append(
                [self.link.recv_into(p, self._slot(step, p, length), lane=_INPUTS) for p in self.peers]
            )

    def _send_inputs(self, step: int) -> None:
        sends = []
        for peer in self.peers:
            span = self._span(peer, step)
            if span is not None:
                sends.append(self.link.send(peer, self.source[span[0] : span[1]], lane=_INPUTS))
        self.inputs_out.append(sends)

    def _expect_results(self, step: int) -> None:
        receives = []
        if self.collected is not None:
            for peer in self.peers:
                span = self._span(peer, step)
                if span is not None:
                    receives.append(
                        self.link.recv_into(peer, self.collected[span[0] : span[1]], lane=_RESULTS)
                    )
        self.results_in.append(receives)

    # ------------------------------------------------------------------ the loop

    async def run(self, in_place: bool, agree: bool) -> None:
        # A rank waits in step s only for what its peers start in step s or before, and the slowest rank
        # has started all that the others wait for: nobody waits in a circle.
        for step in range(min(_WINDOW, self.steps)):
            if step:
                await self.link.turn()
            self._expect_inputs(step)
            self._send_inputs(step)
            if not in_place:
                self._expect_results(step)
        if agree:
            await dissemination(self.link)
        for step in range(self.steps):
            if step:
                await self.link.turn()
            await _all(self.inputs_out)
            if in_place:  # our input lies where the result goes; it has left by now
                self._expect_results(step)
            span = self._span(self.link.rank, step)
            if span is not None:
                await _all(self.inputs_in)
                await self._reduce(step, span)
            ahead = step + _WINDOW
            if ahead < self.steps:
                self._expect_inputs(ahead)
                self._send_inputs(ahead)
                if not in_place:
                    self._expect_results(ahead)
            if step >= _WINDOW:
                await _all(self.results_in)
            if len(self.results_out) > _WINDOW:
                await _all(self.results_out)
        while self.results_in:
            await _all(self.results_in)
        while self.results_out:
            await _all(self.results_out)

    async def _reduce(self, step: int, span: Part) -> None:
        """Add block `step` of our part and send the result on its way."""
        link, reducer = self.link, self.reducer
        start, end = span
        length = end - start
        mine = self.source[start:end]
        raws = [mine if r == link.rank else self._slot(step, r, length) for r in range(link.size)]
        begin = start - self.parts[link.rank][0]
        result = self.own[begin : begin + length]
        await reduce_all(link, reducer, result, raws)
        if self.receivers:
            self.results_out.append([link.send(peer, result, lane=_RESULTS) for peer in self.receivers])


async def _all(steps: deque[list[Awaitable[None]]]) -> None:
    """Wait for the oldest step's transfers."""
    for transfer in steps.popleft():
        await transfer
