"""The choice of an algorithm, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..tuning.numbers import numbers_of, seconds
from .selector import choose

if TYPE_CHECKING:
    from ..transport.base import Capabilities
    from .operation import Settings

__all__ = ["explanation"]


def explanation(
    operation: str, nbytes: int, size: int, capabilities: Capabilities, settings: Settings
) -> str:
    """Which algorithm a call would run, why, and what the model expects of each that could.

    Args:
        operation: the canonical name.
        nbytes: bytes of this rank's input.
        size: the number of ranks.
        capabilities: the transport's, with the costs that all ranks agreed on.
        settings: the communicator's.

    Raises:
        ConfigError: the operation is not known.
    """
    choice = choose(operation, nbytes, size, capabilities, settings, exact=settings.order == "exact")
    estimates = ", ".join(f"{name} {seconds(time)}" for name, time in choice.estimates)
    return (
        f"{operation} of {nbytes} bytes over {size} ranks: {choice.algorithm}, {choice.reason}; estimated "
        f"{estimates} ({numbers_of(capabilities)})"
    )
