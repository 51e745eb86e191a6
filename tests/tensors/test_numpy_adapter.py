"""numpy arrays as bytes and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruda_async.errors import TensorContractError
from ruda_async.tensors import TensorSpec, adapter_for
from ruda_async.tensors.dtypes import DTYPES

ml_dtypes = pytest.importorskip("ml_dtypes")

NUMPY = adapter_for(np.empty(0))


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def distinct(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """An array whose bytes differ from place to place."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = (np.arange(count, dtype=np.uint32) * 151 % 251).astype(np.uint8)
    if dtype == np.bool_:
        raw &= 1
    return raw.view(dtype).reshape(shape)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[slice, ...], tuple[int, ...], int]:
    """A shape, a slice of each axis, a permutation, and how often a new leading axis repeats it."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    steps = [draw(st.sampled_from((1, 1, 2, 3, -1, -2))) for _ in shape]
    starts = [draw(st.integers(0, 1)) for _ in shape]
    slices = tuple(
        slice(start, None, step) if step > 0 else slice(None, None, step)
        for start, step in zip(starts, steps, strict=True)
    )
    return shape, slices, tuple(draw(st.permutations(range(len(shape))))), draw(st.sampled_from((0, 0, 1, 3)))


def laid_out(base: Any, slices: tuple[slice, ...], axes: tuple[int, ...], repeats: int) -> Any:
    array = base[(*slices, ...)].transpose(axes)
    return np.broadcast_to(array, (repeats, *array.shape)) if repeats else array


@given(layouts(), st.sampled_from(sorted(DTYPES)))
def test_read_gives_the_elements_in_c_order(layout: Any, name: str) -> None:
    shape, slices, axes, repeats = layout
    array = laid_out(distinct(shape, numpy_dtype(name)), slices, axes, repeats)
    assert NUMPY.spec(array) == TensorSpec(name, array.shape)
    view = NUMPY.read(array)
    assert (view.format, view.ndim, view.c_contiguous) == ("B", 1, True)
    assert view.tobytes() == np.ascontiguousarray(array).tobytes()


@given(layouts(), st.sampled_from(sorted(DTYPES)))
def test_into_fills_any_layout(layout: Any, name: str) -> None:
    shape, slices, axes, _ = layout
    out = laid_out(np.zeros(shape, numpy_dtype(name)), slices, axes, 0)
    source = distinct(out.shape, out.dtype)
    target = NUMPY.into(out, TensorSpec(name, out.shape))
    target.buffer[:] = source.tobytes()
    assert target.finish() is out
    assert out.tobytes() == source.tobytes()


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (3, 0), (0, 4)])
def test_allocate_round_trip(name: str, shape: tuple[int, ...]) -> None:
    source = distinct(shape, numpy_dtype(name))
    target = NUMPY.allocate(np.float32(0), shape, name)
    assert (target.buffer.format, target.buffer.readonly, target.buffer.nbytes) == ("B", False, source.nbytes)
    target.buffer[:] = NUMPY.read(source)
    result = target.finish()
    assert type(result) is np.ndarray
    assert (result.dtype, result.shape, result.tobytes()) == (source.dtype, shape, source.tobytes())


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_contiguous_memory_is_not_copied(name: str) -> None:
    array = distinct((2, 3), numpy_dtype(name))
    view = NUMPY.read(array)
    assert np.shares_memory(np.frombuffer(view, np.uint8), array.view(np.uint8))
    out = np.zeros_like(array)
    target = NUMPY.into(out, TensorSpec(name, (2, 3)))
    target.buffer[:] = view
    assert out.tobytes() == array.tobytes()  # before finish(): the bytes went straight in


def test_read_only_input_and_scalars() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    assert NUMPY.read(array).tobytes() == array.tobytes()
    assert adapter_for(np.float32(3)).spec(np.float32(3)) == TensorSpec("float32", ())
    assert NUMPY.read(np.float32(3)).tobytes() == np.float32(3).tobytes()
    brain = ml_dtypes.bfloat16(1.5)
    assert adapter_for(brain).spec(brain) == TensorSpec("bfloat16", ())
    assert NUMPY.read(brain).tobytes() == b"\xc0\x3f"


def test_other_byte_order_is_converted() -> None:
    array = np.arange(5, dtype=">i4")
    assert NUMPY.spec(array) == TensorSpec("int32", (5,))
    assert NUMPY.read(array).tobytes() == array.astype(np.int32).tobytes()
    out = np.zeros(5, ">i4")
    target = NUMPY.into(out, NUMPY.spec(array))
    target.buffer[:] = NUMPY.read(array)
    assert target.finish().tolist() == [0, 1, 2, 3, 4]


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_subclasses_become_plain_arrays() -> None:
    matrix = np.asmatrix([[1.0, 2.0]])
    adapter = adapter_for(matrix)
    assert adapter is NUMPY
    assert adapter.read(matrix.T).tobytes() == np.array([1.0, 2.0]).tobytes()
    assert type(adapter.allocate(matrix, (1, 2), "float64").finish()) is np.ndarray


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros(2, np.complex64), r"dtype complex64 is not supported; .*\.real and \.imag"),
        (np.zeros(2, object), r"dtype object is not supported; .*object collectives"),
        (np.zeros(2, "U3"), r"dtype <U3 is not supported; .*text"),
        (np.zeros(2, "S3"), r"dtype \|S3 is not supported; .*text"),
        (np.zeros(2, "M8[s]"), r"dtype datetime64\[s\] is not supported; .*view\('int64'\)"),
        (np.zeros(2, "m8[s]"), r"dtype timedelta64\[s\] is not supported; .*view\('int64'\)"),
        (np.zeros(2, [("a", "i4"), ("b", "f4")]), r"structured dtype .*'a'.* is not supported; .*each field"),
        (np.zeros(2, "V6"), r"dtype \|V6 is not supported"),
        (np.zeros(2, np.longdouble), r"dtype \w+ is not supported; .*astype\('float64'\)"),
        (np.zeros(2, ml_dtypes.int4), r"dtype int4 is not supported; .*astype"),
        (np.zeros(2, ml_dtypes.float8_e4m3b11fnuz), r"dtype float8_e4m3b11fnuz is not supported"),
        (np.str_("text"), r"dtype <U4 is not supported"),
    ],
)
def test_dtypes_that_cannot_travel_are_named(array: Any, text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        adapter_for(array).spec(array)
    with pytest.raises(TensorContractError, match=text):
        adapter_for(array).read(array[::-1] if array.ndim else array)


def test_masked_arrays_are_refused() -> None:
    with pytest.raises(TensorContractError, match=r"masked array .* pass \.filled\(value\)"):
        adapter_for(np.ma.masked_array([1, 2], [True, False]))


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("out", "text"),
    [
        (np.zeros((2, 3), np.float64), r"out= is float64\[2, 3\], but the result is float32\[2, 3\]"),
        (np.zeros((3, 2), np.float32), r"out= is float32\[3, 2\], but the result is float32\[2, 3\]"),
        (read_only(np.zeros((2, 3), np.float32)), r"out= is a read-only array"),
        (
            np.lib.stride_tricks.as_strided(np.zeros(3, np.float32), (2, 3), (0, 4), writeable=True),
            r"out= is an expanded array .* pass out\.copy\(\)",
        ),
    ],
)
def test_unfit_out_is_refused(out: Any, text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        NUMPY.into(out, TensorSpec("float32", (2, 3)))


def test_a_scalar_is_no_out() -> None:
    with pytest.raises(TensorContractError, match=r"out= is a scalar of type float32"):
        NUMPY.into(np.float32(1), TensorSpec("float32", ()))


def test_movedim_is_a_view() -> None:
    array = distinct((2, 3, 4), np.dtype(np.int16))
    moved = NUMPY.movedim(array, 2, 0)
    assert moved.shape == (4, 2, 3)
    assert np.shares_memory(moved, array)
    assert np.array_equal(NUMPY.movedim(moved, 0, -1), array)
    with pytest.raises(TensorContractError, match=r"shape \[2, 3, 4\] has no axis 3"):
        NUMPY.movedim(array, 3, 0)


def test_unknown_dtype_is_not_allocated() -> None:
    with pytest.raises(TensorContractError, match=r"dtype 'float31' is not supported"):
        NUMPY.allocate(np.empty(0), (2,), "float31")
