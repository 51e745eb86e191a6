"""What every collective has in common: a request is checked, fingerprinted, then run over a link.

A request object is one call by one rank. `prepare` checks the arguments, before anything is sent, and
returns the fingerprint that all ranks must share; `run` moves the data. The communicator knows
nothing more about any operation.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import msgpack

from .operation import Link

__all__ = ["Fingerprint", "Request", "decode_fingerprint", "fingerprint"]

R_co = TypeVar("R_co", covariant=True)


class Fingerprint(NamedTuple):
    """What all ranks of one collective must agree on, in the order in which differences are reported.

    Attributes:
        operation: the method's name, such as ``"all_reduce"``.
        dtype: the tensor's dtype name, or ``""`` where there is no tensor.
        shape: the shape (or the trailing shape) that must be equal, or None where there is none.
        detail: pairs of further arguments, such as ``(("operator", "sum"), ("root", 0))``.
    """

    operation: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    detail: tuple[tuple[str, Any], ...] = ()


class Request(Protocol[R_co]):
    """One rank's call of one collective."""

    operation: str

    def prepare(self, rank: int, size: int, settings: Any) -> bytes:
        """Check the input and return the encoded fingerprint; nothing was sent yet.

        Raises:
            TensorContractError: the input is outside the contract; the text names value and remedy.
        """
        ...

    async def run(self, link: Link) -> R_co:
        """Move the data and return this rank's result."""
        ...


@lru_cache(maxsize=4096)
def fingerprint(
    operation: str,
    dtype: str = "",
    shape: tuple[int, ...] | None = None,
    detail: tuple[tuple[str, Any], ...] = (),
) -> bytes:
    """Encode a `Fingerprint`; cached, because servers repeat the same few."""
    encoded: bytes = msgpack.packb([operation, dtype, shape, detail])
    return encoded


def decode_fingerprint(head: bytes) -> Fingerprint | None:
    """Read a fingerprint back, or None where the bytes are not one. For error texts."""
    try:
        operation, dtype, shape, detail = msgpack.unpackb(head, strict_map_key=False)
        return Fingerprint(
            str(operation),
            str(dtype),
            None if shape is None else tuple(int(n) for n in shape),
            tuple((str(name), value) for name, value in detail),
        )
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
