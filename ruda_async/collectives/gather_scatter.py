"""Gather and scatter: equal shards from all ranks to the root, and from the root to all.

Most ranks of these could finish without hearing from the others, so that bad input on one rank would
fail the call there alone. All algorithms here therefore end only when every rank has entered: a direct
gather by the root's answer, the rest by the messages of a dissemination barrier.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgpack
import numpy as np

from ..errors import ProtocolError, TensorContractError
from ..tensors import TensorSpec, adapter_for, dtype_of
from ..transport.provider import NativeCall
from .barrier import dissemination
from .broadcast import broadcast_bytes
from .messages import (
    EMPTY,
    WINDOW,
    Buffers,
    copy_all,
    cut,
    message_limit,
    peers,
    receive_bytes,
    same_memory,
    scratch,
    send_bytes,
    separate,
    split,
    stream,
    swap,
)
from .movement import Plan, agreed, check_leading_axis, check_root, nbytes_of
from .selector import choose

if TYPE_CHECKING:
    from ..tensors import Target, TensorAdapter
    from .operation import Link, Settings

__all__ = ["Gather", "Scatter", "binomial_gather", "binomial_scatter", "direct_gather", "direct_scatter"]

T = TypeVar("T")

#: The longest description of a tensor in bytes: a dtype's name and a shape.
_DESCRIPTION = 1024


# ---------------------------------------------------------------------- algorithms


async def direct_gather(link: Link, root: int, mine: memoryview, out: memoryview) -> None:
    """Every rank sends its shard straight to the root, which answers when it has all.

    The answer, an empty message, is how a rank learns that the others came too.

    Args:
        link: the group.
        root: the rank that gets all shards.
        mine: this rank's shard.
        out: on the root ``size * len(mine)`` bytes; not used elsewhere.
    """
    rank, size = link.rank, link.size
    limit = message_limit(link)
    nbytes = len(mine)
    if rank != root:
        answer = link.recv_into(root, EMPTY)
        await stream(link, ((root, None, root, piece) for piece in cut((mine,), limit)))
        await answer
        return
    shards = split(out, [nbytes] * size)
    others = peers(rank, size)
    if size <= WINDOW + 1 and nbytes <= limit:
        receives = [link.recv_into(peer, shards[peer]) for peer in others]
        if not same_memory(mine, shards[rank]):
            await copy_all(link, shards[rank], mine)
        for receive in receives:
            await receive
    else:
        if not same_memory(mine, shards[rank]):
            await copy_all(link, shards[rank], mine)
        await stream(
            link, ((peer, piece, peer, None) for peer in others for piece in cut((shards[peer],), limit))
        )
    answers = [link.send(peer, EMPTY) for peer in others]
    for sent in answers:
        await sent


async def direct_scatter(link: Link, root: int, source: memoryview, out: memoryview) -> None:
    """The root sends each rank its shard straight, beside a dissemination barrier.

    Args:
        link: the group.
        root: the rank that has all shards.
        source: on the root ``size * len(out)`` bytes; not used elsewhere.
        out: memory for this rank's shard.
    """
    rank, size = link.rank, link.size
    limit = message_limit(link)
    nbytes = len(out)
    if nbytes > limit or size > WINDOW + 1:
        await dissemination(link)
        if rank != root:
            await stream(link, ((root, piece, root, None) for piece in cut((out,), limit)))
            return
        shards = split(source, [nbytes] * size)
        await stream(
            link,
            ((p, None, p, piece) for p in peers(rank, size) for piece in cut((shards[p],), limit)),
        )
        if not same_memory(out, shards[rank]):
            await copy_all(link, out, shards[rank])
        return
    posted: list[Awaitable[None]]
    if rank != root:
        posted = [link.recv_into(root, out)]
    else:
        shards = split(source, [nbytes] * size)
        posted = [link.send(peer, shards[peer]) for peer in peers(rank, size)]
    await dissemination(link)
    if rank == root and not same_memory(out, shards[rank]):
        await copy_all(link, out, shards[rank])
    for awaitable in posted:
        await awaitable


def _runs(view: memoryview, nbytes: int, root: int, first: int, last: int, size: int) -> Buffers:
    """Shards `first` to `last`, counted from the root, of all shards in rank order: one run or two."""
    start, end = root + first, root + last
    if start >= size:
        start, end = start - size, end - size
    if end <= size:
        return (view[start * nbytes : end * nbytes],)
    return (view[start * nbytes : size * nbytes], view[: (end - size) * nbytes])


async def binomial_gather(link: Link, root: int, mine: memoryview, out: memoryview) -> None:
    """Collect shards up a binomial tree: ceil(log2 size) rounds, log2(size) messages to the root.

    Ranks are counted from the root; in round *k* those that are odd multiples of ``2**k`` hand what they
    collected to the rank ``2**k`` before. These are among the pairs of a dissemination barrier, so every
    other rank sends an empty message in its place, and all ranks know at the end that all came.
    Arguments as for `direct_gather`.

    Source: Thakur, Rabenseifner & Gropp (2005), section 4; Hensgen, Finkel & Manber (1988) for the pattern.
    """
    rank, size = link.rank, link.size
    nbytes = len(mine)
    place = (rank - root) % size
    # A rank collects the shards from its own up to its lowest set bit's worth; the root collects all.
    span = min(place & -place, size - place) if place else size
    if place == 0:
        own = out[rank * nbytes : (rank + 1) * nbytes]
        if not same_memory(mine, own):
            await copy_all(link, own, mine)
    elif span == 1:
        out = mine
    else:
        out = scratch(span * nbytes)
        await copy_all(link, out[:nbytes], mine)
    distance = 1
    while distance < size:
        to, source = (rank - distance) % size, (rank + distance) % size
        outgoing: Buffers = (EMPTY,)
        incoming: Buffers = (EMPTY,)
        if place & (2 * distance - 1) == distance:
            outgoing = (out,)
        elif place & (2 * distance - 1) == 0 and place + distance < size:
            end = min(place + 2 * distance, size)
            if place:
                incoming = (out[distance * nbytes : (end - place) * nbytes],)
            else:
                incoming = _runs(out, nbytes, root, distance, end, size)
        await swap(link, to, outgoing, source, incoming)
        distance *= 2


async def binomial_scatter(link: Link, root: int, source: memoryview, out: memoryview) -> None:
    """Hand shards down a binomial tree: `binomial_gather` backwards, with the distances falling.

    Arguments as for `direct_scatter`.
    """
    rank, size = link.rank, link.size
    nbytes = len(out)
    place = (rank - root) % size
    span = min(place & -place, size - place) if place else size
    rest = scratch((span - 1) * nbytes) if place else EMPTY  # shards to hand on, after this rank's own
    distance = 1 << (size - 1).bit_length() - 1 if size > 1 else 0
    while distance:
        to, sender = (rank + distance) % size, (rank - distance) % size
        outgoing: Buffers = (EMPTY,)
        incoming: Buffers = (EMPTY,)
        if place & (2 * distance - 1) == distance:
            incoming = (out, rest)
        elif place & (2 * distance - 1) == 0 and place + distance < size:
            end = min(place + 2 * distance, size)
            if place:
                outgoing = (rest[(distance - 1) * nbytes : (end - place - 1) * nbytes],)
            else:
                outgoing = _runs(source, nbytes, root, distance, end, size)
        await swap(link, to, outgoing, sender, incoming)
        distance //= 2
    if rank == root:
        own = source[rank * nbytes : (rank + 1) * nbytes]
        if not same_memory(out, own):
            await copy_all(link, out, own)


# ---------------------------------------------------------------------- gather


@lru_cache(maxsize=4096)
def _gather_plan(
    spec: TensorSpec, root: int, size: int, algorithm: str | None, max_bytes: int | None
) -> Plan:
    dtype, shape = spec
    check_leading_axis("gather", shape)
    head = agreed("gather", dtype, shape, algorithm, max_bytes, (("root", root),))
    result = TensorSpec(dtype, (size * shape[0], *shape[1:]))
    return Plan("gather", nbytes_of(dtype, shape), result, head, root=root)


class Gather(Generic[T]):
    """Concatenate every rank's equal shard on the root.

    Args:
        value: this rank's shard ``[n, …]`` of any dtype; only read.
        root: the rank that gets them.
        out: on the root, a tensor ``[size*n, …]`` to fill and return instead of a fresh one.
            Ignored elsewhere.

    The result is ``[size*n, …]`` in rank order on the root, and None elsewhere.
    """

    __slots__ = ("_adapter", "_out", "_plan", "_root", "_target", "_value")

    operation = "gather"

    def __init__(self, value: T, root: int, *, out: T | None = None) -> None:
        self._value = value
        self._root = root
        self._out = out
        self._adapter: TensorAdapter[Any]
        self._plan: Plan
        self._target: Target[Any] | None = None

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the input; see `collectives.request.Request`.

        Raises:
            TensorContractError: a scalar, no such root, or an `out` that does not fit.
        """
        self._adapter = adapter = adapter_for(self._value)
        self._root = root = check_root("gather", self._root, size)
        spec = adapter.spec(self._value)
        self._plan = plan = _gather_plan(spec, root, size, settings.algorithm, settings.max_bytes)
        if self._out is not None and rank == root:
            self._target = adapter.into(self._out, plan.result)
        return plan.head

    async def run(self, link: Link) -> T | None:
        """Move the shards; the result on the root."""
        adapter, plan, root = self._adapter, self._plan, self._root
        native = plan.native(link)
        algorithm = binomial_gather if plan.algorithm(link) == "binomial" else direct_gather
        mine = adapter.read(self._value)
        if link.rank != root:
            if native is not None:
                await native.run(link, mine, EMPTY)
            else:
                await algorithm(link, root, mine, EMPTY)
            return None
        target = self._target or link.allocate(adapter, self._value, plan.result.shape, plan.result.dtype)
        out = target.buffer
        if self._out is not None and not same_memory(mine, out[root * len(mine) : (root + 1) * len(mine)]):
            mine = await separate(link, mine, out)
        if native is not None:
            own = out[root * len(mine) : (root + 1) * len(mine)]
            in_place = self._out is not None and same_memory(mine, own)
            await native.run(link, mine, out, in_place=in_place, owned=self._out is None)
        else:
            await algorithm(link, root, mine, out)
        result: T = target.finish()
        return result if self._out is None else self._out


# ---------------------------------------------------------------------- scatter


class Scatter(Generic[T]):
    """Give every rank its equal shard of the root's tensor.

    What is scattered only the root knows, so a small description (dtype and shape) travels first; each
    rank checks it against what it was given before anybody's call can succeed.

    Args:
        value: on the root ``[size*n, …]`` of any dtype; only read. Elsewhere None, or a tensor ``[n, …]`` of
            the shape and dtype that is expected, which must then be what comes.
        root: the rank whose tensor it is.
        like: on ranks that pass no `value`: any tensor, whose kind and device the result takes. Without it
            the result is a numpy array (or of `out`'s kind).
        out: a tensor ``[n, …]`` to fill and return instead of a fresh one.

    The result is ``[n, …]``, fresh on the root as well.
    """

    __slots__ = ("_adapter", "_expected", "_like", "_out", "_root", "_shard", "_target", "_value")

    operation = "scatter"

    def __init__(self, value: T | None, root: int, *, like: T | None = None, out: T | None = None) -> None:
        self._value = value
        self._root = root
        self._like: Any = value if value is not None else like if like is not None else out
        self._out = out
        self._adapter: TensorAdapter[Any]
        self._expected: TensorSpec | None = None
        self._shard: TensorSpec
        self._target: Target[Any] | None = None

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the input; see `collectives.request.Request`.

        Raises:
            TensorContractError: no such root; on the root no tensor, a scalar, or a leading axis that `size`
                does not divide; an `out` that does not fit.
        """
        self._root = root = check_root("scatter", self._root, size)
        if self._like is None:
            if rank == root:
                raise TensorContractError(
                    "scatter: the root passes the tensor to scatter, and here value is None on the root"
                )
            self._like = np.empty(0)
        self._adapter = adapter = adapter_for(self._like)
        if rank == root:
            if self._value is None:
                raise TensorContractError(
                    "scatter: the root passes the tensor as its first argument, not as like= or out="
                )
            self._shard = _shard(adapter.spec(self._value), size)
            if self._out is not None:
                self._target = adapter.into(self._out, self._shard)
        else:
            if self._value is not None:
                self._expected = adapter.spec(self._value)
            if self._out is not None:
                expected = self._expected or adapter_for(self._out).spec(self._out)
                self._target = adapter.into(self._out, expected)
        return agreed("scatter", "", None, settings.algorithm, settings.max_bytes, (("root", root),))

    async def run(self, link: Link) -> T:
        """Move the shards; this rank's."""
        root = self._root
        # Whether shards are large is not known before the description is here, so it cannot decide.
        native = link.native(NativeCall("scatter", link.size, root=root)) if link.providers else None
        algorithm = choose(
            "scatter", 0, link.size, link.capabilities, link.settings, providers=link.providers
        ).algorithm
        binomial = algorithm == "binomial"
        await self._describe(link, binomial)
        shard = self._shard
        target = self._target or link.allocate(self._adapter, self._like, shard.shape, shard.dtype)
        out = target.buffer
        source = EMPTY
        if link.rank == root:
            source = self._adapter.read(self._value)
            own = source[root * len(out) : (root + 1) * len(out)]
            if self._out is not None and not same_memory(out, own):
                source = await separate(link, source, out)
        if native is not None and len(out):
            native.call = native.call._replace(dtype=shard.dtype, nbytes=len(out))
            in_place = link.rank == root and same_memory(out, own)
            await native.run(link, source, out, in_place=in_place, owned=self._out is None)
        else:
            await (binomial_scatter if binomial else direct_scatter)(link, root, source, out)
        result: T = target.finish()
        return result if self._out is None else self._out

    async def _describe(self, link: Link, tree: bool) -> None:
        """Let all ranks know the root's shard; then see that it is what this one expects."""
        root = self._root
        data = EMPTY
        if link.rank == root:
            data = memoryview(_description(self._shard))
        if tree:
            data = await broadcast_bytes(link, root, data, _DESCRIPTION)
        elif link.rank == root:
            for peer in peers(root, link.size):
                await send_bytes(link, peer, data)
        else:
            data = await receive_bytes(link, root, _DESCRIPTION)
        if link.rank == root:
            return
        self._shard = shard = _described(bytes(data), root)
        if self._expected is not None and self._expected != shard:
            raise TensorContractError(
                f"scatter: rank {root} scatters shards of {shard.dtype} {list(shard.shape)}, and value here "
                f"is {self._expected.dtype} {list(self._expected.shape)}; pass None, or one like the shard"
            )
        if self._out is not None and self._adapter.spec(self._out) != shard:
            self._target = self._adapter.into(self._out, shard)


@lru_cache(maxsize=4096)
def _shard(spec: TensorSpec, size: int) -> TensorSpec:
    dtype, shape = spec
    check_leading_axis("scatter", shape)
    if shape[0] % size:
        raise TensorContractError(
            f"scatter: the leading axis of shape {list(shape)} has length {shape[0]}, which the world size "
            f"{size} does not divide; pad it to {shape[0] + size - shape[0] % size}"
        )
    return TensorSpec(dtype, (shape[0] // size, *shape[1:]))


@lru_cache(maxsize=4096)
def _description(spec: TensorSpec) -> bytes:
    encoded: bytes = msgpack.packb([spec.dtype, spec.shape])
    return encoded


@lru_cache(maxsize=4096)
def _described(data: bytes, root: int) -> TensorSpec:
    """What `_description` encoded, from the network."""
    try:
        dtype, shape = msgpack.unpackb(data)
        dtype_of(dtype)
        if not shape or not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
            raise ValueError("not a shape")
        return TensorSpec(dtype, tuple(shape))
    except (ValueError, TypeError, msgpack.UnpackException):
        raise ProtocolError(
            f"rank {root} sent {len(data)} bytes that do not describe a tensor; see that all ranks run the "
            "same version",
            rank=root,
        ) from None
