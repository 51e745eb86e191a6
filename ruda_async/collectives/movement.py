"""What all data-moving requests share: the plan of a call and the checks of its arguments."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from ..errors import TensorContractError
from ..tensors import TensorSpec, dtype_of
from ..transport.provider import NativeCall
from .request import fingerprint
from .selector import choose

if TYPE_CHECKING:
    from ..transport.base import Capabilities
    from .native import Native
    from .operation import Link

__all__ = [
    "Plan",
    "agreed",
    "axis_of",
    "check_kind",
    "check_leading_axis",
    "check_root",
    "nbytes_of",
]


class Plan:
    """What a call comes to: everything that depends on its arguments' form and not on their values.

    Families make one per form and group size and look it up afterwards (`functools.lru_cache`), so that a
    small call pays for a dictionary access instead of checks, fingerprint and choice of algorithm.

    Attributes:
        operation: the canonical name, such as ``"all_gather"``.
        nbytes: the bytes by which the algorithm is chosen; the same on all ranks.
        result: dtype and shape of the result.
        head: the encoded fingerprint.
        unit: bytes of one row of the leading axis, where the family counts in rows.
        root: the group rank, where the family has one.
    """

    __slots__ = ("_choice", "head", "nbytes", "operation", "result", "root", "unit")

    def __init__(
        self,
        operation: str,
        nbytes: int,
        result: TensorSpec,
        head: bytes,
        unit: int = 0,
        root: int | None = None,
    ) -> None:
        self.operation = operation
        self.nbytes = nbytes
        self.result = result
        self.head = head
        self.unit = unit
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
                providers=link.providers,
            ).algorithm
            self._choice = (link.capabilities, name)
        return name

    def native(self, link: Link) -> Native | None:
        """This call's turn where a provider runs it; see `Link.native`."""
        if not link.providers or not self.nbytes:
            return None
        return link.native(
            NativeCall(self.operation, link.size, self.result.dtype, self.nbytes, root=self.root)
        )


def agreed(
    operation: str,
    dtype: str,
    shape: tuple[int, ...] | None,
    algorithm: str | None,
    max_bytes: int | None,
    detail: tuple[tuple[str, Any], ...] = (),
) -> bytes:
    """The fingerprint of a data-moving call: its arguments and the settings that shape its messages."""
    if algorithm is not None:
        detail = (*detail, ("algorithm", algorithm))
    if max_bytes is not None:
        detail = (*detail, ("max_bytes", max_bytes))
    return fingerprint(operation, dtype, shape, detail)


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a contiguous tensor."""
    return dtype_of(dtype).itemsize * prod(shape)


# ---------------------------------------------------------------------- checks


def check_kind(name: str, kind: str | None, dtype: str) -> None:
    """See that a ``*_float`` or ``*_int`` method got what it takes.

    Args:
        name: the method that was called.
        kind: ``"float"``, ``"int"`` (which includes bool) or None for either.
        dtype: the tensor's.

    Raises:
        TensorContractError: the dtype is of the other kind; the text names the method that takes it.
    """
    if kind is None:
        return
    floating = dtype_of(dtype).kind in ("float", "float8")
    if kind == "float" and not floating:
        stem = name.removesuffix("_float")
        other = stem if stem == "broadcast" else f"{stem}_int"
        raise TensorContractError(
            f"{name} takes floating tensors and this one is {dtype}; use {other}, which moves integers as "
            "their bits"
        )
    if kind == "int" and floating:
        raise TensorContractError(
            f"{name} takes integer and bool tensors and this one is {dtype}; use "
            f"{name.removesuffix('_int')}_float for floating ones"
        )


def check_leading_axis(name: str, shape: tuple[int, ...]) -> None:
    """Refuse a scalar where rows are counted.

    Raises:
        TensorContractError: the tensor is a scalar; the text says how to give it an axis.
    """
    if not shape:
        raise TensorContractError(
            f"{name} works along the leading axis and a scalar (shape []) has none; pass value.reshape(1)"
        )


def axis_of(name: str, argument: str, dim: Any, shape: tuple[int, ...]) -> int:
    """`dim` as an axis of `shape`, counted from the front.

    Raises:
        TensorContractError: it is none.
    """
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TensorContractError(f"{name}: {argument} is the number of an axis, not {dim!r}")
    axis = int(dim.__index__())
    if not -len(shape) <= axis < len(shape):
        raise TensorContractError(
            f"{name}: {argument}={axis} is not an axis of shape {list(shape)}; axes are {-len(shape)} to "
            f"{len(shape) - 1}"
        )
    return axis % len(shape)


def check_root(name: str, root: Any, size: int) -> int:
    """`root` as a rank of this group.

    Raises:
        TensorContractError: it is none.
    """
    if isinstance(root, bool) or not hasattr(root, "__index__"):
        raise TensorContractError(f"{name}: root is a rank from 0 to {size - 1}, not {root!r}")
    rank = int(root.__index__())
    if not 0 <= rank < size:
        raise TensorContractError(
            f"{name}: root={rank} is not a rank of this group; ranks are 0 to {size - 1}"
        )
    return rank
