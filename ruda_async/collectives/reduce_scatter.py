"""Reduce-scatter: combine equal tensors over ranks; each rank keeps one shard of the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from ..errors import TensorContractError
from ..tensors import TensorSpec, adapter_for_call, reducer_at
from .barrier import dissemination
from .messages import copy_all, message_limit, separate
from .recursive import recursive_halving
from .reduction_pipeline import even_parts, reduce_parts
from .reductions import Algorithm, Plan, plan_of
from .rings import ring_reduce_scatter
from .shared import shared_reduce_scatter

if TYPE_CHECKING:
    from ..tensors import Reducer, Target, TensorAdapter
    from .operation import Link, Settings

__all__ = ["ReduceScatter", "pairwise", "ring"]

T = TypeVar("T")


class ReduceScatter(Generic[T]):
    """One rank's call of a reduce-scatter of ``[size*n, …]``; the result is this rank's shard ``[n, …]``.

    Args:
        value: the input, of a dtype that `operator` takes; not a scalar. Only read.
        operator: ``sum mean max min prod``, or ``band bor bxor`` for integers.
        dim: the axis that is cut into shards; negative ones count from the end. For another than the
            first the result is a transposed view of fresh memory.
        out: receives the result; it may overlap `value`.
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
        dim: int = 0,
        out: T | None = None,
        order: str | None = None,
        name: str = "reduce_scatter",
    ) -> None:
        self.operation = name
        self._value = value
        self._operator = operator
        self._dim = dim
        self._out = out
        self._order = order

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the input; see `Request.prepare`."""
        value, dim = self._value, self._dim
        if type(dim) is not int:
            raise TensorContractError(f"{self.operation}: dim is an axis number, not {dim!r}")
        self._adapter = adapter = adapter_for_call(value, settings.device_memory)
        spec = adapter.spec(value)
        self._plan = plan_of(
            "reduce_scatter", self.operation, self._operator, spec, size, self._order, settings, dim
        )
        self._target = None if self._out is None else self._into(self._out, spec, size)
        return self._plan.head

    def _into(self, out: T, spec: TensorSpec, size: int) -> Target[T]:
        """The target for a given `out`, its axis `dim` in front."""
        adapter, dim = self._adapter, self._dim
        if dim:
            lengths = list(spec.shape)
            lengths[dim] //= size
            found = adapter.spec(out)
            if found.shape != tuple(lengths):
                raise TensorContractError(
                    f"{self.operation}: out has shape {list(found.shape)} and the result {lengths}"
                )
            out = adapter.movedim(out, dim, 0)
        return adapter.into(out, self._plan.result)

    async def run(self, link: Link) -> T:
        """Combine over ranks and keep a shard; see `Request.run`."""
        plan, target, adapter, dim = self._plan, self._target, self._adapter, self._dim
        native = plan.native(link)
        source = adapter.read(adapter.movedim(self._value, dim, 0) if dim else self._value)
        if target is None:
            target = await link.allocate(adapter, self._value, plan.result.shape, plan.result.dtype)
        else:
            source = await separate(link, source, target.buffer)
        reducer = plan.reducer
        if link.settings.device_memory:
            reducer = reducer_at(source, reducer)
        if link.size == 1:
            await copy_all(link, target.buffer, source)
        elif not plan.nbytes:
            await dissemination(link)
        elif native is not None:
            await native.run(link, source, target.buffer, reducer, owned=self._out is None)
        else:
            await _ALGORITHMS[plan.algorithm(link)](link, reducer, source, target.buffer)
        result = target.finish()
        if self._out is not None:
            return self._out
        return adapter.movedim(result, 0, dim) if dim else result


async def pairwise(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """Everyone sends each rank its shard, which that rank adds block by block as they come.

    (n-1)/n of the message leaves each rank; see `reduction_pipeline` for the pipeline and its sources.
    """
    parts = even_parts(len(source), reducer.itemsize, link.size)
    await reduce_parts(link, reducer, source, parts, out)


async def ring(link: Link, reducer: Reducer, source: memoryview, out: memoryview) -> None:
    """Shards gather one rank's input per step around a ring, in an order of their own.

    See `rings.ring_reduce_scatter` (Patarasuk & Yuan 2009).
    """
    if message_limit(link) < reducer.partial_itemsize:  # the ring's messages carry unrounded sums
        await pairwise(link, reducer, source, out)
        return
    parts = even_parts(len(source), reducer.itemsize, link.size)
    await ring_reduce_scatter(link, reducer, source, parts, out)


_ALGORITHMS: Mapping[str, Algorithm] = {
    "pairwise": pairwise,
    "recursive_halving": recursive_halving,
    "ring": ring,
    "shared": shared_reduce_scatter,
}
