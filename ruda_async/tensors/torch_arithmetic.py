"""Reductions by torch, on whatever device: the documented arithmetic of `arithmetic.Reducer`, to the bit.

Ranks may differ in where their tensors lie, and still all get the same bits. So the order is the host's, half
precision accumulates in float32 and rounds once, every NaN of a result is the canonical one, and ``-0.0``
is less than ``+0.0``. What this rests on: the device adds, multiplies, divides and converts as IEEE 754 says,
rounding to nearest even and with subnormal numbers, which CUDA devices do as torch is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from .arithmetic import Tree, check_operator, order
from .dtypes import dtype_of

if TYPE_CHECKING:
    from .torch_device import TorchMemory

__all__ = ["TorchReducer"]

#: ``kernel(out, a, b)``: all of one dtype and length; `out` may be `a` or `b`.
_Kernel: TypeAlias = Callable[[Tensor, Tensor, Tensor], object]

#: Signed integers stand for unsigned ones, with which torch cannot do much, and for the bits of floats.
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: The canonical NaN of each dtype as an integer.
_NAN = {
    torch.float16: 0x7E00,
    torch.bfloat16: 0x7FC0,
    torch.float32: 0x7FC00000,
    torch.float64: 0x7FF8000000000000,
}


class TorchReducer:
    """What `arithmetic.Reducer` is, with the same attributes and methods, for `TorchMemory`."""

    __slots__ = (
        "_element",
        "_floating",
        "_kernel",
        "_mean",
        "_tree",
        "_work",
        "dtype",
        "itemsize",
        "operator",
        "partial_dtype",
        "partial_itemsize",
        "size",
        "widens",
    )

    def __init__(self, dtype: str, operator: str, size: int) -> None:
        check_operator(operator, dtype)
        element = dtype_of(dtype)
        self.dtype = dtype
        self.operator = operator
        self.size = size
        self.widens = dtype in ("float16", "bfloat16") and operator in ("sum", "mean", "prod")
        self.partial_dtype = "float32" if self.widens else dtype
        self.itemsize = element.itemsize
        self.partial_itemsize = dtype_of(self.partial_dtype).itemsize
        self._floating = element.kind == "float"
        if self._floating:
            self._element: torch.dtype = getattr(torch, dtype)
        else:
            self._element = torch.uint8 if dtype in ("uint8", "bool") else _SIGNED[self.itemsize]
        self._work = torch.float32 if self.widens else self._element
        self._kernel = _kernel_of(operator, dtype)
        self._mean = operator == "mean" and size > 1
        self._tree = order(size)

    def combine(self, out: TorchMemory, a: TorchMemory, b: TorchMemory) -> None:
        """See `Reducer.combine`."""
        if not len(out):
            return
        with out.device.queued():
            result = out.data.view(self._work)
            self._kernel(result, a.data.view(self._work), b.data.view(self._work))
            if self._floating and not self.widens:
                _settle_nans(result)

    def load(self, out_partial: TorchMemory, raw: TorchMemory) -> None:
        """See `Reducer.load`."""
        with out_partial.device.queued():
            out_partial.data.view(self._work).copy_(raw.data.view(self._element))

    def store(self, out_raw: TorchMemory, partial: TorchMemory) -> None:
        """See `Reducer.store`."""
        with out_raw.device.queued():
            self._store(out_raw.data.view(self._element), partial.data.view(self._work))

    def finish_inplace(self, raw: TorchMemory) -> None:
        """See `Reducer.finish_inplace`."""
        if self._mean and not self.widens and len(raw):
            with raw.device.queued():
                values = raw.data.view(self._work)
                self._store(values, values)

    def reduce(self, out_raw: TorchMemory, raws: Sequence[TorchMemory]) -> None:
        """See `Reducer.reduce`."""
        if len(raws) != self.size:
            raise ValueError(f"a reducer of {self.size} ranks takes as many blocks, not {len(raws)}")
        with out_raw.device.queued():
            inputs = [raw.data.view(self._element) for raw in raws]
            if self.size == 1:
                out_raw.data.copy_(raws[0].data)
            elif len(out_raw):
                self._store(out_raw.data.view(self._element), self._value(self._tree, inputs))

    def _value(self, node: Tree, inputs: Sequence[Tensor]) -> Tensor:
        """What a branch of the tree comes to: an input itself, widened if need be, or fresh memory."""
        if isinstance(node, int):
            return inputs[node].to(self._work)
        a, b = self._value(node[0], inputs), self._value(node[1], inputs)
        result = torch.empty_like(a)
        self._kernel(result, a, b)
        return result

    def _store(self, out: Tensor, partial: Tensor) -> None:
        if self._mean:
            # Not by a Python number: CUDA would multiply by its reciprocal, which rounds twice.
            partial = partial / torch.full((1,), self.size, dtype=self._work, device=partial.device)
        if out is not partial:
            out.copy_(partial)
        if self._floating:
            _settle_nans(out)


def _settle_nans(values: Tensor) -> None:
    """Make every NaN the canonical one; the host learns nothing of whether there is any."""
    values.view(_SIGNED[values.itemsize]).masked_fill_(torch.isnan(values), _NAN[values.dtype])


# ---------------------------------------------------------------------- kernels


def _kernel_of(operator: str, dtype: str) -> _Kernel:
    element = dtype_of(dtype)
    if operator in ("min", "max"):
        compare = torch.minimum if operator == "min" else torch.maximum
        if element.kind == "float":
            return _signed_minimum if operator == "min" else _signed_maximum
        if dtype in ("uint16", "uint32", "uint64"):
            return _unsigned(compare, -1 << 8 * element.itemsize - 1)
        return _binary(compare)
    return _binary(_FUNCTIONS[operator])


def _binary(function: Callable[..., Tensor]) -> _Kernel:
    def kernel(out: Tensor, a: Tensor, b: Tensor) -> object:
        return function(a, b, out=out)

    return kernel


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def _unsigned(compare: Callable[..., Tensor], sign: int) -> _Kernel:
    """Compare unsigned integers as signed ones: with the top bit turned, their order is the same."""

    def kernel(out: Tensor, a: Tensor, b: Tensor) -> object:
        return out.copy_(compare(a ^ sign, b ^ sign) ^ sign)

    return kernel


def _signed_minimum(out: Tensor, a: Tensor, b: Tensor) -> None:
    """The minimum of floats. It is negative where either operand is, so its sign is the "or" of theirs."""
    integer = _SIGNED[a.itemsize]
    sign = (a.view(integer) | b.view(integer)) & (-1 << 8 * a.itemsize - 1)
    torch.minimum(a, b, out=out)
    out.view(integer).bitwise_or_(sign)


def _signed_maximum(out: Tensor, a: Tensor, b: Tensor) -> None:
    """The maximum of floats. It is negative where both operands are, so its sign is the "and" of theirs."""
    integer = _SIGNED[a.itemsize]
    sign = (a.view(integer) & b.view(integer)) | ((1 << 8 * a.itemsize - 1) - 1)
    torch.maximum(a, b, out=out)
    out.view(integer).bitwise_and_(sign)
