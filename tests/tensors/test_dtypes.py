"""The names of element types, and what their errors say."""

from __future__ import annotations

import numpy as np
import pytest

from ruda_async.errors import TensorContractError
from ruda_async.tensors import dtype_of
from ruda_async.tensors.dtypes import DTYPES

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_itemsize_is_that_of_the_tensor_libraries(name: str) -> None:
    dtype = dtype_of(name)
    assert dtype.name == name
    assert dtype.itemsize == getattr(torch, name).itemsize
    if dtype.kind != "float8" and name != "bfloat16":
        assert dtype.itemsize == np.dtype(name).itemsize


@pytest.mark.parametrize(
    ("name", "floating", "integer", "summable"),
    [
        ("bool", False, True, False),
        ("uint8", False, True, True),
        ("int64", False, True, True),
        ("bfloat16", True, False, True),
        ("float64", True, False, True),
        ("float8_e5m2", True, False, False),
    ],
)
def test_predicates(name: str, floating: bool, integer: bool, summable: bool) -> None:
    dtype = dtype_of(name)
    assert (dtype.is_floating, dtype.is_integer, dtype.summable) == (floating, integer, summable)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("float23", r"dtype 'float23' is not supported; there are bool, int8, .*did you mean 'float"),
        ("complex64", r"dtype complex64 is not supported; pass the real and the imaginary part"),
        ("", r"dtype '' is not supported; there are bool"),
        (None, r"dtype None is not supported"),
        (["a"], r"dtype \['a'\] is not supported"),
    ],
)
def test_unknown_names_are_refused(name: str, text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        dtype_of(name)
