"""Elementwise arithmetic whose bits depend on the values alone.

numpy's loops run vector instructions over the bulk of a block and others over its tail, and three
results depend on which of them an element meets: the payload and sign of a NaN made from two NaNs,
which of ``-0.0`` and ``+0.0`` is the minimum, and what a conversion makes of a NaN. The kernels here pin
them down: every NaN that arithmetic returns is the canonical quiet one (sign and payload zero), and
``-0.0 < +0.0``.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Array",
    "Kernel",
    "Workspace",
    "has_nan",
    "kernel_of",
    "narrow_bfloat16",
    "narrow_float16",
    "quietly",
    "settle_nans",
    "widen_bfloat16",
    "widen_float16",
]

Array: TypeAlias = npt.NDArray[Any]
#: ``kernel(out, a, b)``: all of one dtype and length; `out` may be `a` or `b`.
Kernel: TypeAlias = Callable[[Array, Array, Array], Any]

_CANONICAL_BFLOAT16 = np.uint16(0x7FC0)
# Arrays of no axes: converting a Python number would cost as much as the arithmetic on a small block.
_ONE = np.array(1, np.uint32)
_SIXTEEN = np.array(16, np.uint32)
_JUST_UNDER_HALF = np.array(0x7FFF, np.uint32)


class _Bits(NamedTuple):
    """The bits of a float dtype: the unsigned integer of its width, masks of that, the canonical NaN."""

    unsigned: np.dtype[Any]
    sign: Array
    magnitude: Array
    nan: Array


def _bits_of(width: int, nan: int) -> _Bits:
    unsigned = np.dtype(f"uint{width}")
    sign = np.array(1 << width - 1, unsigned)
    return _Bits(unsigned, sign, np.invert(sign), np.array(nan, unsigned).view(f"float{width}"))


_BITS = {
    np.dtype(np.float16): _bits_of(16, 0x7E00),
    np.dtype(np.float32): _bits_of(32, 0x7FC0_0000),
    np.dtype(np.float64): _bits_of(64, 0x7FF8_0000_0000_0000),
}


class Workspace(threading.local):
    """Scratch memory of one thread, kept because fresh pages cost more than the arithmetic in them."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def arrays(self, count: int, length: int, dtype: np.dtype[Any]) -> list[Array]:
        """`count` arrays of `length` elements, whose content is whatever the last user left."""
        nbytes = count * length * dtype.itemsize
        if nbytes <= 4096:
            return list(np.empty((count, length), dtype))
        if self._memory.nbytes < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return list(self._memory[:nbytes].view(dtype).reshape(count, length))


#: Used by the functions of this module, none of which calls another that uses it.
_workspace = Workspace()


if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
    # numpy 2 keeps its error state in a context variable: running in a context where it is set to
    # "ignore" costs a tenth of entering np.errstate.
    _quiet = contextvars.Context()
    _quiet.run(np.seterr, all="ignore")

    def quietly(function: Callable[..., Any], *args: Any) -> None:
        """Call `function` without warnings about overflow and invalid operands."""
        _quiet.copy().run(function, *args)  # a copy, because a context runs one call at a time

else:

    def quietly(function: Callable[..., Any], *args: Any) -> None:
        """Call `function` without warnings about overflow and invalid operands."""
        with np.errstate(all="ignore"):
            function(*args)


def kernel_of(operator: str, dtype: np.dtype[Any]) -> Kernel:
    """The kernel for a checked operator on arrays of `dtype`; NaNs may still need `settle_nans`.

    ``mean`` adds; who uses the kernel divides at the end.
    """
    if dtype.kind == "f" and operator in ("min", "max"):
        return _minimum if operator == "min" else _maximum
    return _UFUNCS[operator]


def _binary(ufunc: np.ufunc) -> Kernel:
    """`ufunc` with its result in front, as kernels have it."""

    def kernel(out: Array, a: Array, b: Array) -> Any:
        return ufunc(a, b, out=out)

    return kernel


_UFUNCS: dict[str, Kernel] = {
    "sum": _binary(np.add),
    "mean": _binary(np.add),
    "prod": _binary(np.multiply),
    "min": _binary(np.minimum),
    "max": _binary(np.maximum),
    "band": _binary(np.bitwise_and),
    "bor": _binary(np.bitwise_or),
    "bxor": _binary(np.bitwise_xor),
}


def _minimum(out: Array, a: Array, b: Array) -> None:
    """The minimum of floats. It is negative where either operand is, so its sign is the "or" of theirs."""
    unsigned, sign_bit, _, _ = _BITS[out.dtype]
    (sign,) = _workspace.arrays(1, len(out), unsigned)
    np.bitwise_or(a.view(unsigned), b.view(unsigned), out=sign)
    np.bitwise_and(sign, sign_bit, out=sign)
    np.minimum(a, b, out=out)
    bits = out.view(unsigned)
    np.bitwise_or(bits, sign, out=bits)


def _maximum(out: Array, a: Array, b: Array) -> None:
    """The maximum of floats. It is negative where both operands are, so its sign is the "and" of theirs."""
    unsigned, _, magnitude, _ = _BITS[out.dtype]
    (sign,) = _workspace.arrays(1, len(out), unsigned)
    np.bitwise_and(a.view(unsigned), b.view(unsigned), out=sign)
    np.bitwise_or(sign, magnitude, out=sign)
    np.maximum(a, b, out=out)
    bits = out.view(unsigned)
    np.bitwise_and(bits, sign, out=bits)


#: Up to this many elements a look at each as a Python number is quicker than a call into numpy.
_FEW = 16


def has_nan(values: Array) -> bool:
    """Whether any of `values` (float32 or float64, at least one) is a NaN; the quickest ways there are."""
    if len(values) <= _FEW:
        for value in values.tolist():  # noqa: SIM110 (a generator would take twice as long)
            if value != value:
                return True
        return False
    largest = np.maximum.reduce(values)  # passes NaNs on, at several elements a cycle
    return bool(largest != largest)


def settle_nans(values: Array) -> None:
    """Make every NaN of `values` the canonical one."""
    if values.itemsize == 2:
        nans = np.isnan(values)
        if not np.count_nonzero(nans):  # a third of the time of nans.any() on a small block
            return
    elif has_nan(values):
        nans = np.isnan(values)
    else:
        return
    values[nans] = _BITS[values.dtype].nan


def widen_float16(out: Array, raw: Array) -> None:
    """float16 → float32, exactly."""
    np.copyto(out, raw)


def narrow_float16(out: Array, wide: Array) -> None:
    """float32 → float16, to nearest even; every NaN becomes the canonical one."""
    np.copyto(out, wide, casting="unsafe")
    if has_nan(wide):
        settle_nans(out)


def widen_bfloat16(out: Array, raw: Array) -> None:
    """The bits of bfloat16 (uint16) → float32, exactly: they are its upper half."""
    bits = out.view(np.uint32)
    np.copyto(bits, raw)
    np.left_shift(bits, _SIXTEEN, out=bits)


def narrow_bfloat16(out: Array, wide: Array) -> None:
    """float32 → the bits of bfloat16 (uint16), to nearest even; every NaN becomes the canonical one.

    Adding ``0x7fff`` plus the last bit that stays carries into it where the part cut off is over one
    half, or just one half and that bit odd; a carry out of the mantissa raises the exponent, up to infinity.
    """
    bits = wide.view(np.uint32)
    (rounded,) = _workspace.arrays(1, len(bits), bits.dtype)
    np.right_shift(bits, _SIXTEEN, out=rounded)
    np.bitwise_and(rounded, _ONE, out=rounded)
    np.add(rounded, _JUST_UNDER_HALF, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, _SIXTEEN, out=rounded)
    np.copyto(out, rounded, casting="unsafe")
    if has_nan(wide):
        out[np.isnan(wide)] = _CANONICAL_BFLOAT16
