"""The uneven all-to-all: rows go to their ranks, as many to each as the caller says.

What sharded experts do in every layer, mostly with small tensors: so there is one round, one message a
pair, and no exchange of counts, since a message's length tells its rows.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import ProtocolError, TensorContractError
from ..tensors import TensorSpec, adapter_for, adapter_for_call
from ..traits import VariableTensorExchange
from . import hierarchical
from .messages import (
    UNLIMITED,
    Placing,
    copy_all,
    message_limit,
    pairwise,
    peers,
    scratch,
    separate,
    split,
    uneven,
)
from .movement import Plan, agreed, check_kind, check_leading_axis, nbytes_of
from .shared_copy import shared_uneven

if TYPE_CHECKING:
    from ..tensors import Target, TensorAdapter
    from .operation import Link, Settings

__all__ = ["AllToAllV", "check_counts", "check_rows", "rows_into"]

T = TypeVar("T")

#: What ranks tell each other before bounded rounds: bytes for the receiver, and the sender's rounds.
_NOTICE = Struct("<QQ")


# ---------------------------------------------------------------------- algorithm


async def rounds(
    link: Link,
    outgoing: Sequence[memoryview],
    unit: int,
    place: Placing,
    limit: int,
) -> None:
    """The exchange of `messages.uneven` in rounds of at most `limit` bytes a message, whole rows each.

    Ranks first tell each other the lengths of their blocks and how many rounds they need; the largest
    number holds, and every rank takes part in every round, with empty messages once it has nothing left.
    """
    rank, size = link.rank, link.size
    step = limit // unit * unit
    needed = max((-(-len(outgoing[peer]) // step) for peer in peers(rank, size)), default=0)
    notices = [memoryview(_NOTICE.pack(len(block), needed)) for block in outgoing]
    answers = [scratch(_NOTICE.size) for _ in range(size)]
    await pairwise(link, notices, answers)
    lengths = [0] * size
    for peer, answer in enumerate(answers):
        if peer == rank:
            lengths[peer] = len(outgoing[peer])
            continue
        lengths[peer], theirs = _NOTICE.unpack(answer)
        if lengths[peer] % unit or theirs * step < lengths[peer]:
            raise ProtocolError(
                f"rank {peer} announced {lengths[peer]} bytes in {theirs} rounds to rank {rank}, which does "
                f"not fit rows of {unit} bytes; see that all ranks run the same version",
                rank=peer,
            )
        needed = max(needed, theirs)
    blocks = split(await place(lengths), lengths)
    await copy_all(link, blocks[rank], outgoing[rank])
    for at in range(0, needed * step, step):
        end = at + step
        await pairwise(link, [block[at:end] for block in outgoing], [block[at:end] for block in blocks])
        await link.turn()


# ---------------------------------------------------------------------- checks


def check_counts(name: str, send_counts: Any, size: int, rows: int) -> tuple[int, ...]:
    """`send_counts` as a tuple of `size` row counts that sum to `rows`.

    Args:
        name: the method called, for error texts.
        send_counts: ints in a sequence, a 1-D integer array or tensor.
        size: the number of ranks.
        rows: the length of the leading axis.

    Raises:
        TensorContractError: anything else; the text names the counts.
    """
    counts = send_counts.tolist() if hasattr(send_counts, "tolist") else send_counts
    try:
        counts = tuple(counts)
    except TypeError:
        raise TensorContractError(
            f"{name}: send_counts is a sequence of {size} row counts, one for each rank, not {send_counts!r}"
        ) from None
    if set(map(type, counts)) != {int}:
        counts = tuple(_count(name, count, send_counts) for count in counts)
    if len(counts) != size:
        raise TensorContractError(
            f"{name}: send_counts={_short(counts)} has {len(counts)} entries for {size} ranks; give one "
            "count of rows for each rank, 0 for none"
        )
    if min(counts) < 0:
        raise TensorContractError(
            f"{name}: send_counts={_short(counts)} has a negative count ({min(counts)} for rank "
            f"{counts.index(min(counts))}); counts are rows, 0 for none"
        )
    if sum(counts) != rows:
        raise TensorContractError(
            f"{name}: send_counts={_short(counts)} sum to {sum(counts)} and the tensor has {rows} rows; "
            "counts are rows of the leading axis (not bytes or elements), and every row has to go somewhere"
        )
    return counts


def _count(name: str, count: Any, counts: Any) -> int:
    """One entry that is not a plain int: a numpy integer, or an error."""
    if isinstance(count, bool) or not hasattr(count, "__index__"):
        raise TensorContractError(
            f"{name}: send_counts has {count!r} ({type(count).__name__}) in it; counts are whole numbers of "
            f"rows, so convert with int() (all counts: {_short(counts)})"
        )
    return int(count.__index__())


def _short(counts: Any) -> str:
    text = repr(list(counts) if isinstance(counts, tuple) else counts)
    return text if len(text) <= 200 else f"{text[:200]}…"


def check_rows(name: str, spec: TensorSpec) -> int:
    """Bytes of one row of the leading axis.

    Raises:
        TensorContractError: there is no leading axis, or rows are empty.
    """
    check_leading_axis(name, spec.shape)
    trailing = spec.shape[1:]
    if 0 in trailing:
        raise TensorContractError(
            f"{name}: shape {list(spec.shape)} has a trailing axis of length 0, so its rows have no bytes to "
            "count; trailing axes are at least 1"
        )
    return nbytes_of(spec.dtype, trailing)


def rows_into(name: str, adapter: TensorAdapter[Any], out: Any, spec: TensorSpec) -> Target[Any]:
    """Where to write a result of `spec`'s dtype and trailing shape and a length that is not known yet.

    Raises:
        TensorContractError: `out` differs in more than its length, or cannot be written.
    """
    theirs = adapter_for(out).spec(out)
    length = theirs.shape[0] if theirs.shape else 0
    return adapter.into(out, TensorSpec(spec.dtype, (length, *spec.shape[1:])))


class Rows(Generic[T]):
    """The result of a variable exchange in the making.

    Attributes:
        counts: rows from each rank, once `place` was called.
    """

    __slots__ = ("_adapter", "_like", "_link", "_name", "_out", "_spec", "_target", "_unit", "counts")

    def __init__(
        self,
        link: Link,
        name: str,
        adapter: TensorAdapter[T],
        like: T,
        spec: TensorSpec,
        unit: int,
        out: T | None,
        target: Target[T] | None,
    ) -> None:
        self._link = link
        self._name = name
        self._adapter = adapter
        self._like = like
        self._spec = spec
        self._unit = unit
        self._out = out
        self._target = target
        self.counts: tuple[int, ...] = ()

    async def place(self, lengths: list[int]) -> memoryview:
        """Memory for blocks of `lengths` bytes, one from each rank.

        Raises:
            TensorContractError: `out` has another length.
        """
        unit = self._unit
        self.counts = counts = tuple([length // unit for length in lengths])
        shape = (sum(counts), *self._spec.shape[1:])
        if self._target is None:
            self._target = await self._link.allocate(self._adapter, self._like, shape, self._spec.dtype)
        elif len(self._target.buffer) != sum(lengths):
            raise TensorContractError(
                f"{self._name}: out has {len(self._target.buffer) // unit} rows and {shape[0]} were received "
                f"({_short(counts)} from the ranks in turn); give out the shape {list(shape)}, or leave it"
            )
        return self._target.buffer

    def finish(self) -> VariableTensorExchange[T]:
        """The filled result."""
        assert self._target is not None
        value = self._target.finish()
        return VariableTensorExchange(value if self._out is None else self._out, self.counts)


_ALGORITHMS: Mapping[str, Callable[[Link, Sequence[memoryview], int, Placing], Awaitable[None]]] = {
    "hierarchical": hierarchical.all_to_all_v,
    "pairwise": uneven,
    "shared": shared_uneven,
}


# ---------------------------------------------------------------------- the request


@lru_cache(maxsize=4096)
def _plan(
    dtype: str,
    trailing: tuple[int, ...],
    kind: str | None,
    name: str,
    algorithm: str | None,
    max_bytes: int | None,
    purpose: str,
) -> Plan:
    check_kind(name, kind, dtype)
    spec = TensorSpec(dtype, (0, *trailing))
    unit = check_rows(name, spec)
    if max_bytes is not None and unit > max_bytes:
        raise TensorContractError(
            f"{name}: one row of {dtype} {list(trailing)} has {unit} bytes, more than the budget of "
            f"max_bytes={max_bytes}, and rows travel whole; use bounded({unit}) or more"
        )
    detail = (("purpose", purpose),) if purpose else ()
    head = agreed("all_to_all_v", dtype, trailing, algorithm, max_bytes, detail)
    return Plan("all_to_all_v", unit, spec, head, unit)


class AllToAllV(Generic[T]):
    """Send each rank its rows, as many as `send_counts` says, and receive what the others send here.

    Args:
        value: ``[sum(send_counts), …]`` of any dtype, rows in the order of their destinations; only read.
            Trailing axes are at least 1 and, with the dtype, the same on all ranks.
        send_counts: rows for each rank: ints, or a 1-D integer array or tensor.
        out: a tensor to fill and return instead of a fresh one. It must have exactly the received shape;
            that its length is wrong is known only when the rows are there, and then fails the call here
            and on the ranks that are not done yet.
        kind: ``"float"`` or ``"int"`` to refuse the other.
        name: the method called, for error texts.
        purpose: what the exchange is for, where ranks that are one call apart must not pair; the same on all.

    The result is ``VariableTensorExchange([sum(receive_counts), …], receive_counts)``, rows in the order
    of their sources. Every rank enters, with zero rows too.

    Within a byte budget (`Settings.max_bytes`) messages are of whole rows and go straight to their ranks, and
    all ranks join all rounds.

    The exchange is the pairwise one of Thakur, Rabenseifner & Gropp (2005), with all steps under way at
    once.
    """

    __slots__ = (
        "_adapter",
        "_counts",
        "_kind",
        "_out",
        "_plan",
        "_purpose",
        "_target",
        "_value",
        "operation",
    )

    def __init__(
        self,
        value: T,
        send_counts: Sequence[int],
        *,
        out: T | None = None,
        kind: str | None = None,
        name: str = "all_to_all_v",
        purpose: str = "",
    ) -> None:
        self._value = value
        self._counts = send_counts
        self._out = out
        self._kind = kind
        self._purpose = purpose
        self.operation = name
        self._adapter: TensorAdapter[T]
        self._plan: Plan
        self._target: Target[T] | None = None

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check the input; see `collectives.request.Request`.

        Raises:
            TensorContractError: a scalar, empty rows, a dtype of the other kind, counts that are no counts
                or do not add up, a row larger than the byte budget, or an `out` that cannot fit.
        """
        name = self.operation
        self._adapter = adapter = adapter_for_call(self._value, settings.device_memory)
        dtype, shape = adapter.spec(self._value)
        if not shape:
            check_leading_axis(name, shape)
        self._plan = plan = _plan(
            dtype, shape[1:], self._kind, name, settings.algorithm, settings.max_bytes, self._purpose
        )
        self._counts = check_counts(name, self._counts, size, shape[0])
        if self._out is not None:
            self._target = rows_into(name, adapter, self._out, plan.result)
        return plan.head

    async def run(self, link: Link) -> VariableTensorExchange[T]:
        """Move the rows; the result."""
        adapter, plan = self._adapter, self._plan
        native = plan.native(link)
        unit = plan.unit
        source = adapter.read(self._value)
        if self._target is not None:
            source = await separate(link, source, self._target.buffer)
        outgoing = split(source, [count * unit for count in self._counts])
        rows = Rows(link, self.operation, adapter, self._value, plan.result, unit, self._out, self._target)
        limit = message_limit(link)
        algorithm = plan.algorithm(link) if limit == UNLIMITED else ""
        if native is not None:
            lengths = await native.exchange_lengths(link, [len(block) for block in outgoing], unit)
            await native.run(link, source, await rows.place(lengths), owned=self._out is None)
        elif limit == UNLIMITED:
            await _ALGORITHMS[algorithm](link, outgoing, unit, rows.place)
        elif limit < unit:
            raise TensorContractError(
                f"{self.operation}: one row has {unit} bytes, and the transport's largest message "
                f"has {limit}; cut the trailing axes"
            )
        else:
            await rounds(link, outgoing, unit, rows.place, limit)
        return rows.finish()
