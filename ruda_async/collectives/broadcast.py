"""Broadcast: the root's tensor on every rank.

A root could finish without hearing from anybody, and bad input on another rank would then fail the call
there alone. So every algorithm ends only when all ranks are known to have entered: in the tree by a
dissemination barrier, which costs a small broadcast nothing, and in the ring by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..tensors import TensorSpec, adapter_for_call
from ..transport.base import DONE
from .all_gather import ring_blocks
from .barrier import dissemination
from .messages import (
    EMPTY,
    WINDOW,
    Buffers,
    copy_all,
    cut,
    message_limit,
    receive_bytes,
    same_memory,
    send_bytes,
    separate,
    split,
    stream,
)
from .movement import Plan, agreed, check_kind, check_root, nbytes_of
from .shared_copy import shared_broadcast

if TYPE_CHECKING:
    from ..tensors import Target, TensorAdapter
    from .operation import Link, Settings

__all__ = ["Broadcast", "binomial", "broadcast_bytes", "scatter_all_gather"]

T = TypeVar("T")


# ---------------------------------------------------------------------- algorithms


async def binomial(link: Link, root: int, out: memoryview, source: memoryview | None = None) -> None:
    """Pass the tensor down a binomial tree: in round *k* the ``2**k`` ranks that have it double.

    Ranks are counted from the root. Rank *v* gets the tensor from the rank that is *v* without its highest
    bit, and hands it to ``v + 2**k`` for every ``2**k > v``: just the pairs that a dissemination barrier
    joins in round *k*. So small tensors ride on the barrier's messages, and broadcast and barrier together
    take ceil(log2 size) rounds. Longer ones are cut into segments where there are ranks in the middle of
    the tree, which then send while they receive; the barrier runs while the first segments are under way.

    Args:
        link: the group.
        root: the rank that has the tensor.
        out: memory for the tensor.
        source: the tensor on the root, to be copied to `out`; None where it lies there already, and on
            other ranks.

    Sources: Hensgen, Finkel & Manber (1988) for the pattern; Thakur, Rabenseifner & Gropp (2005), section
    4.2, for the tree.
    """
    rank, size = link.rank, link.size
    data = out if source is None else source
    limit = message_limit(link)
    if size > 3:  # with fewer, every rank is the root or a leaf
        limit = min(limit, max(link.capabilities.segment_bytes, 1))
    sends: list[Awaitable[None]] = []
    if len(data) > limit:
        await _pipeline(link, root, data, limit)
    else:
        place = (rank - root) % size
        distance = 1
        while distance < size:
            gets = distance <= place < 2 * distance
            gives = place < distance and place + distance < size
            receive = link.recv_into((rank - distance) % size, data if gets else EMPTY)
            sends.append(link.send((rank + distance) % size, data if gives else EMPTY))
            await receive
            distance *= 2
    if source is not None:
        await copy_all(link, out, source)
    await _all(sends)


def _children(place: int, size: int) -> Iterator[int]:
    """Who gets the tensor from the rank at `place`, both counted from the root."""
    distance = 1 << place.bit_length()
    while place + distance < size:
        yield place + distance
        distance *= 2


async def _pipeline(link: Link, root: int, data: memoryview, limit: int) -> None:
    """The tree of `binomial`, message by message."""
    rank, size = link.rank, link.size
    place = (rank - root) % size
    children = [(root + child) % size for child in _children(place, size)]
    leaving: deque[list[Awaitable[None]]] = deque()
    number = 0
    if place == 0:
        for piece in cut((data,), limit):
            if number == WINDOW:
                await dissemination(link)
            if len(leaving) == WINDOW:
                await _all(leaving.popleft())
            leaving.append([link.send(child, *piece) for child in children])
            number += 1
            if not number % 32:
                await link.turn()
        if number <= WINDOW:
            await dissemination(link)
    else:
        parent = (root + place - (1 << (place.bit_length() - 1))) % size
        ahead = cut((data,), limit)
        arriving: deque[tuple[Awaitable[None], Buffers]] = deque(
            (link.recv_into(parent, *piece), piece) for piece in islice(ahead, WINDOW)
        )
        await dissemination(link)
        while arriving:
            receive, piece = arriving.popleft()
            await receive
            following = next(ahead, None)
            if following is not None:
                arriving.append((link.recv_into(parent, *following), following))
            if len(leaving) == WINDOW:
                await _all(leaving.popleft())
            leaving.append([link.send(child, *piece) for child in children])
            number += 1
            if not number % 32:
                await link.turn()
    for sends in leaving:
        await _all(sends)


async def _all(awaitables: list[Awaitable[None]]) -> None:
    for awaitable in awaitables:
        await awaitable


async def scatter_all_gather(
    link: Link, root: int, out: memoryview, source: memoryview | None = None
) -> None:
    """The root gives each rank one part of the tensor, and a ring all-gather spreads the parts.

    Each rank sends and receives about the tensor's bytes once, whatever the size, where a tree's root
    sends them log2(size) times. Arguments as for `binomial`.

    Source: van de Geijn, "On global combine operations" (1994); Barnett et al. (1994). The scatter is
    direct instead of by a tree: it carries the same bytes from the root and stores none on the way.
    """
    rank, size = link.rank, link.size
    length = -(-len(out) // size)
    length += -length % 64  # so that parts start at cache lines
    lengths = [max(min(length, len(out) - part * length), 0) for part in range(size)]
    blocks = split(out, lengths)
    limit = message_limit(link)
    pending: list[Awaitable[None]] = []
    if rank == root:
        parts = blocks if source is None else split(source, lengths)
        others = [(root + place) % size for place in range(1, size)]
        if length <= limit:
            pending = [link.send(peer, parts[peer], lane=1) for peer in others]
        else:
            await stream(
                link,
                ((peer, None, peer, piece) for peer in others for piece in cut((parts[peer],), limit)),
                lane=1,
            )
        if source is not None:
            await copy_all(link, blocks[rank], parts[rank])
    else:
        await stream(link, ((root, piece, root, None) for piece in cut((blocks[rank],), limit)), lane=1)
    await ring_blocks(link, blocks)
    await _all(pending)


async def broadcast_bytes(link: Link, root: int, data: memoryview, largest: int) -> memoryview:
    """The tree of `binomial` for bytes whose number only the root knows.

    Args:
        link: the group.
        root: the rank that has the bytes.
        data: them, on the root; not looked at elsewhere.
        largest: how many there may be.

    Raises:
        ProtocolError: more than `largest` are announced.
    """
    rank, size = link.rank, link.size
    place = (rank - root) % size
    distance = 1
    while distance < size:
        source, to = (rank - distance) % size, (rank + distance) % size
        sent = DONE
        if place < distance and place + distance < size:
            await send_bytes(link, to, data)
        else:
            sent = link.send(to, EMPTY)
        if distance <= place < 2 * distance:
            data = await receive_bytes(link, source, largest)
        else:
            await link.recv_into(source, EMPTY)
        await sent
        distance *= 2
    return data


_ALGORITHMS: Mapping[str, Callable[[Link, int, memoryview, memoryview | None], Awaitable[None]]] = {
    "binomial": binomial,
    "scatter_all_gather": scatter_all_gather,
    "shared": shared_broadcast,
}


# ---------------------------------------------------------------------- the request


@lru_cache(maxsize=4096)
def _plan(
    spec: TensorSpec,
    root: int,
    size: int,  # the choice of an algorithm depends on it
    kind: str | None,
    name: str,
    algorithm: str | None,
    max_bytes: int | None,
) -> Plan:
    dtype, shape = spec
    check_kind(name, kind, dtype)
    head = agreed("broadcast", dtype, shape, algorithm, max_bytes, (("root", root),))
    return Plan("broadcast", nbytes_of(dtype, shape), spec, head, root=root)


class Broadcast(Generic[T]):
    """Give every rank a copy of the root's tensor.

    Args:
        value: ``[…]`` of any shape and dtype, a scalar too; only read. Elsewhere than on the root it gives
            shape, dtype, kind and device, which have to be the root's.
        root: the rank whose tensor it is.
        out: a tensor of that shape and dtype to fill and return instead of a fresh one.
        kind: ``"float"`` or ``"int"`` to refuse the other.
        name: the method called, for error texts.

    The result is fresh on the root as well: later changes of `value` do not reach it.
    """

    __slots__ = ("_adapter", "_kind", "_out", "_plan", "_root", "_target", "_value", "operation")

    def __init__(
        self, value: T, root: int, *, out: T | None = None, kind: str | None = None, name: str = "broadcast"
    ) -> None:
        self._value = value
        self._root = root
        self._out = out
        self._kind = kind
        self.operation = name
        self._adapter: TensorAdapter[Any]
        self._plan: Plan
        self._target: Target[Any] | None = None

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the input; see `collectives.request.Request`.

        Raises:
            TensorContractError: no such root, a dtype of the other kind, or an `out` that does not fit.
        """
        self._adapter = adapter = adapter_for_call(self._value, settings.device_memory)
        self._root = root = check_root(self.operation, self._root, size)
        spec = adapter.spec(self._value)
        self._plan = plan = _plan(
            spec, root, size, self._kind, self.operation, settings.algorithm, settings.max_bytes
        )
        if self._out is not None:
            self._target = adapter.into(self._out, spec)
        return plan.head

    async def run(self, link: Link) -> T:
        """Move the tensor; the copy."""
        adapter, plan, root = self._adapter, self._plan, self._root
        native = plan.native(link)
        target = self._target or await link.allocate(
            adapter, self._value, plan.result.shape, plan.result.dtype
        )
        out = target.buffer
        source = None
        if link.rank == root:
            source = adapter.read(self._value)
            if self._out is not None:
                source = None if same_memory(source, out) else await separate(link, source, out)
        if native is not None:
            in_place = link.rank == root and source is None
            given = out if in_place else source or EMPTY
            await native.run(link, given, out, in_place=in_place, owned=self._out is None)
        else:
            await _ALGORITHMS[plan.algorithm(link)](link, root, out, source)
        result: T = target.finish()
        return result if self._out is None else self._out
