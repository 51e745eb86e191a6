"""Which operator is defined for which dtype, and what refusals say."""

from __future__ import annotations

from typing import Any

import pytest

from ruda_async.errors import TensorContractError
from ruda_async.tensors import OPERATORS, check_operator, reducer
from ruda_async.tensors.dtypes import DTYPES

DEFINED = {
    "float": {"sum", "mean", "max", "min", "prod"},
    "int": {"sum", "max", "min", "prod", "band", "bor", "bxor"},
    "bool": {"max", "min", "band", "bor", "bxor"},
    "float8": set(),
}


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("operator", OPERATORS)
def test_exactly_the_defined_operators_are_accepted(dtype: str, operator: str) -> None:
    if operator in DEFINED[DTYPES[dtype].kind]:
        check_operator(operator, dtype)
    else:
        with pytest.raises(TensorContractError, match=rf"^{operator} of {dtype} is not defined: "):
            check_operator(operator, dtype)
        with pytest.raises(TensorContractError, match="is not defined"):
            reducer(dtype, operator, 2)


@pytest.mark.parametrize(
    ("operator", "dtype", "text"),
    [
        ("mean", "int32", r"use sum and divide by the world size, or convert to float"),
        ("sum", "bool", r"use max or bor for any, min or band for all, or convert to int64 to count"),
        ("max", "float8_e5m2", r"convert to bfloat16 or float32 first"),
        ("bxor", "float32", r"view the bits as integers"),
        ("maximum", "float32", r"operator 'maximum' is unknown; there are sum, mean, .*did you mean 'max'\?"),
        ("avg", "float32", r"operator 'avg' is unknown"),
        (3, "float32", r"operator 3 is unknown"),
        ("sum", "complex64", r"dtype complex64 is not supported"),
    ],
)
def test_refusals_say_what_to_do(operator: Any, dtype: str, text: str) -> None:
    with pytest.raises(TensorContractError, match=text):
        check_operator(operator, dtype)
