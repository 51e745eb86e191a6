"""All-gather of shards whose lengths differ from rank to rank."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import ProtocolError
from ..tensors import TensorSpec, adapter_for_call
from ..traits import VariableTensorExchange
from .all_gather import bruck, ring_blocks
from .all_to_all_v import Rows, check_rows, rows_into
from .messages import (
    UNLIMITED,
    Placing,
    copy_all,
    message_limit,
    pairwise,
    scratch,
    separate,
    split,
    uneven,
)
from .movement import Plan, agreed, check_kind, check_leading_axis
from .shared_copy import shared_uneven

if TYPE_CHECKING:
    from ..tensors import Target, TensorAdapter
    from .operation import Link, Settings

__all__ = ["AllGatherV", "gather_blocks"]

T = TypeVar("T")


async def gather_blocks(link: Link, mine: memoryview, unit: int, algorithm: str, place: Placing) -> None:
    """Gather blocks whose lengths only their ranks know.

    ``"direct"``: every block goes straight to everyone, and its message's length is its length.
    ``"shared"``: the same through shared memory; see `shared_copy.shared_uneven`.
    ``"ring"``, and any algorithm within a byte budget: the lengths are gathered first, in log2(size) rounds
    (Bruck et al. 1997), then the blocks, so that all ranks cut them alike.

    Args:
        link: the group.
        mine: this rank's block.
        unit: what every length is a multiple of, in bytes.
        algorithm: ``"shared"``, ``"direct"`` or ``"ring"``.
        place: makes the memory.

    Raises:
        ProtocolError: a length is not a multiple of `unit`.
    """
    rank, size = link.rank, link.size
    if algorithm == "shared":
        await shared_uneven(link, [mine] * size, unit, place, same=True)
        return
    if algorithm == "direct" and message_limit(link) == UNLIMITED:
        await uneven(link, [mine] * size, unit, place)
        return
    table = scratch(8 * size)
    table[8 * rank : 8 * rank + 8] = len(mine).to_bytes(8, "little")
    await bruck(link, table, 8)
    lengths = [int.from_bytes(table[8 * peer : 8 * peer + 8], "little") for peer in range(size)]
    for peer, length in enumerate(lengths):
        if length % unit:
            raise ProtocolError(
                f"rank {peer} announced {length} bytes, which is no whole number of rows of {unit} bytes; "
                "see that all ranks run the same version",
                rank=peer,
            )
    blocks = split(await place(lengths), lengths)
    if algorithm == "direct":
        await pairwise(link, [mine] * size, blocks, (blocks[rank], mine))
    else:
        await copy_all(link, blocks[rank], mine)
        await ring_blocks(link, blocks)


@lru_cache(maxsize=4096)
def _plan(
    dtype: str,
    trailing: tuple[int, ...],
    size: int,  # the choice of an algorithm depends on it
    kind: str | None,
    name: str,
    algorithm: str | None,
    max_bytes: int | None,
) -> Plan:
    check_kind(name, kind, dtype)
    spec = TensorSpec(dtype, (0, *trailing))
    unit = check_rows(name, spec)
    head = agreed("all_gather_v", dtype, trailing, algorithm, max_bytes)
    return Plan("all_gather_v", unit, spec, head, unit)


class AllGatherV(Generic[T]):
    """Concatenate every rank's rows, as many as each has.

    Args:
        value: ``[n, …]`` of any dtype; only read. ``n`` may differ from rank to rank and be 0; trailing axes
            are at least 1 and, with the dtype, the same on all ranks.
        out: a tensor to fill and return instead of a fresh one. It must have exactly the received shape;
            that its length is wrong is known only when the lengths are there, and then fails the call here
            and on the ranks that are not done yet.
        kind: ``"float"`` or ``"int"`` to refuse the other.
        name: the method called, for error texts.

    The result is ``VariableTensorExchange([sum(receive_counts), …], receive_counts)`` in rank order.
    """

    __slots__ = ("_adapter", "_kind", "_out", "_plan", "_target", "_value", "operation")

    def __init__(
        self, value: T, *, out: T | None = None, kind: str | None = None, name: str = "all_gather_v"
    ) -> None:
        self._value = value
        self._out = out
        self._kind = kind
        self.operation = name
        self._adapter: TensorAdapter[Any]
        self._plan: Plan
        self._target: Target[Any] | None = None

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the input; see `collectives.request.Request`.

        Raises:
            TensorContractError: a scalar, empty rows, a dtype of the other kind, or an `out` that cannot
                fit.
        """
        name = self.operation
        self._adapter = adapter = adapter_for_call(self._value, settings.device_memory)
        dtype, shape = adapter.spec(self._value)
        check_leading_axis(name, shape)
        self._plan = plan = _plan(
            dtype, shape[1:], size, self._kind, name, settings.algorithm, settings.max_bytes
        )
        if self._out is not None:
            self._target = rows_into(name, adapter, self._out, plan.result)
        return plan.head

    async def run(self, link: Link) -> VariableTensorExchange[T]:
        """Move the rows; the result."""
        adapter, plan = self._adapter, self._plan
        native = plan.native(link)
        mine = adapter.read(self._value)
        if self._target is not None:
            mine = await separate(link, mine, self._target.buffer)
        rows: Rows[T] = Rows(
            link, self.operation, adapter, self._value, plan.result, plan.unit, self._out, self._target
        )
        if native is not None:
            lengths = await native.exchange_lengths(link, [len(mine)] * link.size, plan.unit)
            await native.run(link, mine, await rows.place(lengths), owned=self._out is None)
        else:
            await gather_blocks(link, mine, plan.unit, plan.algorithm(link), rows.place)
        return rows.finish()
