"""Conversions of float16 and bfloat16, bit by bit, against torch's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ruda_async.tensors import reducer


def view(array: Any) -> memoryview:
    return array.view(np.uint8).data


def rounded(values: Any) -> Any:
    """float32 → the bits of bfloat16, by the reducer."""
    out = np.empty(len(values), np.uint16)
    reducer("bfloat16", "sum", 2).store(view(out), view(values))
    return out


def assert_rounds_as_torch(values: Any) -> None:
    torch = pytest.importorskip("torch")
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    nans = np.isnan(values)
    ours = rounded(values)
    assert np.array_equal(ours[~nans], expected[~nans])
    assert (ours[nans] == 0x7FC0).all()


def test_bfloat16_rounding_at_every_exponent_and_tie() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        assert_rounds_as_torch((upper | np.uint32(lower)).view(np.float32))


@settings(max_examples=50)
@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=200))
def test_bfloat16_rounding_of_random_bits(bits: list[int]) -> None:
    assert_rounds_as_torch(np.array(bits, np.uint32).view(np.float32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_widening_is_exact(dtype: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    arithmetic = reducer(dtype, "sum", 2)
    assert (arithmetic.widens, arithmetic.partial_dtype, arithmetic.partial_itemsize) == (True, "float32", 4)
    partial = np.empty(1 << 16, np.float32)
    arithmetic.load(view(partial), view(every))
    back = np.empty(1 << 16, np.uint16)
    arithmetic.store(view(back), view(partial))
    numbers = ~np.isnan(partial)
    assert np.array_equal(back[numbers], every[numbers])
