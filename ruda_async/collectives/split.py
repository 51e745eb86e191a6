"""What `split` has to agree on: who wants to be in which group, in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import TensorContractError
from .objects import AllGatherObject

if TYPE_CHECKING:
    from .operation import Settings

__all__ = ["Split"]


class Split(AllGatherObject):
    """One rank's color (None to be left out) and key.

    The result is every rank's ``[color, key]``, in rank order.
    """

    __slots__ = ("_color", "_key")

    operation = "split"

    def __init__(self, color: int | None, key: int) -> None:
        super().__init__([color, key])
        self._color = color
        self._key = key

    def prepare(self, rank: int, size: int, settings: Settings) -> bytes:
        """Check that color and key are integers; see `collectives.request.Request`.

        Raises:
            TensorContractError: they are not.
        """
        for name, number in (("color", self._color), ("key", self._key)):
            optional = name == "color" and number is None
            if not optional and (isinstance(number, bool) or not isinstance(number, int)):
                raise TensorContractError(f"split's {name} is an integer, not {number!r}")
        return super().prepare(rank, size, settings)
