"""Gather: equal shards from all ranks to the root."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..tensors import TensorSpec, adapter_for_call
from .gather_scatter import binomial_gather, direct_gather
from .messages import (
    EMPTY,
    same_memory,
    separate,
)
from .movement import Plan, agreed, check_leading_axis, check_root, nbytes_of

if TYPE_CHECKING:
    from ..tensors import Target, TensorAdapter
    from .operation import Link, Settings

__all__ = ["Gather"]

T = TypeVar("T")


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
        self._adapter = adapter = adapter_for_call(self._value, settings.device_memory)
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
        target = self._target or await link.allocate(
            adapter, self._value, plan.result.shape, plan.result.dtype
        )
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
