"""What a node tells of its calls to whoever makes spans of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from ..call import Operation
    from .recorder import Transfer

__all__ = ["Call", "Spans"]

Call: TypeAlias = "Operation | Transfer"


class Spans(Protocol):
    """Hears of every call of a node, in the task that makes it."""

    def begin(self, call: Call) -> None:
        """A call has been made."""
        ...

    def end(self, call: Call, error: BaseException | None) -> None:
        """It is over: it has its result, or raises `error`."""
        ...
