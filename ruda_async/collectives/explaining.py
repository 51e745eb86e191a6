"""The choice of an algorithm, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..transport.provider import NativeCall
from ..tuning.numbers import numbers_of, seconds
from .selector import choose, choose_provider

if TYPE_CHECKING:
    from ..transport.base import Capabilities
    from .native import Natives
    from .operation import Settings

__all__ = ["explanation"]


def explanation(
    operation: str,
    nbytes: int,
    size: int,
    capabilities: Capabilities,
    settings: Settings,
    natives: Natives,
) -> str:
    """Which algorithm a call would run, why, and what the model expects of each that could.

    Args:
        operation: the canonical name.
        nbytes: bytes of this rank's input.
        size: the number of ranks.
        capabilities: the transport's, with the costs that all ranks agreed on.
        settings: the communicator's.
        natives: the channel's providers.

    Raises:
        ConfigError: the operation is not known.
    """
    exact = settings.order == "exact"
    choice = choose(operation, nbytes, size, capabilities, settings, exact=exact, providers=natives.providers)
    # A float32 sum stands for all dtypes and operators.
    operator = "sum" if operation in ("all_reduce", "reduce", "reduce_scatter") else None
    root = 0 if operation in ("reduce", "broadcast", "gather", "scatter") else None
    call = NativeCall(operation, size, "float32", nbytes, operator, root)
    provider, why = choose_provider(natives.providers, call, natives.members, settings, exact)
    if provider is not None:
        return f"{operation} of {nbytes} bytes over {size} ranks: {provider.name}, {why}"
    estimates = ", ".join(f"{name} {seconds(time)}" for name, time in choice.estimates)
    return (
        f"{operation} of {nbytes} bytes over {size} ranks: {choice.algorithm}, {choice.reason}{why}; "
        f"estimated {estimates} ({numbers_of(capabilities)})"
    )
