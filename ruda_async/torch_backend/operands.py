"""torch's tensors and operators as this library's calls take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ..errors import TensorContractError

__all__ = ["Pieces", "Receiver", "flat", "operator", "plain", "scaled"]

_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl

_OPERATORS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
    ReduceOp.PREMUL_SUM: "sum",
}
#: What torch's arithmetic operators mean for bool, as with NCCL: a sum is "any", a product is "all".
_BOOL_OPERATORS = {"sum": "max", "prod": "min"}
#: Operators under which a complex tensor is a pair of real ones.
_LINEAR = frozenset(("sum", "mean"))


def plain(tensor: Any) -> Tensor:
    """`tensor`'s own memory as a real tensor that autograd does not watch.

    Writing to it does not count as an in-place change, just as torch's own backends do not count: their
    writes come at a time that autograd could not order.

    Raises:
        TensorContractError: it is no tensor, or not a dense one on the CPU.
    """
    if not isinstance(tensor, Tensor):
        raise TensorContractError(f"a tensor is needed, not {type(tensor).__name__}")
    if not tensor.is_cpu:
        raise TensorContractError(
            f"a tensor on device {str(tensor.device)!r}; the backend moves CPU tensors: pass .cpu(), or take "
            "nccl for that device"
        )
    if type(tensor) is not Tensor and type(tensor).__torch_dispatch__ is _NO_DISPATCH:
        tensor = tensor.as_subclass(Tensor)
    own: Tensor = tensor.data
    return torch.view_as_real(own.resolve_conj()) if own.is_complex() else own


def flat(tensor: Any) -> Tensor:
    """`tensor`'s elements in one row; a copy where they do not lie so.

    Raises:
        TensorContractError: as `plain`.
    """
    return plain(tensor).reshape(-1)


def operator(op: Any, tensor: Any) -> tuple[str, Any]:
    """The library's name of torch's reduction `op` for `tensor`, and the factor of a PREMUL_SUM, or None.

    Raises:
        TensorContractError: the operator does not go with the tensor's dtype.
    """
    kind = getattr(op, "op", op)
    name = _OPERATORS.get(kind)
    if name is None:
        raise TensorContractError(f"the reduction {op!r} is not known; there are {', '.join(_names())}")
    dtype = getattr(tensor, "dtype", torch.float32)
    if dtype.is_complex and name not in _LINEAR:
        raise TensorContractError(
            f"the reduction {kind.name} of {dtype}; complex tensors take SUM, AVG and PREMUL_SUM"
        )
    if dtype is torch.bool:
        name = _BOOL_OPERATORS.get(name, name)
    if kind != ReduceOp.PREMUL_SUM:
        return name, None
    if not (dtype.is_floating_point or dtype.is_complex):
        raise TensorContractError(f"PREMUL_SUM of {dtype} would round its factor; use SUM and divide")
    return name, op.factor


def _names() -> list[str]:
    return [kind.name for kind in _OPERATORS]


def scaled(tensor: Tensor, factor: Any) -> Tensor:
    """`tensor` times the factor of a PREMUL_SUM; itself where there is none."""
    return tensor if factor is None else tensor * factor


class Receiver:
    """Where one tensor's elements arrive in one row.

    Attributes:
        row: a row of the tensor's elements to fill.
        settle: brings what was filled into the tensor, where `row` is not its own memory; else None.
    """

    def __init__(self, tensor: Any) -> None:
        target = plain(tensor)
        self.settle: Callable[[], object] | None = None
        if target.is_contiguous():
            self.row = target.view(-1)
        else:
            staged = torch.empty(target.shape, dtype=target.dtype)
            self.row = staged.view(-1)
            self.settle = lambda: target.copy_(staged)


class Pieces:
    """A list of tensors as one row of elements, each tensor's after the other's.

    Attributes:
        tensors: the tensors, plain.
        sizes: how many elements each has.
        row: the memory that holds them in a row, where they lie so; else None.
    """

    def __init__(self, tensors: Sequence[Any], ranks: int) -> None:
        if len(tensors) != ranks:
            raise TensorContractError(
                f"a list of {len(tensors)} tensors for {ranks} ranks; pass one for each"
            )
        self.tensors = [plain(tensor) for tensor in tensors]
        dtypes = {tensor.dtype for tensor in self.tensors}
        if len(dtypes) > 1:
            raise TensorContractError(
                f"a list of tensors of {', '.join(sorted(map(str, dtypes)))}; pass tensors of one dtype"
            )
        self.sizes = [tensor.numel() for tensor in self.tensors]
        self.row = self._row()

    def _row(self) -> Tensor | None:
        first = self.tensors[0]
        offset = first.storage_offset()
        for tensor, size in zip(self.tensors, self.sizes, strict=True):
            if (
                not tensor.is_contiguous()
                or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
                or tensor.storage_offset() != offset
            ):
                return None
            offset += size
        return first.as_strided((sum(self.sizes),), (1,))

    @property
    def equal(self) -> bool:
        """Whether all have as many elements."""
        return len(set(self.sizes)) == 1

    def joined(self) -> Tensor:
        """The elements in one row; a copy where they do not lie so."""
        return self.row if self.row is not None else torch.cat([t.reshape(-1) for t in self.tensors])

    def fill(self, row: Tensor) -> None:
        """Give each tensor its part of `row`, unless it is their own memory."""
        if self.row is None or row.data_ptr() != self.row.data_ptr():
            for tensor, part in zip(self.tensors, torch.split(row, self.sizes), strict=True):
                tensor.copy_(part.view(tensor.shape))
