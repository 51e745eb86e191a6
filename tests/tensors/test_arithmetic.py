"""Reductions: operators, their order, and bits that depend on the values alone."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruda_async.tensors import order, reducer
from ruda_async.tensors.arithmetic import Tree
from ruda_async.tensors.dtypes import DTYPES

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOAT_OPERATORS = ("sum", "mean", "max", "min", "prod")
INTEGER_OPERATORS = ("sum", "max", "min", "prod", "band", "bor", "bxor")
CASES = [
    *((dtype, operator) for dtype in FLOATS for operator in FLOAT_OPERATORS),
    *((dtype, operator) for dtype in INTEGERS for operator in INTEGER_OPERATORS),
    *(("bool", operator) for operator in ("max", "min", "band", "bor", "bxor")),
]


def raw_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(np.uint16 if name == "bfloat16" else name)


def view(array: Any) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def special(name: str, length: int, seed: int) -> Any:
    """Random elements, a third of them NaNs of all payloads, infinities, zeros and subnormals."""
    rng = np.random.default_rng(seed)
    dtype = raw_dtype(name)
    if name == "bool":
        return rng.integers(0, 2, length).astype(np.bool_)
    bits = np.frombuffer(rng.bytes(length * dtype.itemsize), f"u{dtype.itemsize}").copy()
    if name in FLOATS:
        exponent = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0xFF << 23, "float64": 0x7FF << 52}[
            name
        ]
        where = rng.integers(0, 12, length)
        sign = 1 << 8 * dtype.itemsize - 1
        bits[where == 0] |= bits.dtype.type(exponent)
        bits[where == 1] &= bits.dtype.type(sign)
        bits[where == 2] = bits[where == 2] & bits.dtype.type(sign) | bits.dtype.type(exponent)
        bits[where == 3] &= bits.dtype.type(~exponent & (1 << 8 * dtype.itemsize) - 1)
    return bits.view(dtype)


def ordinary(name: str, length: int, seed: int) -> Any:
    """Elements around one, whose sums and products round."""
    rng = np.random.default_rng(seed)
    if name == "bfloat16":
        return (rng.normal(1, 0.5, length).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if name in FLOATS:
        return rng.normal(1, 0.5, length).astype(name)
    return special(name, length, seed)


# ---------------------------------------------------------------------- a plain reference, element by element


def wide(name: str, element: Any) -> Any:
    """The element as the type in which a reference computes."""
    if name == "bfloat16":
        return (np.uint32(element) << np.uint32(16)).view(np.float32)
    return np.float32(element) if name == "float16" else element


def reference(name: str, operator: str, columns: list[Any]) -> Any:
    """The reduction of `columns`, by recursion over `order`, on ordinary numbers."""
    functions: dict[str, Callable[[Any, Any], Any]] = {
        "sum": lambda a, b: a + b,
        "mean": lambda a, b: a + b,
        "prod": lambda a, b: a * b,
        "max": lambda a, b: a if a > b else b,
        "min": lambda a, b: a if a < b else b,
        "band": lambda a, b: a & b,
        "bor": lambda a, b: a | b,
        "bxor": lambda a, b: a ^ b,
    }
    combine = functions[operator]

    def evaluate(tree: Tree, at: int) -> Any:
        if isinstance(tree, int):
            return wide(name, columns[tree][at])
        return combine(evaluate(tree[0], at), evaluate(tree[1], at))

    with np.errstate(all="ignore"):
        size = len(columns)
        values = [evaluate(order(size), at) for at in range(len(columns[0]))]
        if operator == "mean":
            values = [value / type(value)(size) for value in values]
    if name == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        return np.array(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.array(values).astype(name)


# ---------------------------------------------------------------------- the order


def test_the_order_is_recursive_doubling() -> None:
    assert order(1) == 0
    assert order(2) == (0, 1)
    assert order(3) == ((0, 1), 2)
    assert order(4) == ((0, 1), (2, 3))
    assert order(5) == (((0, 1), 2), (3, 4))
    assert order(6) == (((0, 1), (2, 3)), (4, 5))
    assert order(7) == (((0, 1), (2, 3)), ((4, 5), 6))
    assert order(9) == ((((0, 1), 2), (3, 4)), ((5, 6), (7, 8)))
    with pytest.raises(ValueError, match="at least 1 rank, not 0"):
        order(0)


@given(st.integers(1, 300))
def test_the_order_is_the_exchange_of_recursive_doubling(size: int) -> None:
    """Play the algorithm, rank by rank, and compare what each ends up with."""
    power = 1 << size.bit_length() - 1
    folded = size - power
    held: list[Tree] = [(r, r + 1) for r in range(0, 2 * folded, 2)]
    held += list(range(2 * folded, size))
    distance = 1
    while distance < power:
        held = [
            (held[r], held[r ^ distance]) if r < r ^ distance else (held[r ^ distance], held[r])
            for r in range(power)
        ]
        distance *= 2
    assert all(tree == order(size) for tree in held)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(("dtype", "operator"), CASES)
def test_reduce_is_the_reference(dtype: str, operator: str) -> None:
    for size in range(1, 10):
        columns = [ordinary(dtype, 37, seed) for seed in range(size)]
        expected = columns[0] if size == 1 else reference(dtype, operator, columns)
        out = np.empty_like(columns[0])
        reducer(dtype, operator, size).reduce(view(out), [view(column) for column in columns])
        assert out.tobytes() == expected.tobytes(), size


@pytest.mark.parametrize(("dtype", "operator"), CASES)
def test_load_combine_store_is_reduce(dtype: str, operator: str) -> None:
    """What an algorithm does message by message gives the bits of `reduce`, NaNs and zeros too.

    An algorithm combines in place on one rank what it combines into fresh memory on another.
    """
    for size, place in itertools.product((2, 3, 5, 8), ("fresh", "left", "right")):
        arithmetic = reducer(dtype, operator, size)
        columns = [special(dtype, 200, seed) for seed in range(size)]
        expected = np.empty_like(columns[0])
        arithmetic.reduce(view(expected), [view(column) for column in columns])

        def partial(tree: Tree, columns: Any, arithmetic: Any = arithmetic, place: str = place) -> memoryview:
            made = memoryview(bytearray(200 * arithmetic.partial_itemsize))
            if isinstance(tree, int):
                arithmetic.load(made, view(columns[tree]))
                return made
            left, right = partial(tree[0], columns), partial(tree[1], columns)
            out = {"fresh": made, "left": left, "right": right}[place]
            arithmetic.combine(out, left, right)
            return out

        total = partial(order(size), columns)
        out = np.empty_like(expected)
        arithmetic.store(view(out), total)
        assert out.tobytes() == expected.tobytes(), (size, place)
        if not arithmetic.widens:
            arithmetic.finish_inplace(total)
            assert bytes(total) == expected.tobytes(), (size, place)


@pytest.mark.parametrize(("dtype", "operator"), CASES)
@pytest.mark.parametrize("size", [2, 5])
def test_bits_do_not_depend_on_length_or_alignment(dtype: str, operator: str, size: int) -> None:
    length = 40_000
    columns = [special(dtype, length, seed) for seed in range(size)]
    arithmetic = reducer(dtype, operator, size)
    itemsize = arithmetic.itemsize
    whole = np.empty_like(columns[0])
    arithmetic.reduce(view(whole), [view(column) for column in columns])
    rng = np.random.default_rng(0)
    cuts = sorted({0, length, *range(100), *(int(n) for n in rng.integers(0, length, 20))})
    for start, end in itertools.pairwise(cuts):
        pieces = []
        for rank, column in enumerate(columns):
            moved = bytearray(rank)  # each input at another alignment
            moved += view(column[start:end])
            pieces.append(memoryview(moved)[rank:])
        out = memoryview(bytearray(1 + (end - start) * itemsize))[1:]
        arithmetic.reduce(out, pieces)
        assert bytes(out) == whole[start:end].tobytes(), (start, end)


@pytest.mark.parametrize(("dtype", "operator"), CASES)
def test_out_may_be_any_input(dtype: str, operator: str) -> None:
    for size, rank in [(n, rank) for n in (1, 2, 3, 6, 8) for rank in range(n)]:
        arithmetic = reducer(dtype, operator, size)
        columns = [special(dtype, 300, seed) for seed in range(size)]
        expected = np.empty_like(columns[0])
        arithmetic.reduce(view(expected), [view(column) for column in columns])
        copies = [column.copy() for column in columns]
        arithmetic.reduce(view(copies[rank]), [view(copy) for copy in copies])
        assert copies[rank].tobytes() == expected.tobytes()
        others = [(c, o) for r, (c, o) in enumerate(zip(copies, columns, strict=True)) if r != rank]
        assert all(c.tobytes() == o.tobytes() for c, o in others)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("operator", FLOAT_OPERATORS)
def test_nans_are_canonical_and_propagate(dtype: str, operator: str) -> None:
    canonical = {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC0 << 16, "float64": 0x7FF8 << 48}[
        dtype
    ]
    width = DTYPES[dtype].itemsize
    columns = [special(dtype, 500, seed) for seed in range(3)]
    out = np.empty_like(columns[0])
    reducer(dtype, operator, 3).reduce(view(out), [view(column) for column in columns])
    bits = out.view(f"u{width}")

    def is_nan(array: Any) -> Any:
        if dtype != "bfloat16":
            return np.isnan(array)
        return np.isnan((array.astype(np.uint32) << 16).view(np.float32))

    nans = is_nan(out)
    assert nans.any()
    assert set(bits[nans].tolist()) == {canonical}
    any_nan = np.logical_or.reduce([is_nan(column) for column in columns])
    assert nans[any_nan].all()
    if operator in ("max", "min"):
        assert not nans[~any_nan].any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", [1, 2, 3, 17, 64, 1001])
def test_negative_zero_is_less_than_zero(dtype: str, length: int) -> None:
    width = DTYPES[dtype].itemsize
    zero = np.zeros(length, raw_dtype(dtype))
    minus = np.full(length, 1 << 8 * width - 1, f"u{width}").view(raw_dtype(dtype))
    out = np.empty_like(zero)
    for pair in ((zero, minus), (minus, zero)):
        reducer(dtype, "min", 2).reduce(view(out), [view(value) for value in pair])
        assert out.tobytes() == minus.tobytes()
        reducer(dtype, "max", 2).reduce(view(out), [view(value) for value in pair])
        assert out.tobytes() == zero.tobytes()


def test_half_precision_rounds_once() -> None:
    """2048 + 1 + 1 + … is 2048 where every step rounds to float16."""
    columns = [np.array([2048.0], np.float16)] + [np.array([1.0], np.float16)] * 6
    out = np.empty(1, np.float16)
    reducer("float16", "sum", 7).reduce(view(out), [view(column) for column in columns])
    assert out[0] == 2054.0
    big = [np.array([40000.0], np.float16)] * 4
    reducer("float16", "mean", 4).reduce(view(out), [view(column) for column in big])
    assert out[0] == 40000.0  # the sum alone would overflow
    reducer("float16", "sum", 4).reduce(view(out), [view(column) for column in big])
    assert np.isinf(out[0])


def test_integers_wrap() -> None:
    columns = [np.array([127, -128], np.int8), np.array([1, -1], np.int8)]
    out = np.empty(2, np.int8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reducer("int8", "sum", 2).reduce(view(out), [view(column) for column in columns])
    assert out.tolist() == [-128, 127]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("operator", FLOAT_OPERATORS)
def test_no_warnings_escape_and_settings_stay(dtype: str, operator: str) -> None:
    arithmetic = reducer(dtype, operator, 3)
    columns = [special(dtype, 100, seed) for seed in range(3)]
    out = np.empty_like(columns[0])
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        before = np.geterr()
        arithmetic.reduce(view(out), [view(column) for column in columns])
        partial = memoryview(bytearray(100 * arithmetic.partial_itemsize))
        arithmetic.load(partial, view(columns[0]))
        arithmetic.combine(partial, partial, partial)
        arithmetic.store(view(out), partial)
        assert np.geterr() == before


def test_threads_do_not_share_scratch() -> None:
    arithmetic = reducer("bfloat16", "mean", 5)
    inputs = [[special("bfloat16", 50_000, 10 * t + seed) for seed in range(5)] for t in range(4)]
    alone = []
    for columns in inputs:
        out = np.empty_like(columns[0])
        arithmetic.reduce(view(out), [view(column) for column in columns])
        alone.append(out.tobytes())
    together: list[set[bytes]] = [set() for _ in inputs]
    barrier = threading.Barrier(len(inputs))

    def work(index: int) -> None:
        out = np.empty_like(inputs[index][0])
        barrier.wait()
        for _ in range(10):
            arithmetic.reduce(view(out), [view(column) for column in inputs[index]])
            together[index].add(out.tobytes())

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == [{result} for result in alone]


def test_the_wrong_number_of_blocks_is_an_error() -> None:
    block = memoryview(bytearray(8))
    with pytest.raises(ValueError, match=r"reducer\('float32', 'sum', 3\) takes 3 blocks, not 2"):
        reducer("float32", "sum", 3).reduce(block, [block, block])


@pytest.mark.parametrize(("dtype", "operator"), CASES)
def test_empty_blocks(dtype: str, operator: str) -> None:
    empty = memoryview(bytearray())
    arithmetic = reducer(dtype, operator, 3)
    arithmetic.reduce(empty, [empty] * 3)
    arithmetic.load(empty, empty)
    arithmetic.combine(empty, empty, empty)
    arithmetic.store(empty, empty)
    arithmetic.finish_inplace(empty)


def test_reducers_are_cached() -> None:
    assert reducer("float32", "sum", 4) is reducer("float32", "sum", 4)
    assert reducer("float32", "sum", 4) is not reducer("float32", "sum", 5)
