"""What all reducing requests share: the plan of a call, its checks, and a few tools for local work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..errors import TensorContractError
from ..tensors import TensorSpec, check_operator, reducer
from ..transport.provider import NativeCall
from .request import fingerprint
from .selector import choose

if TYPE_CHECKING:
    from ..tensors import Reducer
    from ..transport.base import Capabilities
    from .native import Native
    from .operation import Link, Settings

__all__ = [
    "Algorithm",
    "Plan",
    "combine_all",
    "load_all",
    "plan_of",
    "reduce_all",
    "store_all",
]

#: Bytes of operands read between two turns of the event loop: about a quarter of a millisecond.
_WORK = 1024 * 1024
#: The same where elements are converted on the way, as those of half precision are.
_WORK_HALF = 64 * 1024

#: ``(link, reducer, source, out) -> None``, each view contiguous bytes.
Algorithm = Callable[["Link", "Reducer", memoryview, memoryview], Awaitable[None]]


# ---------------------------------------------------------------------- plans


class Plan:
    """What a call comes to: everything that depends on its arguments' form and not on their values.

    Made once per form and group size, then looked up: a small call pays for a dictionary access
    instead of checks, fingerprint and choice of algorithm.

    Attributes:
        operation: the canonical name, such as ``"all_reduce"``.
        reducer: the arithmetic.
        nbytes: bytes of this rank's input.
        result: dtype and shape of the result, the axis `dim` in front.
        head: the encoded fingerprint.
        exact: whether sums are in the documented order.
        root: the group rank, where the operation has one.
    """

    __slots__ = ("_choice", "exact", "head", "nbytes", "operation", "reducer", "result", "root")

    def __init__(
        self,
        operation: str,
        reducer: Reducer,
        nbytes: int,
        result: TensorSpec,
        head: bytes,
        exact: bool,
        root: int | None = None,
    ) -> None:
        self.operation = operation
        self.reducer = reducer
        self.nbytes = nbytes
        self.result = result
        self.head = head
        self.exact = exact
        self.root = root
        # Communicators over different transports share plans, so the choice remembers for whom it was.
        self._choice: tuple[Capabilities | None, str] = (None, "")

    def algorithm(self, link: Link) -> str:
        """The name of the algorithm for this call over `link`."""
        capabilities, name = self._choice
        if capabilities is not link.capabilities:
            name = choose(
                self.operation,
                self.nbytes,
                link.size,
                link.capabilities,
                link.settings,
                exact=self.exact,
                widens=self.reducer.widens,
                providers=link.providers,
            ).algorithm
            self._choice = (link.capabilities, name)
        return name

    def native(self, link: Link) -> Native | None:
        """This call's turn where a provider runs it; see `Link.native`."""
        if not link.providers or not self.nbytes:
            return None
        arithmetic = self.reducer
        call = NativeCall(
            self.operation, link.size, arithmetic.dtype, self.nbytes, arithmetic.operator, self.root
        )
        return link.native(call, self.exact)


def plan_of(
    operation: str,
    name: str,
    operator: str,
    spec: TensorSpec,
    size: int,
    order: str | None,
    settings: Settings,
    dim: int | None = None,
    detail: tuple[tuple[str, Any], ...] = (),
) -> Plan:
    """Look up, or check and make, the plan of a call.

    Args:
        operation: the canonical name.
        name: the method that was called, for error texts.
        operator: one of `ruda_async.tensors.OPERATORS`.
        spec: dtype and shape of the input.
        size: the number of ranks.
        order: ``"exact"``, ``"any"`` or None for what the settings say.
        settings: the communicator's.
        dim: the axis that is cut into shards, or None where nothing is.
        detail: further arguments that ranks must agree on.

    Raises:
        TensorContractError: operator and dtype do not go together, `order` is unknown, the axis cannot be
            cut into `size` shards, or one element exceeds the byte budget.
    """
    if type(operator) is not str:
        raise TensorContractError(f"{name}: the operator is a string such as 'sum', not {operator!r}")
    if order is None:
        order = settings.order
    elif order != "exact" and order != "any":
        raise TensorContractError(f"{name}: order is 'exact' or 'any', not {order!r}")
    return _plan(
        operation, name, operator, spec, size, order, settings.algorithm, settings.max_bytes, dim, detail
    )


@lru_cache(maxsize=4096)
def _plan(
    operation: str,
    name: str,
    operator: str,
    spec: TensorSpec,
    size: int,
    order: str,
    algorithm: str | None,
    max_bytes: int | None,
    dim: int | None,
    detail: tuple[tuple[str, Any], ...],
) -> Plan:
    check_operator(operator, spec.dtype)
    arithmetic = reducer(spec.dtype, operator, size)
    if max_bytes is not None and max_bytes < arithmetic.itemsize:
        raise TensorContractError(
            f"{name}: one element of {spec.dtype} has {arithmetic.itemsize} bytes, more than the budget of "
            f"max_bytes={max_bytes}; use bounded({arithmetic.itemsize}) or more"
        )
    result = spec if dim is None else _shard(name, spec, dim, size)
    agreed: list[tuple[str, Any]] = [("operator", operator), *detail]
    if dim and dim % len(spec.shape):
        agreed.append(("dim", dim % len(spec.shape)))
    if order != "exact":
        agreed.append(("order", order))
    if algorithm is not None:
        agreed.append(("algorithm", algorithm))
    if max_bytes is not None:
        agreed.append(("max_bytes", max_bytes))
    nbytes = arithmetic.itemsize
    for length in spec.shape:
        nbytes *= length
    head = fingerprint(operation, spec.dtype, spec.shape, tuple(agreed))
    return Plan(operation, arithmetic, nbytes, result, head, order == "exact", dict(detail).get("root"))


def _shard(name: str, spec: TensorSpec, dim: int, size: int) -> TensorSpec:
    """The shape of one of `size` shards along axis `dim`, that axis in front."""
    shape = spec.shape
    if not shape:
        raise TensorContractError(
            f"{name} cuts the leading axis into shards and a scalar has none; use all_reduce, or pass a "
            "tensor of at least one axis"
        )
    if not -len(shape) <= dim < len(shape):
        raise TensorContractError(f"{name}: dim={dim} is not an axis of shape {list(shape)}")
    length = shape[dim]
    if length % size:
        axis_name = "leading axis" if dim == 0 else f"axis {dim}"
        raise TensorContractError(
            f"{name}: the {axis_name} of shape {list(shape)} has length {length}, which world size {size} "
            f"does not divide; pad it to {length + size - length % size}, or use all_reduce and keep a part"
        )
    axis = dim % len(shape)
    return TensorSpec(spec.dtype, (length // size, *shape[:axis], *shape[axis + 1 :]))


# ---------------------------------------------------------------------- local work, in loop-friendly blocks


def _step(itemsize: int, operands: int, converts: bool) -> int:
    """Bytes of a result that one turn of the event loop may compute; whole elements."""
    work = _WORK_HALF if converts else _WORK
    return max(work // operands // itemsize, 1) * itemsize


def _is_half(reducer: Reducer) -> bool:
    return reducer.dtype == "float16" or reducer.dtype == "bfloat16"


async def reduce_all(link: Link, reducer: Reducer, out: memoryview, raws: Sequence[memoryview]) -> None:
    """`Reducer.reduce` of whole inputs, block by block."""
    step = _step(reducer.itemsize, len(raws), _is_half(reducer))
    if len(out) <= step or type(out) is not memoryview:  # a device computes while the loop goes on
        reducer.reduce(out, raws)
        return
    for at in range(0, len(out), step):
        if at:
            await link.turn()
        reducer.reduce(out[at : at + step], [raw[at : at + step] for raw in raws])


async def combine_all(link: Link, reducer: Reducer, out: memoryview, a: memoryview, b: memoryview) -> None:
    """`Reducer.combine` of partial results, block by block; `out` may be `a` or `b`."""
    step = _step(reducer.partial_itemsize, 2, _is_half(reducer) and not reducer.widens)
    if len(out) <= step or type(out) is not memoryview:
        reducer.combine(out, a, b)
        return
    for at in range(0, len(out), step):
        if at:
            await link.turn()
        end = at + step
        reducer.combine(out[at:end], a[at:end], b[at:end])


async def load_all(link: Link, reducer: Reducer, partial: memoryview, raw: memoryview) -> None:
    """`Reducer.load`, block by block."""
    wide, itemsize = reducer.partial_itemsize, reducer.itemsize
    count = len(raw) // itemsize
    step = _step(itemsize, 2, _is_half(reducer)) // itemsize
    if count > step and type(raw) is not memoryview:
        step = count
    for at in range(0, count, step):
        if at:
            await link.turn()
        end = at + step
        reducer.load(partial[at * wide : end * wide], raw[at * itemsize : end * itemsize])


async def store_all(link: Link, reducer: Reducer, out: memoryview, partial: memoryview) -> None:
    """Turn a finished partial result into `out`, block by block.

    Where partial results are of the elements' own dtype, `partial` is `out`.
    """
    itemsize, wide = reducer.itemsize, reducer.partial_itemsize
    step = _step(itemsize, 2, _is_half(reducer)) // itemsize
    if not reducer.widens and reducer.operator != "mean":
        return
    count = len(out) // itemsize
    if count > step and type(out) is not memoryview:
        step = count
    for at in range(0, count, step):
        if at:
            await link.turn()
        end = at + step
        if reducer.widens:
            reducer.store(out[at * itemsize : end * itemsize], partial[at * wide : end * wide])
        else:
            reducer.finish_inplace(out[at * itemsize : end * itemsize])
