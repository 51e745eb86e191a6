"""The even all-to-all: every rank has one equal block for every rank."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from ..errors import TensorContractError
from ..tensors import TensorSpec, adapter_for_call, as_view, device_memory, dtype_of
from .messages import pairwise as exchange_pairwise
from .messages import scratch, separate, split, swap
from .movement import Plan, agreed, axis_of, check_leading_axis, nbytes_of
from .shared_copy import shared_exchange

if TYPE_CHECKING:
    from ..tensors import Target, TensorAdapter
    from .operation import Link, Settings

__all__ = ["AllToAll", "bruck", "pairwise"]

T = TypeVar("T")

#: Bytes transposed between two turns of the event loop: strided copies are several times slower than plain.
_WORK = 128 * 1024
#: An integer of each size that a dtype's elements may have, so that numpy moves them as they are.
_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


# ---------------------------------------------------------------------- algorithms


async def pairwise(link: Link, source: memoryview, out: memoryview) -> None:
    """Send every block straight to its rank: size - 1 messages a rank, each of one block.

    In step *i* rank *r* sends to ``r + i`` and receives from ``r - i``; several steps are under way at once,
    but not more, since 63 large messages at once would only wait for each other.

    Args:
        link: the group.
        source: the blocks in destination order.
        out: memory for the blocks in source order.

    Source: Thakur, Rabenseifner & Gropp (2005), section 4.4.
    """
    rank, size = link.rank, link.size
    lengths = [len(out) // size] * size
    outgoing, incoming = split(source, lengths), split(out, lengths)
    await exchange_pairwise(link, outgoing, incoming, (incoming[rank], outgoing[rank]))


async def bruck(link: Link, source: memoryview, out: memoryview) -> None:
    """Let blocks travel together: ceil(log2 size) messages a rank, each of about half of all blocks.

    The block for the rank *d* places on takes the steps of *d* written in binary. For many ranks and small
    blocks, where messages cost more than bytes. Arguments as for `pairwise`.

    Source: Bruck, Ho, Kipnis, Upfal & Weathersby (1997).
    """
    rank, size = link.rank, link.size
    nbytes = len(out) // size
    if type(source) is not memoryview:
        await _device_bruck(link, source, out)
        return
    order = (rank + np.arange(size)) % size
    blocks = np.frombuffer(source, np.uint8).reshape(size, nbytes)[order]
    distance = 1
    while distance < size:
        moving = _moving(size, distance)
        leaving = blocks[moving]
        arriving = np.empty_like(leaving)
        await swap(
            link,
            (rank + distance) % size,
            (leaving.reshape(-1).data,),
            (rank - distance) % size,
            (arriving.reshape(-1).data,),
        )
        blocks[moving] = arriving
        distance *= 2
    # Block d came from the rank d places back.
    np.frombuffer(out, np.uint8).reshape(size, nbytes)[(rank - np.arange(size)) % size] = blocks


async def _device_bruck(link: Link, source: memoryview, out: memoryview) -> None:
    """The same messages from and to memory that numpy does not see: blocks are packed one by one."""
    rank, size = link.rank, link.size
    nbytes = len(out) // size
    theirs = split(source, [nbytes] * size)
    blocks = [theirs[(rank + distance) % size] for distance in range(size)]
    distance = 1
    while distance < size:
        moving = _moving(size, distance).tolist()
        leaving, arriving = (scratch(len(moving) * nbytes, source) for _ in range(2))
        for place, block in zip(split(leaving, [nbytes] * len(moving)), moving, strict=True):
            place[:] = blocks[block]
        await swap(link, (rank + distance) % size, (leaving,), (rank - distance) % size, (arriving,))
        for block, arrived in zip(moving, split(arriving, [nbytes] * len(moving)), strict=True):
            blocks[block] = arrived
        distance *= 2
    for distance, place in enumerate(split(out, [nbytes] * size)):
        place[:] = blocks[(rank - distance) % size]


@lru_cache(maxsize=1024)
def _moving(size: int, distance: int) -> np.ndarray[Any, Any]:
    """The blocks that move in the step of `distance`: those with that bit in their own distance."""
    return np.flatnonzero(np.arange(size) & distance)


# ---------------------------------------------------------------------- axes


async def _arrange(
    link: Link, source: memoryview, spec: TensorSpec, split_dim: int, concat_dim: int
) -> memoryview:
    """The blocks along `split_dim` one after the other, each with the axis `concat_dim` in front."""
    dtype, shape = spec
    if not len(source):
        return source
    size = link.size
    parts = (*shape[:split_dim], size, shape[split_dim] // size, *shape[split_dim + 1 :])
    front = (split_dim, concat_dim if concat_dim < split_dim else concat_dim + 1)
    axes = (*front, *(axis for axis in range(len(parts)) if axis not in front))
    memory = device_memory(source)
    if memory is not None:
        return as_view(memory.transposed(dtype_of(dtype).itemsize, parts, axes))
    elements = np.frombuffer(source, _CARRIERS[dtype_of(dtype).itemsize]).reshape(parts).transpose(axes)
    arranged = np.empty(elements.shape, elements.dtype)
    for part, (to, piece) in enumerate(_pieces(arranged, elements)):
        if part:
            await link.turn()
        to[...] = piece
    return arranged.reshape(-1).view(np.uint8).data


def _pieces(
    to: np.ndarray[Any, Any], source: np.ndarray[Any, Any]
) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Two arrays of one shape as pairs of parts that are copied in well under a millisecond."""
    if to.nbytes <= _WORK or not to.ndim:
        yield to, source
        return
    step = max(_WORK * len(to) // to.nbytes, 1)
    for at in range(0, len(to), step):
        if step == 1:
            yield from _pieces(to[at], source[at])
        else:
            yield to[at : at + step], source[at : at + step]


_ALGORITHMS: Mapping[str, Callable[[Link, memoryview, memoryview], Awaitable[None]]] = {
    "bruck": bruck,
    "pairwise": pairwise,
    "shared": shared_exchange,
}


# ---------------------------------------------------------------------- the request


@lru_cache(maxsize=4096)
def _plan(
    spec: TensorSpec,
    size: int,
    split_dim: int,
    concat_dim: int,
    name: str,
    algorithm: str | None,
    max_bytes: int | None,
) -> Plan:
    dtype, shape = spec
    check_leading_axis(name, shape)
    split_axis = axis_of(name, "split_dim", split_dim, shape)
    concat_axis = axis_of(name, "concat_dim", concat_dim, shape)
    length = shape[split_axis]
    if length % size:
        axis = "leading axis" if split_axis == 0 else f"axis {split_axis}"
        raise TensorContractError(
            f"{name}: the {axis} of shape {list(shape)} has length {length}, which the world size {size} "
            f"does not divide; pad it to {length + size - length % size}, or use all_to_all_v"
        )
    joined = list(shape)
    joined[split_axis] //= size
    joined[concat_axis] *= size
    result = TensorSpec(dtype, (joined.pop(concat_axis), *joined))
    detail: tuple[tuple[str, Any], ...] = ()
    if split_axis or concat_axis:
        detail = (("split_dim", split_axis), ("concat_dim", concat_axis))
    head = agreed("all_to_all", dtype, shape, algorithm, max_bytes, detail)
    return Plan("all_to_all", nbytes_of(dtype, shape), result, head)


class AllToAll(Generic[T]):
    """Send every rank one equal block, and receive one from each.

    Args:
        value: a tensor of any dtype, whose axis `split_dim` has a length that `size` divides; only read.
            Block *r* along that axis goes to rank *r*.
        split_dim, concat_dim: the axis that is cut and the one along which what arrives is joined, in
            source order; negative ones count from the end.
        out: a tensor of the result's shape and dtype to fill and return instead of a fresh one.
        name: the method called, for error texts.

    The result has `split_dim` divided by `size` and then `concat_dim` multiplied by it, so with the
    defaults the shape stays. Joined along another than the leading axis, it is a transposed view of fresh
    memory.
    """

    __slots__ = (
        "_adapter",
        "_concat",
        "_out",
        "_plan",
        "_spec",
        "_split",
        "_target",
        "_value",
        "operation",
    )

    def __init__(
        self,
        value: T,
        *,
        split_dim: int = 0,
        concat_dim: int = 0,
        out: T | None = None,
        name: str = "all_to_all",
    ) -> None:
        self._value = value
        self._split = split_dim
        self._concat = concat_dim
        self._out = out
        self.operation = name
        self._adapter: TensorAdapter[Any]
        self._plan: Plan
        self._spec: TensorSpec
        self._target: Target[Any] | None = None

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the input; see `collectives.request.Request`.

        Raises:
            TensorContractError: a scalar, no such axis, an axis that `size` does not divide, or an `out`
                that does not fit.
        """
        name = self.operation
        self._adapter = adapter = adapter_for_call(self._value, settings.device_memory)
        self._spec = spec = adapter.spec(self._value)
        if type(self._split) is not int or type(self._concat) is not int:
            check_leading_axis(name, spec.shape)
            self._split = axis_of(name, "split_dim", self._split, spec.shape)
            self._concat = axis_of(name, "concat_dim", self._concat, spec.shape)
        self._plan = plan = _plan(
            spec, size, self._split, self._concat, name, settings.algorithm, settings.max_bytes
        )
        self._split %= len(spec.shape)
        self._concat %= len(spec.shape)
        if self._out is not None:
            out = adapter.movedim(self._out, self._concat, 0) if self._concat else self._out
            self._target = adapter.into(out, plan.result)
        return plan.head

    async def run(self, link: Link) -> T:
        """Move the blocks; the result."""
        adapter, plan, value = self._adapter, self._plan, self._value
        native = plan.native(link)
        cut_at, join_at = self._split, self._concat
        if cut_at == join_at:
            source = adapter.read(adapter.movedim(value, cut_at, 0) if cut_at else value)
        else:
            source = await _arrange(link, adapter.read(value), self._spec, cut_at, join_at)
        target = self._target or await link.allocate(adapter, value, plan.result.shape, plan.result.dtype)
        if self._out is not None:
            source = await separate(link, source, target.buffer)
        if native is not None:
            await native.run(link, source, target.buffer, owned=self._out is None)
        else:
            algorithm = plan.algorithm(link) if len(source) else "pairwise"
            await _ALGORITHMS[algorithm](link, source, target.buffer)
        result: T = target.finish()
        if self._out is not None:
            return self._out
        return adapter.movedim(result, 0, join_at) if join_at else result
