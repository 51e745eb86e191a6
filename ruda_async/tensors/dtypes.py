"""The element types that travel, by the names that numpy and torch share."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, TypeAlias

from ..errors import TensorContractError

__all__ = ["DTYPES", "DType", "Kind", "dtype_of"]

Kind: TypeAlias = Literal["float", "int", "bool", "float8"]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type.

    Attributes:
        name: as numpy, ml_dtypes and torch spell it, such as ``"float32"``.
        itemsize: bytes of one element.
        kind: ``"float"``, ``"int"``, ``"bool"`` or ``"float8"`` (floats that are moved, never added).
    """

    name: str
    itemsize: int
    kind: Kind

    @property
    def is_floating(self) -> bool:
        """Whether ``*_float`` operations take it: all floats, float8 too."""
        return self.kind == "float" or self.kind == "float8"

    @property
    def is_integer(self) -> bool:
        """Whether ``*_int`` operations take it: integers and bool."""
        return self.kind == "int" or self.kind == "bool"

    @property
    def summable(self) -> bool:
        """Whether sums and products are defined: integers and floats, not bool and not float8."""
        return self.kind == "float" or self.kind == "int"


def _all_dtypes() -> tuple[DType, ...]:
    integers = [DType(f"{sign}int{8 * size}", size, "int") for sign in ("", "u") for size in (1, 2, 4, 8)]
    floats = [("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8)]
    float8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    return (
        DType("bool", 1, "bool"),
        *integers,
        *(DType(name, size, "float") for name, size in floats),
        *(DType(name, 1, "float8") for name in float8),
    )


#: Every element type there is, by name.
DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _all_dtypes()}


def dtype_of(name: str) -> DType:
    """The element type called `name`.

    Raises:
        TensorContractError: there is none; the text lists those there are.
    """
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        pass
    if isinstance(name, str) and name.startswith("complex"):
        raise TensorContractError(
            f"dtype {name} is not supported; pass the real and the imaginary part as two tensors, or view "
            "them as one of floats with a trailing axis of length 2"
        )
    near = get_close_matches(name, DTYPES, n=1) if isinstance(name, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise TensorContractError(f"dtype {name!r} is not supported; there are {', '.join(DTYPES)}{hint}")
