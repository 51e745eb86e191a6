"""All-reduce where ranks share hosts: what can be added within a host is, before anything leaves it.

The documented order of summation is a tree over the ranks. Parts of that tree that lie within one host are
added there, and their sums leave it; where no two neighbours in the tree share a host, what leaves are the
inputs. So results have the bits of every other algorithm, whatever ranks the hosts have; and with hosts that
are whole branches of the tree, such as equal powers of two of consecutive ranks, one sum leaves each host.
Where the order makes no difference to the bits (integers, minimum, maximum, bitwise operators), or is free
(``order="any"``), one sum leaves each host always.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ..tensors import dtype_of
from .hierarchical import layout_for, staged
from .layout import subtrees
from .messages import cut, message_limit, scratch
from .reduction_pipeline import Part, even_parts
from .reductions import combine_all, load_all, store_all

if TYPE_CHECKING:
    from ..tensors import Reducer
    from ..tensors.arithmetic import Tree
    from .operation import Link

__all__ = ["all_reduce", "exact_all_reduce"]

#: Segments in one chunk of the whole.
_SEGMENTS = 2
#: Lanes: inputs to proxies, partial results to owners, results from owners, results from proxies to mates.
_INPUTS, _PARTIALS, _RESULTS, _ON = 0, 1, 2, 3


async def exact_all_reduce(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """In the documented order. Every part of the tensor has an owner, and a proxy of it on each other host.

    Inputs go to the proxies within the host, partial sums from them to the owner, the result from it to the
    proxies and from these to their mates: four rounds, two of them between hosts, pipelined over chunks.

    With S bytes on n ranks of H equal hosts, each host sends out cS(H-1)/H for partial sums and S(H-1)/H for
    results, where c is the number of partial sums that a host has: 1 where hosts are whole branches of the
    tree, at most n/H; sent directly (`all_reduce.pairwise`) it is n/H times S(H-1)/H for each. Unrounded sums
    of half precision count twice, which is still no more than the inputs that they are of. Messages between
    hosts are 2n(H-1) for each chunk instead of 2n(n-n/H). `out` may be `source`.
    """
    await _Hierarchy(link, reducer, source, out, exact=not _any_order(reducer)).run()


async def all_reduce(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """As `exact_all_reduce` with one partial sum a host, in an order that depends on the hosts."""
    await _Hierarchy(link, reducer, source, out, exact=False).run()


def _any_order(reducer: Reducer) -> bool:
    """Whether every order of reduction gives the same bits."""
    return dtype_of(reducer.dtype).kind != "float" or reducer.operator in ("max", "min")


class _Value(NamedTuple):
    """An operand: its bytes, whether they are a partial result, and whether they may be overwritten."""

    view: memoryview
    partial: bool
    ours: bool


class _Chunk:
    """What is under way for one chunk.

    Attributes:
        parts: for each rank the run of bytes that it owns.
        raws: the mates' inputs for the parts that this rank deals with: mate → owner → bytes.
        pieces: other hosts' operands for this rank's own part: host → bytes, one after another.
    """

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.raws: dict[int, dict[int, memoryview]] = {}
        self.pieces: dict[int, memoryview] = {}
        self.own: dict[Tree, _Value] = {}
        self.inputs: list[Awaitable[None]] = []
        self.partials: list[Awaitable[None]] = []
        self.results: list[Awaitable[None]] = []
        self.rest: list[Awaitable[None]] = []
        self.leaving: list[Awaitable[None]] = []


class _Hierarchy:
    """One all-reduce on one rank."""

    def __init__(
        self, link: Link, reducer: Reducer, source: memoryview, out: memoryview, *, exact: bool
    ) -> None:
        self.link = link
        self.reducer = reducer
        self.source = source
        self.out = out
        layout = layout_for(link)
        rank = link.rank
        self.tree, self.branches = subtrees(layout.hosts, exact)
        self.here = layout.hosts[rank]
        self.mates = layout.mates(rank)
        self.proxies = {host: layout.proxy(host, rank) for host in layout.others(rank)}
        #: The owners whose parts each of us deals with: those of other hosts, and itself.
        self.served = {member: (*layout.served(member), member) for member in (rank, *self.mates)}
        self.limit = message_limit(link)
        self.chunk_bytes = self._chunk_bytes()
        self.under_way: dict[int, _Chunk] = {}

    def _chunk_bytes(self) -> int:
        """Whole elements; no part of a chunk is longer than a message may be, where that can be."""
        size, itemsize = self.link.size, self.reducer.itemsize
        most = max(_SEGMENTS * self.link.capabilities.segment_bytes, 1)
        return max(min(most, self.limit * size, len(self.source)) // itemsize, size) * itemsize

    async def run(self) -> None:
        """All chunks through all stages."""
        chunks = -(-len(self.source) // self.chunk_bytes)
        await staged(
            self.link, chunks, (self._gather, self._add_here, self._add_all, self._pass_on, self._finish)
        )

    # ------------------------------------------------------------------ messages

    def _send(self, peer: int, buffers: Sequence[memoryview], lane: int) -> Iterator[Awaitable[None]]:
        """Send what there is of `buffers` as one message, or as few as the limit allows; nothing if empty."""
        if any(map(len, buffers)):
            for message in cut(buffers, self.limit):
                yield self.link.send(peer, *message, lane=lane)

    def _expect(self, peer: int, buffers: Sequence[memoryview], lane: int) -> Iterator[Awaitable[None]]:
        """Receive what `_send` sends."""
        if any(map(len, buffers)):
            for message in cut(buffers, self.limit):
                yield self.link.recv_into(peer, *message, lane=lane)

    def _piece_lengths(self, host: int, nbytes: int) -> list[int]:
        """The bytes of each operand that `host` has for a part of `nbytes`: inputs, or wider sums of them."""
        wide = nbytes // self.reducer.itemsize * self.reducer.partial_itemsize
        return [nbytes if isinstance(branch, int) else wide for branch in self.branches[host]]

    # ------------------------------------------------------------------ stages

    async def _gather(self, number: int) -> None:
        """Inputs leave for the proxies of their parts within the host."""
        base = number * self.chunk_bytes
        length = min(self.chunk_bytes, len(self.source) - base)
        parts = even_parts(length, self.reducer.itemsize, self.link.size)
        chunk = self.under_way[number] = _Chunk([(base + start, base + end) for start, end in parts])
        rank = self.link.rank
        for mate in self.mates:
            room = {owner: scratch(_length(chunk.parts[owner]), self.source) for owner in self.served[rank]}
            chunk.raws[mate] = room
            chunk.inputs += self._expect(mate, list(room.values()), _INPUTS)
            chunk.leaving += self._send(mate, [self._mine(chunk, o) for o in self.served[mate]], _INPUTS)
        for host, proxy in self.proxies.items():
            room_bytes = sum(self._piece_lengths(host, _length(chunk.parts[rank])))
            chunk.pieces[host] = scratch(room_bytes, self.source)
            chunk.partials += self._expect(proxy, [chunk.pieces[host]], _PARTIALS)

    def _mine(self, chunk: _Chunk, owner: int) -> memoryview:
        """This rank's input for a part."""
        start, end = chunk.parts[owner]
        return self.source[start:end]

    async def _add_here(self, number: int) -> None:
        """Proxies add what the tree adds within the host, and send it to the owners."""
        chunk = self.under_way[number]
        await _all(chunk.inputs)
        rank = self.link.rank
        for owner in self.served[rank]:
            if not _length(chunk.parts[owner]):
                continue
            leaves: dict[Tree, _Value] = {rank: _Value(self._mine(chunk, owner), False, False)}
            leaves |= {mate: _Value(room[owner], False, True) for mate, room in chunk.raws.items()}
            operands = {branch: await self._value(branch, leaves) for branch in self.branches[self.here]}
            if owner == rank:
                chunk.own = operands
            else:
                chunk.leaving += self._send(owner, [value.view for value in operands.values()], _PARTIALS)

    async def _add_all(self, number: int) -> None:
        """Owners add all hosts' operands and send the result out; the places of other results are free."""
        chunk = self.under_way[number]
        rank = self.link.rank
        await _all(chunk.leaving)  # the inputs have left: where they lie, results may arrive
        for mate in self.mates:
            chunk.rest += self._expect(mate, [self._place(chunk, mate)], _RESULTS)
            through = [self._place(chunk, owner) for owner in self.served[mate] if owner != mate]
            chunk.rest += self._expect(mate, through, _ON)
        for owner in self.served[rank]:
            if owner != rank:
                chunk.results += self._expect(owner, [self._place(chunk, owner)], _RESULTS)
        await _all(chunk.partials)
        out = self._place(chunk, rank)
        if len(out):
            given = dict(chunk.own)
            for host, data in chunk.pieces.items():
                at = 0
                for branch, length in zip(
                    self.branches[host], self._piece_lengths(host, len(out)), strict=True
                ):
                    given[branch] = _Value(data[at : at + length], not isinstance(branch, int), True)
                    at += length
            await self._reduce(given, out)
            for peer in (*self.proxies.values(), *self.mates):
                chunk.rest += self._send(peer, [out], _RESULTS)

    def _place(self, chunk: _Chunk, owner: int) -> memoryview:
        """Where a part's result goes."""
        start, end = chunk.parts[owner]
        return self.out[start:end]

    async def _pass_on(self, number: int) -> None:
        """Proxies hand results on to their mates."""
        chunk = self.under_way[number]
        await _all(chunk.results)
        results = [self._place(chunk, owner) for owner in self.served[self.link.rank][:-1]]
        for mate in self.mates:
            chunk.rest += self._send(mate, results, _ON)

    async def _finish(self, number: int) -> None:
        """Nothing of the chunk is under way any more."""
        await _all(self.under_way.pop(number).rest)

    # ------------------------------------------------------------------ arithmetic

    async def _value(self, node: Tree, given: Mapping[Tree, _Value]) -> _Value:
        """What `node` comes to; memory of operands that may be overwritten is used for it."""
        value = given.get(node)
        if value is not None:
            return value
        assert not isinstance(node, int)
        low = await self._partial(node[0], given)
        high = await self._partial(node[1], given)
        room = low.view if low.ours else high.view if high.ours else scratch(len(low.view), low.view)
        await combine_all(self.link, self.reducer, room, low.view, high.view)
        return _Value(room, True, True)

    async def _partial(self, node: Tree, given: Mapping[Tree, _Value]) -> _Value:
        """`_value` in the form that is added: half precision widened."""
        value = await self._value(node, given)
        reducer = self.reducer
        if value.partial or not reducer.widens:
            return value
        wide = scratch(len(value.view) // reducer.itemsize * reducer.partial_itemsize, value.view)
        await load_all(self.link, reducer, wide, value.view)
        return _Value(wide, True, True)

    async def _reduce(self, given: Mapping[Tree, _Value], out: memoryview) -> None:
        """All operands into the result; `out` may be the memory of one of them."""
        tree, link, reducer = self.tree, self.link, self.reducer
        assert not isinstance(tree, int)
        low = await self._partial(tree[0], given)
        high = await self._partial(tree[1], given)
        if reducer.widens:
            room = low.view if low.ours else high.view
            await combine_all(link, reducer, room, low.view, high.view)
            await store_all(link, reducer, out, room)
        else:
            await combine_all(link, reducer, out, low.view, high.view)
            await store_all(link, reducer, out, out)


def _length(part: Part) -> int:
    return part[1] - part[0]


async def _all(transfers: list[Awaitable[None]]) -> None:
    """Wait for what is under way, and forget it."""
    for transfer in transfers:
        await transfer
    transfers.clear()
