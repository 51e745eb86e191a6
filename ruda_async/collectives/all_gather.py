"""All-gather: every rank's equal shard, on every rank, in rank order.

The algorithms work in place on the result, where this rank's shard lies already. In each of them a rank
is done only after it has heard of every other, so none needs a barrier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..tensors import TensorSpec, adapter_for_call
from . import hierarchical
from .messages import (
    WINDOW,
    Buffers,
    copy_all,
    cut,
    message_limit,
    pairwise,
    peers,
    same_memory,
    separate,
    swap,
)
from .movement import Plan, agreed, axis_of, check_kind, check_leading_axis, nbytes_of
from .shared_copy import shared_all_gather

if TYPE_CHECKING:
    from ..tensors import Target, TensorAdapter
    from .operation import Link, Settings

__all__ = ["AllGather", "bruck", "direct", "recursive_doubling", "ring", "ring_blocks"]

T = TypeVar("T")


# ---------------------------------------------------------------------- algorithms


def _shards(out: memoryview, shard_nbytes: int, size: int) -> list[memoryview]:
    return [out[rank * shard_nbytes : (rank + 1) * shard_nbytes] for rank in range(size)]


async def direct(link: Link, out: memoryview, shard_nbytes: int, mine: memoryview | None = None) -> None:
    """Send this rank's shard straight to every other rank: one round, size - 1 messages a rank.

    Args:
        link: the group.
        out: ``size * shard_nbytes`` bytes; this rank's shard lies at ``rank * shard_nbytes``.
        shard_nbytes: bytes of one rank's shard.
        mine: this rank's shard where it is not in `out` yet: it is copied there while messages move.
    """
    rank, size = link.rank, link.size
    own = out[rank * shard_nbytes : (rank + 1) * shard_nbytes]
    if size > WINDOW + 1 or shard_nbytes > message_limit(link):
        local = None if mine is None else (own, mine)
        await pairwise(link, [own if mine is None else mine] * size, _shards(out, shard_nbytes, size), local)
        return
    # What `pairwise` does too, without its lists: this is the path of the smallest calls.
    others = peers(rank, size)
    waits = [link.recv_into(peer, out[peer * shard_nbytes : (peer + 1) * shard_nbytes]) for peer in others]
    mine = own if mine is None else mine
    waits += [link.send(peer, mine) for peer in others]
    if mine is not own:
        await copy_all(link, own, mine)
    for wait in waits:
        await wait


async def ring(link: Link, out: memoryview, shard_nbytes: int) -> None:
    """Pass shards round a ring: each rank sends to the next and receives from the one before.

    size - 1 steps, in each of which every link carries one shard; arguments as for `direct`. Shards are cut
    into segments of `Capabilities.segment_bytes`, and each is passed on while the next one arrives.

    Source: the bucket algorithm of van de Geijn, "On global combine operations" (1994), and Barnett et al.,
    "Interprocessor collective communication library" (1994).
    """
    await ring_blocks(link, _shards(out, shard_nbytes, link.size))


async def ring_blocks(link: Link, blocks: Sequence[memoryview]) -> None:
    """`ring` over blocks of any lengths, which all ranks know; this rank's is filled already."""
    rank, size = link.rank, link.size
    if size == 1:
        return
    left, right = (rank - 1) % size, (rank + 1) % size
    limit = min(message_limit(link), max(link.capabilities.segment_bytes, 1))

    def arrivals() -> Iterator[tuple[Buffers, bool]]:
        """The messages from the left, and whether each is passed on: all but the right one's own block."""
        for step in range(1, size):
            for piece in cut((blocks[(rank - step) % size],), limit):
                yield piece, step < size - 1

    # The n-th message received was the n-th sent on the left, so waits are for earlier turns of the loop.
    arriving, own = arrivals(), cut((blocks[rank],), limit)
    posted: deque[tuple[Awaitable[None], Buffers, bool]] = deque()
    owed = 0  # messages in `posted` that will be passed on
    ready: deque[Buffers] = deque()
    leaving: deque[Awaitable[None]] = deque()

    async def take() -> None:
        nonlocal owed
        receive, piece, onward = posted.popleft()
        await receive
        if onward:
            owed -= 1
            ready.append(piece)

    turns = 0
    while True:
        arrival = next(arriving, None)
        if arrival is not None:
            if len(posted) == WINDOW:
                await take()
            posted.append((link.recv_into(left, *arrival[0]), *arrival))
            owed += arrival[1]
        piece = next(own, None)
        if piece is None:
            while owed and not ready:
                await take()
            if ready:
                piece = ready.popleft()
            elif arrival is None:
                break
            else:
                continue
        leaving.append(link.send(right, *piece))
        if len(leaving) > WINDOW:
            await leaving.popleft()
        turns += 1
        if not turns % 32:
            await link.turn()
    while posted:
        await take()
    for sent in leaving:
        await sent


async def recursive_doubling(link: Link, out: memoryview, shard_nbytes: int) -> None:
    """Swap all that is known with the rank whose number differs in bit *k*: log2(size) rounds.

    Arguments as for `direct`. Where the size is no power of two this is `bruck`.

    Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in MPICH"
    (2005), section 4.1.
    """
    rank, size = link.rank, link.size
    if size & (size - 1):
        await bruck(link, out, shard_nbytes)
        return
    mask = 1
    while mask < size:
        peer = rank ^ mask
        mine, theirs = (rank & -mask) * shard_nbytes, (peer & -mask) * shard_nbytes
        known = mask * shard_nbytes
        await swap(link, peer, (out[mine : mine + known],), peer, (out[theirs : theirs + known],))
        mask *= 2


async def bruck(link: Link, out: memoryview, shard_nbytes: int) -> None:
    """Pass all that is known to the rank ``2**k`` places back: ceil(log2 size) rounds for any size.

    Arguments as for `direct`. A rank knows consecutive shards from its own on, modulo the size. They lie in
    `out` in one or two runs, which is all that a message of several buffers needs: nothing is rotated.

    Source: Bruck, Ho, Kipnis, Upfal & Weathersby, "Efficient algorithms for all-to-all communications in
    multiport message-passing systems" (1997).
    """
    rank, size = link.rank, link.size

    def runs(first: int, count: int) -> Buffers:
        over = max(first + count - size, 0)
        run = out[first * shard_nbytes : (first + count - over) * shard_nbytes]
        return (run, out[: over * shard_nbytes]) if over else (run,)

    distance = 1
    while distance < size:
        count = min(distance, size - distance)
        source = (rank + distance) % size
        await swap(link, (rank - distance) % size, runs(rank, count), source, runs(source, count))
        distance *= 2


#: Those that find this rank's shard in place, by name.
_IN_PLACE = {
    "ring": ring,
    "recursive_doubling": recursive_doubling,
    "hierarchical": hierarchical.all_gather,
}


# ---------------------------------------------------------------------- the request


@lru_cache(maxsize=4096)
def _plan(
    spec: TensorSpec,
    size: int,
    dim: int,
    kind: str | None,
    name: str,
    algorithm: str | None,
    max_bytes: int | None,
) -> Plan:
    dtype, shape = spec
    check_kind(name, kind, dtype)
    check_leading_axis(name, shape)
    axis = axis_of(name, "dim", dim, shape)
    result = TensorSpec(dtype, (size * shape[axis], *shape[:axis], *shape[axis + 1 :]))
    detail = (("dim", axis),) if axis else ()
    head = agreed("all_gather", dtype, shape, algorithm, max_bytes, detail)
    return Plan("all_gather", nbytes_of(dtype, shape), result, head)


class AllGather(Generic[T]):
    """Concatenate every rank's equal shard.

    Args:
        value: this rank's shard ``[…, n, …]`` with ``n`` at axis `dim`, of any dtype; only read.
        dim: the axis along which shards are joined; negative counts from the end.
        out: a tensor ``[…, size*n, …]`` of the same dtype to fill and return instead of a fresh one.
        kind: ``"float"`` or ``"int"`` to refuse the other.
        name: the method called, for error texts.

    The result is ``[…, size*n, …]``, in rank order. Along an axis other than the leading one it is a
    transposed view of fresh memory.
    """

    __slots__ = ("_adapter", "_dim", "_kind", "_out", "_plan", "_target", "_value", "operation")

    def __init__(
        self,
        value: T,
        *,
        dim: int = 0,
        out: T | None = None,
        kind: str | None = None,
        name: str = "all_gather",
    ) -> None:
        self._value = value
        self._dim = dim
        self._out = out
        self._kind = kind
        self.operation = name
        self._adapter: TensorAdapter[Any]
        self._plan: Plan
        self._target: Target[Any] | None = None

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the input; see `collectives.request.Request`.

        Raises:
            TensorContractError: a scalar, a dtype of the other kind, no such axis, or an `out` that does
                not fit.
        """
        self._adapter = adapter = adapter_for_call(self._value, settings.device_memory)
        spec = adapter.spec(self._value)
        if type(self._dim) is not int:
            self._dim = axis_of(self.operation, "dim", self._dim, spec.shape)
        self._plan = plan = _plan(
            spec, size, self._dim, self._kind, self.operation, settings.algorithm, settings.max_bytes
        )
        if self._dim:
            self._dim %= len(spec.shape)
        if self._out is not None:
            out = self._out if not self._dim else adapter.movedim(self._out, self._dim, 0)
            self._target = adapter.into(out, plan.result)
        return plan.head

    async def run(self, link: Link) -> T:
        """Move the shards; the result."""
        adapter, plan, value, dim = self._adapter, self._plan, self._value, self._dim
        native = plan.native(link)
        source = adapter.read(adapter.movedim(value, dim, 0) if dim else value)
        target = self._target or await link.allocate(adapter, value, plan.result.shape, plan.result.dtype)
        out, nbytes = target.buffer, plan.nbytes
        own = out[link.rank * nbytes : (link.rank + 1) * nbytes]
        mine: memoryview | None = source
        if self._out is not None:
            mine = None if same_memory(source, own) else await separate(link, source, out)
        if native is not None:
            await native.run(
                link, own if mine is None else mine, out, in_place=mine is None, owned=self._out is None
            )
        elif (algorithm := plan.algorithm(link)) == "direct":
            await direct(link, out, nbytes, mine)
        elif algorithm == "shared":
            await shared_all_gather(link, out, nbytes, mine)
        else:
            if mine is not None:
                await copy_all(link, own, mine)
            await _IN_PLACE[algorithm](link, out, nbytes)
        result: T = target.finish()
        if self._out is not None:
            return self._out
        return adapter.movedim(result, 0, dim) if dim else result
