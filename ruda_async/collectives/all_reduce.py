"""All-reduce: combine equal tensors over ranks; every rank gets the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from ..tensors import adapter_for_call, reducer_at
from . import hierarchical_reduce
from .barrier import dissemination
from .messages import copy_all, message_limit, peers, same_memory, scratch, separate
from .recursive import rabenseifner, recursive_doubling
from .reduction_pipeline import even_parts, reduce_parts
from .reductions import Algorithm, Plan, plan_of, reduce_all
from .rings import ring_all_gather, ring_reduce_scatter
from .shared import shared_all_reduce

if TYPE_CHECKING:
    from ..tensors import Reducer, Target, TensorAdapter
    from .operation import Link, Settings

__all__ = ["AllReduce", "direct", "exact_ring", "pairwise", "ring"]

T = TypeVar("T")

#: Up to this size the direct algorithm takes one round without blocks.
_ONE_ROUND = 512 * 1024


class AllReduce(Generic[T]):
    """One rank's call of an all-reduce of ``[…]``; the result has the input's shape and dtype.

    Args:
        value: the input, of a dtype that `operator` takes; scalars too. Only read, unless it is `out`.
        operator: ``sum mean max min prod``, or ``band bor bxor`` for integers.
        out: receives the result; it may be `value` itself, or overlap it.
        order: ``"exact"``, ``"any"``, or None for the communicator's.
        name: the method that was called.
    """

    _adapter: TensorAdapter[T]
    _plan: Plan
    _target: Target[T] | None

    def __init__(
        self,
        value: T,
        operator: str = "sum",
        *,
        out: T | None = None,
        order: str | None = None,
        name: str = "all_reduce",
    ) -> None:
        self.operation = name
        self._value = value
        self._operator = operator
        self._out = out
        self._order = order

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the input; see `Request.prepare`."""
        value = self._value
        self._adapter = adapter = adapter_for_call(value, settings.device_memory)
        spec = adapter.spec(value)
        self._plan = plan_of("all_reduce", self.operation, self._operator, spec, size, self._order, settings)
        self._target = None if self._out is None else adapter.into(self._out, spec)
        return self._plan.head

    async def run(self, link: Link) -> T:
        """Combine over ranks; see `Request.run`."""
        plan, target = self._plan, self._target
        native = plan.native(link)
        source = self._adapter.read(self._value)
        if target is None:
            target = await link.allocate(self._adapter, self._value, plan.result.shape, plan.result.dtype)
            out = target.buffer
        else:
            out = target.buffer
            if not same_memory(source, out):
                source = await separate(link, source, out)
        reducer = plan.reducer
        if link.settings.device_memory:
            reducer = reducer_at(source, reducer)
        if link.size == 1:
            await copy_all(link, out, source)
        elif not plan.nbytes:
            await dissemination(link)
        elif native is not None:
            await native.run(
                link,
                source,
                out,
                reducer,
                in_place=self._out is not None and same_memory(source, out),
                owned=self._out is None,
            )
        else:
            algorithm = plan.algorithm(link)
            if plan.exact and algorithm in _EXACT:
                algorithm = _EXACT[algorithm]
            await _ALGORITHMS[algorithm](link, reducer, source, out)
        return target.finish()


async def direct(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """Everyone sends its whole input to everyone and adds all of them itself.

    One round, the least latency there is; (n-1) times the message leaves each rank. `out` may be `source`.
    """
    nbytes = len(source)
    rank, size = link.rank, link.size
    if nbytes > _ONE_ROUND or nbytes > message_limit(link):
        await reduce_parts(link, reducer, source, [(0, nbytes)] * size, out)
    elif size == 2:
        # The shortest path of the library: two ranks swap.
        peer = 1 - rank
        theirs = scratch(nbytes, source)
        arriving = link.recv_into(peer, theirs)
        leaving = link.send(peer, source)
        await arriving
        await leaving
        low, high = (theirs, source) if rank else (source, theirs)
        if reducer.widens:
            reducer.reduce(out, (low, high))
        else:
            reducer.combine(out, low, high)
            reducer.finish_inplace(out)
    else:
        room = scratch(nbytes * size, source)
        inputs = [room[at : at + nbytes] for at in range(0, nbytes * size, nbytes)]
        others = peers(rank, size)
        transfers = [link.recv_into(peer, inputs[peer]) for peer in others]
        transfers += [link.send(peer, source) for peer in others]
        for transfer in transfers:
            await transfer
        inputs[rank] = source
        await reduce_all(link, reducer, out, inputs)


async def pairwise(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """Each rank sums its shard from all inputs while the results of others come in.

    The least traffic: 2(n-1)/n of the message leaves each rank. See `reduction_pipeline` for the
    pipeline and its sources. `out` may be `source`.
    """
    parts = even_parts(len(source), reducer.itemsize, link.size)
    start, end = parts[link.rank]
    await reduce_parts(
        link,
        reducer,
        source,
        parts,
        out[start:end],
        receivers=range(link.size),
        collected=out,
        in_place=same_memory(source, out),
    )


async def ring(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """Reduce-scatter and all-gather around a ring, each shard in an order of its own (Patarasuk & Yuan 2009).

    `out` may be `source`.
    """
    if message_limit(link) < reducer.partial_itemsize:  # the ring's messages carry unrounded sums
        await exact_ring(link, reducer, source, out)
        return
    parts = even_parts(len(source), reducer.itemsize, link.size)
    start, end = parts[link.rank]
    await ring_reduce_scatter(link, reducer, source, parts, out[start:end])
    await ring_all_gather(link, out, parts, lane=1)


async def exact_ring(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """As `ring` in the documented order: sums by pairwise exchange, results around the ring."""
    parts = even_parts(len(source), reducer.itemsize, link.size)
    start, end = parts[link.rank]
    await reduce_parts(link, reducer, source, parts, out[start:end])
    await ring_all_gather(link, out, parts, lane=1)


_ALGORITHMS: Mapping[str, Algorithm] = {
    "direct": direct,
    "recursive_doubling": recursive_doubling,
    "rabenseifner": rabenseifner,
    "pairwise": pairwise,
    "ring": ring,
    "shared": shared_all_reduce,
    "exact_ring": exact_ring,
    "hierarchical": hierarchical_reduce.all_reduce,
    "exact_hierarchical": hierarchical_reduce.exact_all_reduce,
}
#: The forms of those that add in an order of their own which keep to the documented one.
_EXACT = {"ring": "exact_ring", "hierarchical": "exact_hierarchical"}
