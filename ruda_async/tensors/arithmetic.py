"""Reductions on bytes: which operators there are, the order of their arithmetic, and the arithmetic.

numpy computes for torch tensors too, so ranks of both kinds get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from ..errors import TensorContractError
from .dtypes import DType, dtype_of
from .kernels import (
    Array,
    Workspace,
    kernel_of,
    narrow_bfloat16,
    narrow_float16,
    quietly,
    settle_nans,
    widen_bfloat16,
    widen_float16,
)

__all__ = ["OPERATORS", "Reducer", "Tree", "check_operator", "order", "reducer"]

OPERATORS = ("sum", "mean", "max", "min", "prod", "band", "bor", "bxor")

#: Arithmetic goes over blocks of this many bytes, so that operands, scratch and results of a block stay
#: in the second-level cache from one step of the tree to the next.
_BLOCK = 128 * 1024

_BITWISE = ("band", "bor", "bxor")

#: A rank, or what the left ranks came to combined with what the right ones did.
Tree: TypeAlias = "int | tuple[Tree, Tree]"


def check_operator(operator: str, dtype_name: str) -> None:
    """Check that `operator` is one and is defined for the dtype.

    Raises:
        TensorContractError: it is not; the text says what to do instead.
    """
    if operator not in OPERATORS:
        near = get_close_matches(str(operator), OPERATORS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TensorContractError(f"operator {operator!r} is unknown; there are {', '.join(OPERATORS)}{hint}")
    dtype = dtype_of(dtype_name)
    reason = _objection(operator, dtype)
    if reason is not None:
        raise TensorContractError(f"{operator} of {dtype.name} is not defined: {reason}")


def _objection(operator: str, dtype: DType) -> str | None:
    match dtype.kind:
        case "float8":
            return "float8 is moved but never computed with; convert to bfloat16 or float32 first"
        case "bool" if operator in ("sum", "mean", "prod"):
            return "use max or bor for any, min or band for all, or convert to int64 to count"
        case "int" if operator == "mean":
            return "the mean may be no integer; use sum and divide by the world size, or convert to float"
        case "float" if operator in _BITWISE:
            return "bitwise operators are for integers and bool; view the bits as integers if they are meant"
    return None


def order(size: int) -> Tree:
    """The order in which a reduction over `size` ranks combines them, as nested pairs of ranks.

    Recursive doubling (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
    Operations in MPICH", 2005). With `p` the largest power of two up to `size`, the first
    ``2 * (size - p)`` ranks combine in pairs, which leaves `p` values in rank order; these combine in a
    balanced binary tree over neighbours. The left operand is always that of the lower ranks, for every
    operator.

    >>> order(6)
    (((0, 1), (2, 3)), (4, 5))

    Raises:
        ValueError: `size` is less than 1.
    """
    if size < 1:
        raise ValueError(f"a reduction is over at least 1 rank, not {size}")
    folded = size - (1 << size.bit_length() - 1)
    level: list[Tree] = [(rank, rank + 1) for rank in range(0, 2 * folded, 2)]
    level.extend(range(2 * folded, size))
    while len(level) > 1:
        level = [(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


#: Registers ``0 … size-1`` are the ranks' inputs, those from `size` on are scratch.
_Step: TypeAlias = tuple[int, int, int]


@lru_cache(maxsize=1024)
def _program(size: int) -> tuple[tuple[_Step, ...], int]:
    """`order` as steps ``(destination, left, right)`` depth first, and the number of scratch registers.

    Depth first, a tree needs one scratch register a level, and reads each input just before its use.
    """
    steps: list[_Step] = []
    most = 0

    def visit(node: Tree, free: int) -> int:
        nonlocal most
        if isinstance(node, int):
            return node
        left = visit(node[0], free)
        right = visit(node[1], free + 1)
        steps.append((size + free, left, right))
        most = max(most, free + 1)
        return size + free

    visit(order(size), 0)
    return tuple(steps), most


_tree_workspace = Workspace()
_value_workspace = Workspace()


class Reducer:
    """The arithmetic of one operator on one dtype over a number of ranks. Make one with `reducer`.

    All methods take contiguous memoryviews of format ``B``, of any alignment, and may run in several
    threads at once. Partial results are of `partial_dtype`, which is float32 where sums, means and
    products of float16 and bfloat16 must not round at every step.

    Integers wrap. Floats follow IEEE 754 without warnings; every NaN of a result is the canonical quiet
    one, min and max propagate NaN and take ``-0.0`` as less than ``+0.0``. So results depend on the
    operands' values and order alone: not on lengths, alignment or the instructions in use.

    Attributes:
        dtype, operator, size: what it is for.
        itemsize: bytes of an element.
        partial_dtype, partial_itemsize: the same of a partial result.
        widens: whether `partial_dtype` is not `dtype`.
    """

    __slots__ = (
        "_converts",
        "_divisor",
        "_floating",
        "_kernel",
        "_narrow",
        "_partial",
        "_program",
        "_raw",
        "_registers",
        "_widen",
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
        self.dtype = dtype
        self.operator = operator
        self.size = size
        element = dtype_of(dtype)
        brain = dtype == "bfloat16"
        self.widens = dtype in ("float16", "bfloat16") and operator in ("sum", "mean", "prod")
        self.partial_dtype = "float32" if self.widens else dtype
        self.itemsize = element.itemsize
        self.partial_itemsize = dtype_of(self.partial_dtype).itemsize
        # bfloat16 is float32's upper half, so even its minimum is computed there, which is exact.
        self._raw: np.dtype[Any] = np.dtype(np.uint16 if brain else dtype)
        self._work: np.dtype[Any] = np.dtype(np.float32) if self.widens or brain else self._raw
        self._partial = self._work if self.widens else self._raw
        self._converts = self._work != self._raw
        self._widen = widen_bfloat16 if brain else widen_float16
        self._narrow = narrow_bfloat16 if brain else narrow_float16
        self._floating = element.kind == "float"
        self._kernel = kernel_of(operator, self._work)
        self._divisor: Any = np.array(size, self._work) if operator == "mean" and size > 1 else None
        self._program, self._registers = _program(size)

    def __repr__(self) -> str:
        return f"reducer({self.dtype!r}, {self.operator!r}, {self.size})"

    def combine(self, out: memoryview, a: memoryview, b: memoryview) -> None:
        """``out = a ∘ b`` of partial results; `a` comes from the lower ranks; `out` may be `a` or `b`."""
        if not len(out):
            return
        dtype = self._partial
        arrays = (np.frombuffer(out, dtype), np.frombuffer(a, dtype), np.frombuffer(b, dtype))
        if not self._floating:
            self._kernel(*arrays)
        elif len(out) <= _BLOCK // 2:  # one block at most, whatever the dtype of the work
            quietly(self._combine, *arrays)
        else:
            quietly(self._blockwise, self._combine, *arrays)

    def load(self, out_partial: memoryview, raw: memoryview) -> None:
        """Elements → partial results: a conversion where the reducer widens, else a copy."""
        if not self.widens:
            out_partial[:] = raw
        elif len(raw):
            quietly(self._widen, np.frombuffer(out_partial, self._work), np.frombuffer(raw, self._raw))

    def store(self, out_raw: memoryview, partial: memoryview) -> None:
        """Finished partial results → elements, which are not to overlap them where the reducer widens.

        A mean is divided by the world size first; half precision rounds to nearest even, once.
        """
        if not self.widens:
            out_raw[:] = partial
            self.finish_inplace(out_raw)
        elif len(out_raw):
            arrays = np.frombuffer(out_raw, self._raw), np.frombuffer(partial, self._work)
            quietly(self._blockwise, self._store, *arrays)

    def finish_inplace(self, raw: memoryview) -> None:
        """Divide a finished mean by the world size, where partial results are elements; else do nothing."""
        if self._divisor is not None and not self.widens and len(raw):
            values = np.frombuffer(raw, self._raw)
            quietly(np.divide, values, self._divisor, values)

    def reduce(self, out_raw: memoryview, raws: Sequence[memoryview]) -> None:
        """Reduce one block of every rank, in rank order, by `order`.

        Args:
            out_raw: the result; it may be exactly one of `raws`, any of them, but not overlap one otherwise.
            raws: `size` blocks as long as `out_raw`.
        """
        if len(raws) != self.size:
            raise ValueError(f"{self!r} takes {self.size} blocks, not {len(raws)}")
        if self.size == 1:
            out_raw[:] = raws[0]
        elif self.size == 2 and not self.widens:
            self.combine(out_raw, raws[0], raws[1])
            self.finish_inplace(out_raw)
        elif len(out_raw):
            arrays = [np.frombuffer(raw, self._raw) for raw in raws]
            run = self._reduce_wide if self._converts else self._reduce_plain
            if self._floating:
                quietly(self._blockwise, run, np.frombuffer(out_raw, self._raw), *arrays)
            else:
                self._blockwise(run, np.frombuffer(out_raw, self._raw), *arrays)

    def _blockwise(self, function: Any, *arrays: Array) -> None:
        """Call `function` on equal, cache-sized blocks of equally long arrays, in turn."""
        length = len(arrays[0])
        step = _BLOCK // self._work.itemsize
        if length <= step:
            function(*arrays)
            return
        for start in range(0, length, step):
            function(*[array[start : start + step] for array in arrays])

    def _combine(self, out: Array, a: Array, b: Array) -> None:
        if self.widens:
            self._kernel(out, a, b)  # NaNs are settled by `store`
        elif self._converts:
            left, right = _value_workspace.arrays(2, len(out), self._work)
            self._widen(left, a)
            self._widen(right, b)
            self._kernel(left, left, right)
            self._narrow(out, left)
        else:
            self._kernel(out, a, b)
            settle_nans(out)

    def _store(self, out: Array, partial: Array) -> None:
        if self._divisor is not None:
            (quotient,) = _value_workspace.arrays(1, len(out), self._work)
            np.divide(partial, self._divisor, out=quotient)
            partial = quotient
        self._narrow(out, partial)

    def _reduce_plain(self, out: Array, *raws: Array) -> None:
        # `out` is written by the last step alone, when nothing but its operands is still to be read.
        kernel = self._kernel
        values = [*raws, *_tree_workspace.arrays(self._registers, len(out), self._work)]
        for destination, left, right in self._program[:-1]:
            kernel(values[destination], values[left], values[right])
        _, left, right = self._program[-1]
        kernel(out, values[left], values[right])
        if self._floating:
            settle_nans(out)
            if self._divisor is not None:
                np.divide(out, self._divisor, out=out)

    def _reduce_wide(self, out: Array, *raws: Array) -> None:
        kernel, widen, size = self._kernel, self._widen, self.size
        *scratch, loaded = _tree_workspace.arrays(self._registers + 1, len(out), self._work)
        for destination, left, right in self._program:
            # The destination holds the left operand, or nothing yet: the right one has a register above it.
            a = scratch[destination - size]
            if left < size:
                widen(a, raws[left])
            if right < size:
                b = loaded
                widen(b, raws[right])
            else:
                b = scratch[right - size]
            kernel(a, a, b)
        result = scratch[0]
        if self._divisor is not None:
            np.divide(result, self._divisor, out=result)
        self._narrow(out, result)


@lru_cache(maxsize=4096)
def reducer(dtype: str, operator: str, size: int) -> Reducer:
    """The reducer for a dtype, one of `OPERATORS`, and `size` ranks.

    Raises:
        TensorContractError: see `check_operator`.
        ValueError: `size` is less than 1.
    """
    return Reducer(dtype, operator, size)
