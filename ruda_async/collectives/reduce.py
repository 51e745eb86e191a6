"""Reduce: combine equal tensors over ranks; the root gets the result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from ..tensors import adapter_for_call, reducer_at
from .barrier import dissemination
from .messages import EMPTY, copy_all, cut, message_limit, scratch, separate
from .movement import check_root
from .recursive import fold
from .reduction_pipeline import even_parts, reduce_parts
from .reductions import Plan, combine_all, load_all, plan_of, store_all
from .shared import shared_reduce

if TYPE_CHECKING:
    from ..tensors import Reducer, Target, TensorAdapter
    from .operation import Link, Settings

__all__ = ["Reduce", "binomial", "direct", "reduce_scatter_gather"]

T = TypeVar("T")


class Reduce(Generic[T]):
    """One rank's call of a reduce of ``[…]``; the root's result has the input's shape and dtype.

    Every rank learns that all have made this call: it fails everywhere or nowhere.

    Args:
        value: the input, of a dtype that `operator` takes; scalars too. Only read, unless it is `out`.
        root: the rank that gets the result; the others get None.
        operator: ``sum mean max min prod``, or ``band bor bxor`` for integers.
        out: receives the result on the root, and may overlap `value`; elsewhere it is not looked at.
        order: ``"exact"``, ``"any"``, or None for the communicator's.
        name: the method that was called.
    """

    _adapter: TensorAdapter[T]
    _plan: Plan
    _target: Target[T] | None

    def __init__(
        self,
        value: T,
        root: int,
        operator: str = "sum",
        *,
        out: T | None = None,
        order: str | None = None,
        name: str = "reduce",
    ) -> None:
        self.operation = name
        self._value = value
        self._root = root
        self._operator = operator
        self._out = out
        self._order = order

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the input; see `Request.prepare`."""
        self._root = root = check_root(self.operation, self._root, size)
        self._adapter = adapter = adapter_for_call(self._value, settings.device_memory)
        spec = adapter.spec(self._value)
        self._plan = plan_of(
            "reduce",
            self.operation,
            self._operator,
            spec,
            size,
            self._order,
            settings,
            detail=(("root", root),),
        )
        self._target = adapter.into(self._out, spec) if rank == root and self._out is not None else None
        return self._plan.head

    async def run(self, link: Link) -> T | None:
        """Combine over ranks at the root; see `Request.run`."""
        plan, target = self._plan, self._target
        native = plan.native(link)
        source = self._adapter.read(self._value)
        out = EMPTY
        if link.rank == self._root:
            if target is None:
                target = await link.allocate(self._adapter, self._value, plan.result.shape, plan.result.dtype)
            else:
                source = await separate(link, source, target.buffer)
            out = target.buffer
        reducer = plan.reducer
        if link.settings.device_memory:
            reducer = reducer_at(source, reducer)
        if link.size == 1:
            await copy_all(link, out, source)
        elif not plan.nbytes:
            await dissemination(link)
        elif native is not None:
            await native.run(link, source, out, reducer, owned=self._out is None)
        else:
            await _ALGORITHMS[plan.algorithm(link)](link, reducer, source, out, self._root)
        return None if target is None else target.finish()


async def direct(link: Link, reducer: Reducer, source: memoryview, out: memoryview, root: int) -> None:
    """Everyone sends its input to the root, which adds block by block as they come.

    One round; (n-1) times the message enters the root. `out` is empty on the other ranks.
    """
    parts = [(0, len(source)) if rank == root else (0, 0) for rank in range(link.size)]
    await reduce_parts(link, reducer, source, parts, out, agree=True)


async def reduce_scatter_gather(
    link: Link, reducer: Reducer, source: memoryview, out: memoryview, root: int
) -> None:
    """Each rank sums its shard from all inputs and sends it to the root, pipelined.

    After Rabenseifner 2004, with direct exchange for both phases: (n-1)/n of the message leaves each rank
    for the sums, 1/n for the results. `out` is empty on the other ranks.
    """
    parts = even_parts(len(source), reducer.itemsize, link.size)
    start, end = parts[link.rank]
    at_root = link.rank == root
    await reduce_parts(
        link,
        reducer,
        source,
        parts,
        out[start:end] if at_root else scratch(end - start, source),
        receivers=(root,),
        collected=out if at_root else None,
        # A rank that owns something hears from everyone; one that owns nothing has to be told.
        agree=len(source) // reducer.itemsize < link.size,
    )


# ---------------------------------------------------------------------- the tree


def _tree(rank: int, size: int, root: int) -> tuple[list[tuple[int, bool]], int | None]:
    """This rank's children, in the order of combination, and its parent, None at the root.

    The tree is the documented order's. Of two groups that combine, the one that holds the root receives,
    else the lower one. A child comes with True where its group is the lower one, that is, the left operand.
    """
    power, extra = fold(size)
    children: list[tuple[int, bool]] = []

    def place_of(member: int) -> int:
        return member // 2 if member < 2 * extra else member - extra

    def holder(level: int, group: int) -> int:
        """The rank that has the partial result of places ``group << level`` and the next ``2**level - 1``."""
        if place_of(root) >> level == group:
            return root
        place = group << level
        return 2 * place if place < extra else place + extra

    place = place_of(rank)
    if rank < 2 * extra:
        if holder(0, place) != rank:
            return children, rank ^ 1
        children.append((rank ^ 1, bool(rank & 1)))
    level = 0
    while 1 << level < power:
        group = place >> level
        parent = holder(level + 1, group >> 1)
        if parent != rank:
            return children, parent
        children.append((holder(level, group ^ 1), bool(group & 1)))
        level += 1
    return children, None


async def binomial(link: Link, reducer: Reducer, source: memoryview, out: memoryview, root: int) -> None:
    """Partial results climb a binomial tree whose inner nodes combine neighbours, as documented.

    ``ceil(log2(n))`` rounds, n-1 messages (Thakur, Rabenseifner & Gropp 2005, 4.4, there for short ones).
    Partial results travel unrounded; receives from all children are posted at once, so a rank near the
    root takes up to log2(n) messages of scratch memory. `out` is empty on the other ranks.
    """
    children, parent = _tree(link.rank, link.size, root)
    limit = message_limit(link)
    if reducer.widens:
        mine = scratch(len(source) // reducer.itemsize * reducer.partial_itemsize, source)
        await load_all(link, reducer, mine, source)
    else:
        mine = source
    inputs = [scratch(len(mine), source) for _ in children]
    arriving = [
        [link.recv_into(child, *piece) for piece in cut([room], limit)]
        for (child, _), room in zip(children, inputs, strict=True)
    ]
    leaving: list[Awaitable[None]] = []
    if not children and parent is not None:
        leaving = [link.send(parent, *piece) for piece in cut([mine], limit)]
    await dissemination(link)
    for (_, lower), theirs, transfers in zip(children, inputs, arriving, strict=True):
        for transfer in transfers:
            await transfer
        left, right = (theirs, mine) if lower else (mine, theirs)
        # The root's last word goes straight to the result where that is of the partial results' dtype.
        work = out if parent is None and not reducer.widens else theirs
        await combine_all(link, reducer, work, left, right)
        mine = work
    if parent is None:
        await store_all(link, reducer, out, mine)
    elif children:
        leaving = [link.send(parent, *piece) for piece in cut([mine], limit)]
    for transfer in leaving:
        await transfer


_ALGORITHMS: Mapping[str, Callable[[Link, Reducer, memoryview, memoryview, int], Awaitable[None]]] = {
    "direct": direct,
    "binomial": binomial,
    "reduce_scatter_gather": reduce_scatter_gather,
    "shared": shared_reduce,
}
